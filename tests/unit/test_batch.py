"""Open batches are whole in any order of samples and failures, and their tasks end once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.shared_memory import Arena, Lease
from headrace.engine.scheduler.batch_work import BatchState, OpenBatch
from headrace.engine.scheduler.budget import Budget
from headrace.engine.scheduler.dispatch import Dispatch
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import ListPart
from headrace.workers.tasks import Finish, Reply, Task


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.sets(st.integers(0, 23), max_size=3))
def test_batch_is_whole_up_to_its_first_failure(data: st.DataObject, sizes: Sequence[int], failing: set[int]) -> None:
    size = sum(sizes)
    batch, came = OpenBatch(0, 0, size, size), set[int]()
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    wanted = size
    for k in data.draw(st.permutations(range(len(sizes)))):
        slots = range(starts[k], starts[k] + sizes[k])
        batch.take_in(starts[k], ListPart(list(slots)))
        came |= set(slots)
        for slot in sorted(failing.intersection(slots)):
            batch.end_with(slot, PackedError(b"%d" % slot))
            wanted = min(wanted, slot + 1)
        assert batch.wanted == wanted
        assert batch.is_whole == came.issuperset(range(wanted))
        held = sorted(slot for part in batch.parts.values() for slot in part.samples[part.start :][: part.count])
        assert held == sorted(slot for slot in came if slot < wanted)
    assert batch.arrived == size
    assert not batch.is_over
    batch.state = BatchState.READY
    assert batch.is_over


class OneAnswer:
    """Workers that hold what they make."""

    def __init__(self) -> None:
        self.abandoned: list[Task] = []
        self.places: list[Lease] = []

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply:
        return Reply("held", size=64, busy_s={"map(f)": 2.0, "collate": 5.0})

    async def place(self, task: Task, place: Lease) -> Reply:
        self.places.append(place)
        return Reply("written", kept=[0], lengths=(8,), busy_s={"write": 1.0})

    def abandon(self, task: Task) -> None:
        self.abandoned.append(task)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    assert arena.leased_bytes == 0
    arena.close()


@pytest.fixture
def works() -> OneAnswer:
    return OneAnswer()


@pytest.fixture
def dispatch(works: OneAnswer, arena: Arena) -> Dispatch:
    return Dispatch(works, Budget(100, lambda: 0, lambda: 0), arena)


def test_task_is_abandoned_where_its_result_has_no_place(works: OneAnswer, dispatch: Dispatch) -> None:
    async def nowhere(reply: Reply) -> None:
        return None

    task = Task(1, 0, 0, Finish.SLOTS, [])
    assert asyncio.run(dispatch.work(task, nowhere)).kind == "mismatch"
    assert works.abandoned == [task]
    assert dispatch.under_way == 0


def test_samples_are_written_to_their_lease_and_timed(works: OneAnswer, dispatch: Dispatch) -> None:
    reply, part = asyncio.run(dispatch.samples(Task(1, 0, 0, Finish.SAMPLES, []), lambda: False))
    assert part is not None
    assert (part.count, part.lease, reply.made_s) == (1, works.places[0], 2.0)
    part.release()
    works.places[0].release()


def test_task_of_a_cancelled_request_is_abandoned(works: OneAnswer, arena: Arena) -> None:
    async def main() -> None:
        dispatch = Dispatch(works, Budget(10, lambda: 0, lambda: 0), arena)
        task = Task(1, 0, 0, Finish.SAMPLES, [])
        waiting = asyncio.ensure_future(dispatch.samples(task, lambda: False))
        for _ in range(3):
            await asyncio.sleep(0)
        assert dispatch.under_way == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert works.abandoned == [task]
        assert dispatch.under_way == 0

    asyncio.run(main())
