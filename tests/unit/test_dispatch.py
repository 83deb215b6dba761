"""Admission by the memory budget: order, urgency, and reading ahead. Tasks that do one thing after another."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import anyio
import pytest

from headrace._util.shared_memory import Arena, Lease
from headrace.engine.scheduler.dispatch import RAMP_BYTES, Budget, Dispatch, TaskPool
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


pytestmark = pytest.mark.asyncio


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


class _AtOnce:
    """Workers that do every task at once."""

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply:
        return Reply("written")

    async def place(self, task: Task, place: Lease) -> Reply:
        return Reply("written")

    def abandon(self, task: Task) -> None: ...


async def test_reading_ahead_does_not_grow_while_workers_wait_for_the_trainer() -> None:
    house = House(10**12)
    await house.ask(0, RAMP_BYTES)
    house.ask(1, MiB)
    await turns()
    dispatch = Dispatch(_AtOnce(), house.budget, Arena())
    dispatch.has_begun, dispatch.has_waiting = True, lambda: True
    await dispatch.work(Task(0, 0, 0, Finish.SLOTS, []))
    await turns()
    assert house.let_in == [0]
    dispatch.has_waiting = lambda: False
    await dispatch.work(Task(0, 0, 1, Finish.SLOTS, []))
    await turns()
    assert house.let_in == [0, 1]


class Thing:
    """An argument of work."""


async def test_pool_runs_each_call_once_and_concurrently() -> None:
    began, ended = list[int](), list[int]()

    async def work(number: int, gate: asyncio.Event) -> None:
        began.append(number)
        await gate.wait()
        ended.append(number)

    async with anyio.create_task_group() as group:
        pool = TaskPool(group)
        for first in (0, 10, 20):
            gate = asyncio.Event()
            for number in range(first, first + 3 + first // 10):
                pool.start_soon(work, number, gate)
            await turns(3)
            assert began[len(ended) :] == list(range(first, first + 3 + first // 10))
            gate.set()
            await turns(3)
        group.cancel_scope.cancel()
    assert sorted(ended) == began == [0, 1, 2, *range(10, 14), *range(20, 25)]


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


@pytest.mark.parametrize("is_idle", [False, True])
async def test_error_in_a_pool_ends_the_group(is_idle: bool) -> None:
    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    with pytest.raises(BaseExceptionGroup) as raised:
        async with anyio.create_task_group() as group:
            pool = TaskPool(group)
            if is_idle:
                pool.start_soon(work, None)
                await turns(4)
            pool.start_soon(work, ValueError("no"))
            await anyio.sleep_forever()
    assert [str(error) for error in raised.value.exceptions] == ["no"]
