"""Counters of the fetch stage, written by one event loop and read from any thread."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Literal, TypeVar

T = TypeVar("T")

UNWANTED_SHARE = 0.25
"""Maximum share of unwanted bytes in a merged request."""

_EACH_CALL = 64  # all of the first calls are timed
_EVERY = 17  # then one call in 17: timing costs a microsecond for each step


class TimedFunction:
    """Time taken by one function. Written by one event loop, read from any thread.

    Attributes:
        where: "loop": holds the event loop between two waits. "threads": computes in threads of this process.
        seconds: Time of computing. After the first calls it is extrapolated from a sample of the calls.
        waited: Seconds in which calls in threads did not compute.
    """

    __slots__ = ("calls", "seconds", "waited", "where")

    def __init__(self, where: Literal["loop", "threads"]) -> None:
        self.where = where
        self.calls, self.seconds, self.waited = 0, 0.0, 0.0

    def watched(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        def call(*args: Any) -> Awaitable[Any]:
            self.calls = calls = self.calls + 1
            if calls % _EVERY and calls > _EACH_CALL:
                return function(*args)
            return self.timed(function(*args))

        return call

    def timed(self, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        """Return an awaitable that measures the last call, with the call's weight in the sample."""
        return _timed(awaitable, self, 1 if self.calls <= _EACH_CALL else _EVERY)


class WatchedIterator:
    """An asynchronous iterator whose samples count as calls of `held`."""

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
        close = getattr(self._samples, "aclose", None)
        if close is not None:
            await close()


def unwatched(awaitable: Awaitable[T]) -> Awaitable[T]:
    """Exclude `awaitable`, work that the user's function requested, from the user's time."""
    step = _running.step
    return awaitable if step is None else _timed(awaitable, step[0], -step[1])


class _Running(threading.local):
    step: tuple[TimedFunction, int] | None = None  # the function that runs in this thread, and the weight of its call


_running = _Running()


@types.coroutine
def _timed(awaitable: Awaitable[Any], held: TimedFunction, weight: int) -> Generator[Any, Any, Any]:
    """Await `awaitable` and add the time between its waits, times `weight`, to `held`."""
    steps: Any = awaitable.__await__()
    if not hasattr(steps, "throw"):  # not a coroutine
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
        except BaseException as error:  # includes GeneratorExit
            resume, value = steps.throw, error


class Meter:
    """Counters of one reader. The others are described in `FetchStats`.

    Attributes:
        requests: Requests started, with `hedges`.
        retries: Repeated requests, and requests that continued a body that broke off.
        waiting_s: Seconds in which at least one request was running.
        level: Concurrency limit of the host that failed last. 0: no host was limited yet.
        functions: Functions of the user on the loop or in threads, by name.
    """

    __slots__ = (
        "_busy_since", "bytes", "cached", "coalesced", "errors", "functions", "hedges", "hedges_won", "in_flight",
        "level", "lowest_level", "requests", "retries", "shards_in_part", "shards_whole", "throttled", "waiting_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.retries = self.errors = self.bytes = self.in_flight = 0
        self.hedges = self.hedges_won = self.throttled = self.level = self.lowest_level = 0
        self.cached = self.coalesced = 0
        self.shards_whole = self.shards_in_part = 0
        self.functions: dict[str, TimedFunction] = {}
        self.waiting_s = 0.0
        self._busy_since = 0.0

    def held(self, name: str, where: Literal["loop", "threads"] = "loop") -> TimedFunction:
        if name not in self.functions:
            self.functions[name] = TimedFunction(where)
        return self.functions[name]

    def begin(self, now: float) -> None:
        self.requests += 1
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1

    def count_shard(self, nbytes: int, size: int) -> None:
        is_whole = nbytes >= (1 - UNWANTED_SHARE) * size
        self.shards_whole += is_whole
        self.shards_in_part += not is_whole

    def end(self, now: float) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.waiting_s += now - self._busy_since
