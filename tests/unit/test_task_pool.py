"""Tasks that do one thing after another: what is done is what a task of its own for each would do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Coroutine

import anyio
import pytest

from headrace.engine.scheduler.dispatch import TaskPool

pytestmark = pytest.mark.asyncio


class Thing:
    """An argument of work."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


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
