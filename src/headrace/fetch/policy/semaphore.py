"""Waiting in line: the one place where futures are handed out, so that no wake-up is lost to a cancellation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class WaitingLine:
    """Who waits for a turn: first come, first served, and those who come `again` before the others.

    Attributes:
        waiting: how many stand in line.
    """

    __slots__ = ("_again", "_new", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._again: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def wait(self, wake: Callable[[], None], hand_on: Callable[[], None], *, again: bool = False) -> None:
        """Wait until `grant` has come to us.

        Args:
            wake: called once we stand in line: grants what can be granted now.
            hand_on: called if we are cancelled after our turn was granted.
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
        """Let the next one go on; False where nobody waits."""
        for line in (self._again, self._new):
            while line:
                future = line.popleft()
                self.waiting -= 1
                if not future.done():
                    future.set_result(None)
                    return True
        return False


class Semaphore:
    """At most `limit` are inside at once."""

    __slots__ = ("_turns", "inside", "limit")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inside = 0
        self._turns = WaitingLine()

    def try_enter(self) -> bool:
        """Be inside, if that needs no waiting."""
        if self._turns.waiting or self.inside + 1 > self.limit:
            return False
        self.inside += 1
        return True

    async def enter(self, *, again: bool = False) -> None:
        """Be inside; who was inside before (`again`) waits before those who were not."""
        if not self.try_enter():
            await self._turns.wait(self._wake, self.leave, again=again)

    def leave(self) -> None:
        """Be outside again."""
        self.inside -= 1
        if self._turns.waiting:
            self._wake()

    def _wake(self) -> None:
        while self.inside + 1 <= self.limit and self._turns.grant():
            self.inside += 1
