"""Iterators outlive event loops and cancellations."""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from builders.loops import flat, lists, rest_of
from builders.numbers import Made, Numbers
from torch.utils.data import Dataset, IterableDataset

import headrace as hr

COUNT = 20
LIST = list(range(COUNT))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(COUNT))


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "no workers": lambda: hr.DataLoader(LIST, 4),
    "iterable, no workers": lambda: hr.DataLoader(Counting(), 4),
    "workers": lambda: hr.DataLoader(LIST, 4, num_workers=2),
    "threads": lambda: hr.DataLoader(LIST, 4, num_workers=2, workers="thread"),
    "economic": lambda: hr.DataLoader(LIST, 4, num_workers=2, economic=True),
    "asynchronous data set": lambda: hr.DataLoader(Numbers(COUNT), 4),
    "stream": lambda: hr.DataLoader(Numbers(COUNT).filter(lambda number: number >= 0), 4),
}
pytestmark = pytest.mark.usefixtures("warm_server")
every_kind = pytest.mark.parametrize("kind", LOADERS)
leaves_threads = pytest.mark.may_leave(
    threads="^(Trio|AnyIO) .*thread", reason="libraries keep idle threads for a while"
)


async def take(batches: Any, count: int | None = None) -> list[int]:
    """The numbers of the next batches; None: of all that are left."""
    got: list[int] = []
    if count != 0:
        async for batch in batches:
            got += batch.tolist()
            if count is not None and len(got) >= 4 * count:
                break
    return got


@pytest.mark.slow
@leaves_threads
@pytest.mark.parametrize("order", [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "asyncio"), ("trio", "trio")])
@every_kind
def test_another_event_loop_continues_an_iterator_when_the_first_has_ended(kind: str, order: tuple[str, str]) -> None:
    with LOADERS[kind]() as loader:
        batches = aiter(loader)
        first = anyio.run(take, batches, 2, backend=order[0])
        assert first == list(range(8))
        assert first + anyio.run(take, batches, backend=order[1]) == list(range(COUNT))
        assert anyio.run(take, batches, backend=order[1]) == [], "it is over"


@pytest.mark.slow
@every_kind
def test_another_event_loop_continues_an_iterator_while_a_task_of_the_first_waits(kind: str) -> None:
    """As where a loop is stopped and left, and nobody cancels its tasks."""

    async def begin() -> asyncio.Task[Any]:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        return waiting

    with LOADERS[kind]() as loader:
        batches = aiter(loader)
        left = asyncio.new_event_loop()
        waiting = left.run_until_complete(begin())
        got = waiting.result().tolist() if waiting.done() else []
        got += asyncio.run(take(batches))
        waiting.cancel()
        left.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
        left.run_until_complete(left.shutdown_default_executor())
        left.close()
        assert got == list(range(COUNT))


