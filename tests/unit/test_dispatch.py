"""Admission by the memory budget: order, urgency, and reading ahead. Tasks: results, sizes, and their pool."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Literal
from unittest.mock import Mock

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.shared_memory import Arena, Lease
from headrace.engine.scheduler.dispatch import RAMP_BYTES, Budget, Dispatch, Pace, TaskPool
from headrace.engine.scheduler.epoch_spec import BatchSpec, Learned
from headrace.workers.tasks import Finish, Reply, Task

MiB = 2**20


class House:
    """Counts what is held, as the arena does."""

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.budget = Budget(limit, lambda: self.held, lambda: self.held)
        self.let_in: list[Any] = []

    def ask(self, name: Any, size: int, rank: tuple[int, ...] = (0,), **when: Callable[[], bool]) -> Awaitable[None]:
        def grant() -> None:
            self.held += size
            self.let_in.append(name)

        rules: dict[str, Callable[[], bool]] = {"is_urgent": lambda: False, "is_early": lambda: False, **when}
        return asyncio.ensure_future(self.budget.admit(size, rank, grant, **rules))

    async def release(self, size: int) -> None:
        self.held -= size
        self.budget.changed()
        await turns()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_bytes_are_admitted_up_to_the_limit() -> None:
    house = House(100)
    asked = [house.ask(k, 40) for k in range(5)]
    await turns()
    assert house.let_in == [0, 1]
    await house.release(40)
    assert house.let_in == [0, 1, 2]
    await house.release(80)
    await asyncio.gather(*asked)
    assert house.let_in == [0, 1, 2, 3, 4]


async def test_results_are_admitted_while_read_ahead_waits() -> None:
    house = House(4 * RAMP_BYTES)
    asked = [house.ask(k, RAMP_BYTES) for k in range(2)]
    await turns()
    assert house.let_in == [0]  # no more is read ahead
    assert house.budget.has_room(3 * RAMP_BYTES)
    assert not house.budget.has_room(3 * RAMP_BYTES + 1)
    await house.release(RAMP_BYTES)
    await asyncio.gather(*asked)


async def test_the_lowest_rank_goes_first_and_cancelled_requests_are_skipped() -> None:
    house = House(10)
    await house.ask("first", 10)
    later = [house.ask(rank, 10, (rank,)) for rank in (5, 3, 9, 1)]
    gone = house.ask("gone", 10, (0,))
    await turns()
    gone.cancel()
    await turns()
    for _ in later:
        await house.release(10)
    assert house.let_in == ["first", 1, 3, 5, 9]


async def test_a_large_request_is_not_passed_by_small_ones() -> None:
    house = House(100)
    await house.ask("begin", 50)
    large, small = house.ask("large", 80, (1,)), house.ask("small", 10, (2,))
    await turns()
    assert house.let_in == ["begin"]
    await house.release(50)
    await asyncio.gather(large, small)
    assert house.let_in == ["begin", "large", "small"]


async def test_an_urgent_request_is_admitted_over_the_limit_and_before_others() -> None:
    house = House(100)
    await house.ask("begin", 100)
    waits = house.ask("waits", 50, (0,))
    await house.ask("urgent", 5000, (7,), is_urgent=lambda: True)
    assert house.let_in == ["begin", "urgent"]
    assert house.held == 5100
    await house.release(5100)
    await waits


async def test_early_request_waits_without_delaying_others() -> None:
    house = House(100)
    is_early = True
    early = house.ask("early", 1, (0,), is_early=lambda: is_early)
    await house.ask("other", 1, (5,))
    await house.ask("urgent", 1000, (9,), is_urgent=lambda: True)
    assert house.let_in == ["other", "urgent"]
    is_early = False
    await house.release(1001)
    await early


async def test_memory_error_is_raised_in_the_request() -> None:
    house, grant = House(100), Mock(side_effect=MemoryError("none left"))
    with pytest.raises(MemoryError, match="none left"):
        await house.budget.admit(1, (0,), grant, is_urgent=lambda: False, is_early=lambda: False)
    await house.ask("next", 1)


async def test_reading_ahead_begins_small_and_grows_while_workers_starve() -> None:
    house = House(10**12)
    await house.ask(0, RAMP_BYTES)
    waits = house.ask(1, MiB)
    await turns()
    assert house.let_in == [0]
    house.budget.starved()
    house.budget.changed()
    await waits
    house.budget.widen(1000 * MiB)
    await house.ask(2, 900 * MiB)


class OneAnswer:
    """Workers that hold what they make."""

    def __init__(self) -> None:
        self.abandoned, self.places = list[Task](), list[Lease]()
        self.abandon = self.abandoned.append
        self.kind: Literal["held", "written"] = "held"

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply:
        return Reply(self.kind, size=64, busy_s={"map(f)": 2.0, "collate": 5.0})

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


async def test_reading_ahead_does_not_grow_while_workers_wait_for_the_trainer(works: OneAnswer, arena: Arena) -> None:
    house = House(10**12)
    await house.ask(0, RAMP_BYTES)
    house.ask(1, MiB)
    await turns()
    works.kind, dispatch = "written", Dispatch(works, house.budget, arena)
    dispatch.has_begun, dispatch.has_waiting = True, lambda: True
    await dispatch.work(Task(0, 0, 0, Finish.SLOTS, []))
    await turns()
    assert house.let_in == [0]
    dispatch.has_waiting = lambda: False
    await dispatch.work(Task(0, 0, 1, Finish.SLOTS, []))
    await turns()
    assert house.let_in == [0, 1]


async def test_task_whose_result_has_no_location_is_abandoned(works: OneAnswer, arena: Arena) -> None:
    async def nowhere(reply: Reply) -> None:
        return None

    dispatch, task = Dispatch(works, House(100).budget, arena), Task(1, 0, 0, Finish.SLOTS, [])
    assert (await dispatch.work(task, nowhere)).kind == "mismatch"
    assert works.abandoned == [task]
    assert dispatch.under_way == 0


async def test_samples_are_written_to_their_lease_and_timed(works: OneAnswer, arena: Arena) -> None:
    reply, part = await Dispatch(works, House(100).budget, arena).samples(
        Task(1, 0, 0, Finish.SAMPLES, []), lambda: False
    )
    assert part is not None
    assert (part.count, part.lease, reply.made_s) == (1, works.places[0], 2.0)
    part.release()
    works.places[0].release()


async def test_task_of_a_cancelled_request_is_abandoned(works: OneAnswer, arena: Arena) -> None:
    dispatch, task = Dispatch(works, House(10).budget, arena), Task(1, 0, 0, Finish.SAMPLES, [])
    waiting = asyncio.ensure_future(dispatch.samples(task, lambda: False))
    await turns(3)
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
    for most, grown in (64, [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]), (5, [1, 1, 2, 4, 5, 5]):
        pace = Pace(most)
        pace.learn(1, 1e-6, 10)
        assert sizes(pace, len(grown)) == grown


@pytest.mark.parametrize(("learned", "most", "most_awaited"), [
    ([(64, 64 * 0.05, 100)], [1], [1]),  # they take long
    ([(1, 1e-6, 4 * 2**20)], [1], [1]),  # they are many bytes
    ([(10, 10 * 2e-3, 10)], [10], [2]),
    ([(4, 1e-9, 4 * 2**16)], [32], [4]),
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


class Thing:
    """An argument of work."""


async def test_pool_releases_finished_arguments() -> None:
    things: list[weakref.ref[Thing]] = []

    async def work(thing: Thing) -> None:
        things.append(weakref.ref(thing))

    async with anyio.create_task_group() as group:
        pool = TaskPool(group)
        for _ in range(2):
            for _ in range(2):
                pool.start_soon(work, Thing())
            await turns(4)
        gc.collect()
        assert [thing() for thing in things] == [None] * 4
        group.cancel_scope.cancel()


class OnceCancelled:
    """A group whose tasks are cancelled once, and end when their wait does."""

    def __init__(self) -> None:
        self.cancel_scope = anyio.CancelScope()
        self.tasks: list[asyncio.Task[None]] = []

    def start_soon(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work(*args)))


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_pooled_task_ends_after_its_group_is_cancelled(is_cancelled: bool) -> None:
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await gate.wait()

    group, gate = OnceCancelled(), asyncio.Event()
    TaskPool(group).start_soon(work)  # type: ignore[arg-type]
    await turns(2)
    if is_cancelled:
        group.cancel_scope.cancel()
        group.tasks[0].cancel()
    gate.set()
    await turns(3)
    assert [task.done() for task in group.tasks] == [is_cancelled]
    group.tasks[0].cancel()
    await asyncio.wait(group.tasks)
