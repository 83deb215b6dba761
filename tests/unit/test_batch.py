"""Batches of the engine and their tasks: boundaries, sizes of tasks, and how they end; outlets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.shared_memory import Arena, Lease
from headrace.delivery.channel import ChannelFailedError
from headrace.engine.scheduler.assembler import Outlet
from headrace.engine.scheduler.batch_work import BatchState, OpenBatch
from headrace.engine.scheduler.dispatch import Budget, Dispatch, Pace
from headrace.engine.scheduler.epoch_spec import BatchSpec, GroupStage, Learned
from headrace.engine.scheduler.position_map import BatchBoundaries, EvenBoundaries, GivenBoundaries, PositionMap
from headrace.ops.batch import EvenBatcher
from headrace.state.state import ResumePoint
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import ListPart
from headrace.workers.task_runner import open_part
from headrace.workers.tasks import Finish, Reply, Task


def check_boundaries(boundaries: BatchBoundaries, sizes: list[int]) -> None:
    position = 0
    for number, size in enumerate(sizes):
        assert boundaries.start(number) == position
        assert boundaries.size(number) == size
        assert [boundaries.find(position + slot) for slot in range(size)] == [(number, slot) for slot in range(size)]
        position += size
    assert boundaries.find(position) == (len(sizes), 0)


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 9))
def test_boundaries_find_every_sample_next_to_empty_batches(sizes: list[int], size: int) -> None:
    check_boundaries(EvenBoundaries(size), [size] * len(sizes))
    boundaries = GivenBoundaries()
    assert [boundaries.add(size) for size in sizes] == list(range(len(sizes)))
    check_boundaries(boundaries, sizes)
    assert boundaries.start(len(sizes) + 3) == sum(sizes)


async def settle(turns: int = 5) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@given(st.data(), st.lists(st.integers(1, 5), max_size=6))
async def test_outlet_gives_samples_in_order_and_resume_points(data: st.DataObject, sizes: list[int]) -> None:
    starts, position_map = list(itertools.accumulate(sizes, initial=0)), PositionMap()
    outlet, got, ends = Outlet(position_map, Budget(100, int, int)), list[Any](), list[None]()
    outlet.attach(lambda: None, lambda: ends.append(None))

    async def consume() -> None:
        while (part := await outlet.take()) is not None:
            got.extend(open_part(part))
            count = data.draw(st.integers(len(got) - part.count + 1, len(got)))
            begin = ResumePoint(batches=3, samples=4, skipped=(1, 0))
            after = outlet.after(count, begin)
            assert (after.covers, after.used, after.skipped) == (((0, count),), count, (1, 0))
            assert (after.batches, after.samples) == (3 + count, 4 + count)

    consuming = asyncio.create_task(consume())
    await settle()
    assert outlet.lacks(None)
    assert outlet.lacks(0)
    assert not outlet.lacks(1)
    for k in data.draw(st.permutations(range(len(sizes)))):
        position_map.put(starts[-1])
        outlet.add(starts[k], ListPart(list(range(starts[k], starts[k + 1]))))
        await settle(data.draw(st.integers(0, 2)))
    assert not ends
    outlet.end(starts[-1])
    await consuming
    assert got == list(range(starts[-1]))
    assert ends
    assert not outlet.has_waiting


@pytest.mark.asyncio
async def test_outlet_gives_the_error_of_its_epoch_once() -> None:
    outlet = Outlet(PositionMap(), Budget(100, int, int))
    taking = asyncio.create_task(outlet.take())
    await settle()
    outlet.fail(PackedError(b"why"))
    outlet.fail(PackedError(b"later"))
    with pytest.raises(ChannelFailedError) as caught:
        await taking
    assert caught.value.failure == PackedError(b"why")
    assert await outlet.take() is None


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
        self.abandoned, self.places = list[Task](), list[Lease]()
        self.abandon = self.abandoned.append

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply:
        return Reply("held", size=64, busy_s={"map(f)": 2.0, "collate": 5.0})

    async def place(self, task: Task, place: Lease) -> Reply:
        self.places.append(place)
        return Reply("written", kept=[0], lengths=(8,), busy_s={"write": 1.0})


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    assert arena.leased_bytes == 0
    arena.close()


@pytest.fixture
def works() -> OneAnswer:
    return OneAnswer()


def dispatch_of(works: OneAnswer, arena: Arena, budget: int = 100) -> Dispatch:
    return Dispatch(works, Budget(budget, lambda: 0, lambda: 0), arena)


@pytest.mark.asyncio
async def test_task_whose_result_has_no_location_is_abandoned(works: OneAnswer, arena: Arena) -> None:
    async def nowhere(reply: Reply) -> None:
        return None

    dispatch, task = dispatch_of(works, arena), Task(1, 0, 0, Finish.SLOTS, [])
    assert (await dispatch.work(task, nowhere)).kind == "mismatch"
    assert works.abandoned == [task]
    assert dispatch.under_way == 0


@pytest.mark.asyncio
async def test_samples_are_written_to_their_lease_and_timed(works: OneAnswer, arena: Arena) -> None:
    reply, part = await dispatch_of(works, arena).samples(Task(1, 0, 0, Finish.SAMPLES, []), lambda: False)
    assert part is not None
    assert (part.count, part.lease, reply.made_s) == (1, works.places[0], 2.0)
    part.release()
    works.places[0].release()


@pytest.mark.asyncio
async def test_task_of_a_cancelled_request_is_abandoned(works: OneAnswer, arena: Arena) -> None:
    dispatch, task = dispatch_of(works, arena, budget=10), Task(1, 0, 0, Finish.SAMPLES, [])
    waiting = asyncio.ensure_future(dispatch.samples(task, lambda: False))
    await settle(3)
    assert dispatch.under_way == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert works.abandoned == [task]
    assert dispatch.under_way == 0


def sizes(pace: Pace, count: int) -> list[int]:
    got = []
    for _ in range(count):
        got.append(pace.size)
        pace.begin()
    return got


def test_tasks_grow_from_one_sample_to_the_limit() -> None:
    assert sizes(Pace(64), 10) == [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert sizes(Pace(5), 6) == [1, 1, 2, 4, 5, 5]


@pytest.mark.parametrize(("learned", "most", "most_awaited"), [
    ([(64, 64 * 0.05, 100)], [1], [1]),  # they take long
    ([(1, 1e-6, 4 * 2**20)], [1], [1]),  # they are many bytes
    ([(10, 10 * 2e-3, 10)], [10], [2]),
    ([(4, 1e-9, 4 * 2**15)], [32], [8]),
    ([(1, 1e-3, 10)], [20], [5]),
    ([(1, 4e-3, 10), (1, 0.0, 10), (1, 20e-3, 10)], [5, 10, 1], [1, 2, 1]),  # more counts at once, less gradually
])  # fmt: skip
def test_size_of_a_task_follows_time_and_bytes_of_samples(
    learned: list[tuple[int, float, int]], most: list[int], most_awaited: list[int]
) -> None:
    for is_awaited, expected in ((False, most), (True, most_awaited)):
        pace = Pace(64, is_awaited=is_awaited)
        sizes(pace, 10)
        for one, size in zip(learned, expected, strict=True):
            pace.learn(*one)
            assert pace.size == size


def spec(workers: int, depth: int, *, is_adaptive: bool) -> BatchSpec:
    return BatchSpec(chain=1, batch_size=8, workers=workers, is_adaptive=is_adaptive, depth=depth)


@given(
    workers=st.integers(1, 64),
    depth=st.integers(0, 64),
    batch_size=st.integers(1, 5000),
    sample_s=st.floats(1e-9, 10.0),
    is_adaptive=st.booleans(),
)
def test_a_task_has_samples_of_one_batch(
    workers: int, depth: int, batch_size: int, sample_s: float, is_adaptive: bool
) -> None:
    batches, learned = spec(workers, depth, is_adaptive=is_adaptive), Learned(use_slots=True)
    before = batches.chunk(batch_size, learned.sample_s)
    learned.learn_time(sample_s, 1)
    after = batches.chunk(batch_size, learned.sample_s)
    assert 1 <= before <= batch_size
    assert 1 <= after <= batch_size
    assert is_adaptive or after == before


def test_heavy_samples_are_divided_among_the_workers() -> None:
    learned = Learned(use_slots=True)
    learned.learn_time(0.5, 100)
    assert spec(2, 8, is_adaptive=True).chunk(512, learned.sample_s) == 128


def test_slow_samples_of_groups_are_made_in_small_tasks() -> None:
    groups = BatchSpec(
        chain=1,
        batch_size=1,
        workers=1,
        inner=(GroupStage(2, lambda: EvenBatcher(4, drop_last=False), "batch(4)"),),
        look_ahead=64,
        is_adaptive=True,
        depth=8,
    )
    assert groups.gathered(1) == groups.together_before == 64
    for sample_s, most in ((0.5, 1), (0.01, 2), (1e-3, 20), (1e-5, 64)):
        pace = Pace(groups.together_before)
        assert pace.size == 1  # not known until the first ones are made
        for _ in range(10):
            pace.begin()
            pace.learn(1, sample_s, 100)
        assert pace.size == min(most, max(1, int(20e-3 / sample_s)))
