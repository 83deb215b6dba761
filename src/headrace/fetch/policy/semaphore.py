"""Fair waiting. Futures are granted only here, so that a cancellation loses no wakeup."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class WaitingLine:
    """Waiters in first-come order. Those that come `again` precede the others."""

    __slots__ = ("_again", "_new", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._again: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def wait(self, wake: Callable[[], None], hand_on: Callable[[], None], *, again: bool = False) -> None:
        """Queue a waiter, call `wake` to grant what is free, and wait for a `grant`.

        `hand_on` is called if the waiter is cancelled after its grant.
        """
        future = asyncio.get_running_loop().create_future()
        line = self._again if again else self._new
        line.append(future)
        self.waiting += 1
        wake()
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                if future in line:
                    line.remove(future)
                    self.waiting -= 1
            else:
                hand_on()
            raise

    def grant(self) -> bool:
        for line in (self._again, self._new):
            while line:
                future = line.popleft()
                self.waiting -= 1
                if not future.done():
                    future.set_result(None)
                    return True
        return False


class Semaphore:
    """At most `limit` holders at once. `limit` may change and need not be an integer."""

    __slots__ = ("_turns", "inside", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inside = 0
        self._turns = WaitingLine()

    def try_enter(self) -> bool:
        if self._turns.waiting or self.inside + 1 > self.limit:
            return False
        self.inside += 1
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Enter, waiting if needed. With `again`, precede waiters that enter for the first time."""
        if not self.try_enter():
            await self._turns.wait(self._wake, self.leave, again=again)

    def leave(self) -> None:
        self.inside -= 1
        if self._turns.waiting:
            self._wake()

    def _wake(self) -> None:
        while self.inside + 1 <= self.limit and self._turns.grant():
            self.inside += 1
