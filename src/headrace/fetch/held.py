"""How long users' own code holds the event loop, step by step, or computes in threads beside it.

Most of a coroutine's time is spent waiting, in which it holds nobody up. What counts is the time between two waits.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_EACH_CALL = 64  # calls that are all timed
_EVERY = 17  # of those that follow: a step that is timed costs a microsecond more, all others next to nothing


class TimedFunction:
    """What one function has taken. Written by one event loop, read from anywhere.

    Attributes:
        where: "loop": its steps hold the event loop; "threads": it computes in threads of the same process.
        calls: how often it was called.
        seconds: how long its steps took; of most calls that is estimated, by some of them.
        waited: The seconds that calls in threads did not compute.
    """

    __slots__ = ("calls", "seconds", "waited", "where")

    def __init__(self, where: Literal["loop", "threads"]) -> None:
        self.where = where
        self.calls, self.seconds, self.waited = 0, 0.0, 0.0

    def watched(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The same function, whose calls count here."""

        def call(*args: Any) -> Awaitable[Any]:
            self.calls = calls = self.calls + 1
            if calls % _EVERY and calls > _EACH_CALL:
                return function(*args)
            return self.timed(function(*args))

        return call

    def timed(self, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        """What came of the last call, to be awaited in the place of it; for the first calls, and one in some others."""
        return _timed(awaitable, self, 1 if self.calls <= _EACH_CALL else _EVERY)


class WatchedIterator:
    """An asynchronous iterator whose samples count as calls.

    Args:
        samples: the iterator.
        held: where they count.
    """

    def __init__(self, samples: AsyncIterator[Any], held: TimedFunction) -> None:
        if not hasattr(samples, "__anext__"):
            raise TypeError(f"aiter gave a {type(samples).__qualname__}, and no async iterator: write it with yield")
        self._samples, self._next, self._held = samples, samples.__anext__, held

    def __aiter__(self) -> WatchedIterator:
        return self

    def __anext__(self) -> Awaitable[Any]:
        held = self._held
        held.calls = calls = held.calls + 1
        return self._next() if calls % _EVERY and calls > _EACH_CALL else held.timed(self._next())

    async def aclose(self) -> None:
        """Close it, if it can be closed."""
        close = getattr(self._samples, "aclose", None)
        if close is not None:
            await close()


def unwatched(awaitable: Awaitable[T]) -> Awaitable[T]:
    """What a function of ours does for the user's that has called it: that is not the user's time."""
    step = _running.step
    return awaitable if step is None else _timed(awaitable, step[0], -step[1])


class _Running(threading.local):
    step: tuple[TimedFunction, int] | None = None  # whose step runs in this thread, and for how many calls it counts


_running = _Running()


@types.coroutine
def _timed(awaitable: Awaitable[Any], held: TimedFunction, weight: int) -> Generator[Any, Any, Any]:
    """Awaits, with the clock running while the awaitable does not wait itself."""
    steps: Any = awaitable.__await__()
    if not hasattr(steps, "throw"):  # not made of a coroutine
        return (yield from steps)
    resume, is_own = steps.send, weight > 0
    value: Any = None
    while True:
        before, _running.step = _running.step, (held, weight) if is_own else None
        began = time.perf_counter()
        try:
            waits_for = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            held.seconds += weight * (time.perf_counter() - began)
            _running.step = before
        try:
            value = yield waits_for
            resume = steps.send
        except BaseException as error:  # also that this is closed
            resume, value = steps.throw, error
