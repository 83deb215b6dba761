"""A deterministic event loop: virtual time, and ready callbacks in an order drawn by a seed.

A sleep of an hour takes no time: where nothing is ready, the clock jumps to the next timer. There must be no sockets
and no threads, so waiting without a timer is a `Deadlock` at once, which the same seed shows again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
AT_ONE_TIME = 20_000


class Deadlock(RuntimeError):
    """Nothing is ready and there is no timer: the program would wait for ever."""


class _Selector(selectors.SelectSelector):
    """Lets time pass instead of waiting."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise Deadlock("nothing is ready, and there is no timer")
        if not events and timeout:
            self.loop.pass_time(timeout)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """One run for each seed."""

    def __init__(self, seed: int) -> None:
        self._now = 0.0
        self._order = random.Random(seed)
        self._digest = hashlib.sha256()
        self._since_time_passed = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        self._since_time_passed = 0

    @property
    def trace(self) -> str:
        return self._digest.hexdigest()

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def timers(self) -> int:
        return sum(not timer.cancelled() for timer in self._scheduled)

    def _run_once(self) -> None:
        ready = list(self._ready)
        self._order.shuffle(ready)
        self._ready.clear()
        self._ready.extend(ready)
        self._since_time_passed += 1
        if self._since_time_passed > AT_ONE_TIME:
            raise Deadlock("the program goes round and round, and no time passes")
        self._digest.update(b"%d %r," % (len(ready), self._now))
        super()._run_once()


def simulate(main: Coroutine[Any, Any, T], seed: int = 0, limit_s: float = 3600.0) -> tuple[T, SimulatedLoop]:
    loop = SimulatedLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(asyncio.wait_for(main, limit_s))
        assert not asyncio.all_tasks(loop)
        assert not loop.timers
        return result, loop
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def simulated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        simulate(test(*args, **kwargs))

    return run