class Gate:
    """Blocks the maker of number 4 until the gate is opened."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def pass_by(self, number: int) -> bool:
        if number == 4:
            self.is_reached.set()
            return self.is_open.is_set()
        return True


class Gated(Dataset[int]):
    """Numbers for the torch regime. A gate holds one of them."""

    def __init__(self, gate: Gate, fails: bool) -> None:
        self.gate, self.fails = gate, fails

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if not self.gate.pass_by(index):
            self.gate.is_open.wait()
        if self.fails and index == 4:
            raise ValueError("number 4")
        return index


def gated(gate: Gate, fails: bool) -> Made:
    async def get(key: int) -> int:
        if not gate.pass_by(key):
            await asyncio.to_thread(gate.is_open.wait)
        if fails and key == 4:
            raise ValueError("number 4")
        return key

    return Made(get, COUNT)


async def cancel_waiting(batches: Any, gate: Gate) -> None:
    """Cancel a task that waits for the gate, and open the gate."""
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.to_thread(gate.is_reached.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.is_open.set()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dataset", [Gated, gated])
def test_batch_or_its_error_is_next_after_the_task_that_waited_for_it_was_cancelled(dataset: Any, fails: bool) -> None:
    gate = Gate()
    states: list[Any] = []

    async def main() -> list[int]:
        async with hr.DataLoader(dataset(gate, fails), 4) as loader:
            batches = aiter(loader)
            got = await take(batches, 1)
            await cancel_waiting(batches, gate)
            states.append(loader.state_dict())
            if fails:
                with pytest.raises(ValueError, match="number 4"):
                    await anext(batches)
            return got + await take(batches)

    assert asyncio.run(main()) == [*range(4), *range(8 if fails else 4, COUNT)]
    if not fails:
        assert flat(lists(rest_of(hr.DataLoader(dataset(gate, False), 4), states[0]))) == list(range(4, COUNT))


@leaves_threads
def test_waiting_for_a_batch_can_be_cancelled_under_trio_and_nothing_is_lost() -> None:
    async def read() -> list[int]:
        batches = aiter(hr.DataLoader(LIST, 10, num_workers=1))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(batches)
        return await take(batches)

    assert anyio.run(read, backend="trio") == list(range(COUNT))


def test_iterator_in_a_thread_has_a_state_and_can_be_closed() -> None:
    async def main() -> None:
        loader = hr.DataLoader(LIST, 4)
        batches: Any = aiter(loader)
        with pytest.raises(hr.OptionError, match="ask its loader"):
            batches.state_dict()
        await take(batches, 2)
        assert batches.state_dict() == loader.state_dict()
        await batches.aclose()
        with pytest.raises(hr.errors.LoaderClosedError):
            await anext(batches)

    asyncio.run(main())


class OfTheCaller(hr.AsyncIterableDataset):
    """Numbers of the program's own loop, which wait there for an event."""

    loop = "caller"

    def __init__(self) -> None:
        self.is_reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def aiter(self) -> Any:
        for number in range(COUNT):
            if number == 8:
                self.is_reached.set()
                await self.go_on.wait()
            yield number


def close_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop as nobody should: without cancelling what runs there."""
    loop.run_until_complete(loop.shutdown_default_executor())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what is tried here
    loop.close()


@pytest.mark.parametrize("ending", ["cancelled", "closed", "closed while it makes a sample"])
def test_samples_of_the_callers_loop_are_an_error_after_its_end(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are neither waited for without end, nor is their end taken for that of the epoch."""
    data = OfTheCaller()
    with hr.DataLoader(data, batch_size=4) as loader:

        async def begin() -> Any:
            batches = aiter(loader)
            assert await take(batches, 1) == list(range(4))
            return batches

        if ending == "cancelled":
            batches = asyncio.run(begin())
        else:
            loop = asyncio.new_event_loop()
            batches = loop.run_until_complete(begin())
            if ending != "closed":
                loop.run_until_complete(data.is_reached.wait())
            close_at_once(loop)
        with pytest.raises(hr.errors.LoaderClosedError, match=r"OfTheCaller\.loop is 'caller'"):
            asyncio.run(take(batches))
    assert not caplog.records


def test_comparison_of_ranks_is_awaited_by_the_next_task_when_the_first_was_cancelled() -> None:
    """Ranks compare their plans there, in a thread: the loop does not wait, and no batch precedes the comparison."""
    gate = Gate()

    def compare() -> None:
        gate.is_reached.set()
        gate.is_open.wait()
        raise hr.StateMismatchError("plans differ")

    async def main() -> None:
        async with hr.DataLoader(Numbers(COUNT), 4) as loader:
            batches: Any = aiter(loader)
            batches.before = compare
            await cancel_waiting(batches, gate)
            with pytest.raises(hr.StateMismatchError, match="plans differ"):
                await anext(batches)

    asyncio.run(main())


@pytest.mark.slow
def test_cancelled_loops_leave_no_descriptors_when_no_garbage_is_collected() -> None:
    asked = threading.Event()

    async def never(index: int) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def loop() -> None:
        async for _ in loader:
            pass

    async def descriptors_after(times: int) -> int:
        for _ in range(times):
            asked.clear()
            task = asyncio.create_task(loop())
            await asyncio.to_thread(asked.wait)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return len(os.listdir("/proc/self/fd"))

    async def main() -> tuple[int, int]:
        return await descriptors_after(3), await descriptors_after(40)

    with hr.DataLoader(Made(never, 1000), batch_size=4) as loader:
        gc.collect()
        gc.disable()
        try:
            before, after = asyncio.run(main())
        finally:
            gc.enable()
        assert after <= before + 4  # of loops that are ending
