"""How many may do something at once, and who is next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class PrioritySemaphore:
    """At most `limit` turns at once (None: any number); who waits gets one by number, the lowest first."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken = 0
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, number: int) -> Callable[[], None]:
        """Wait for a turn; gives the function that ends it, of which only the first call counts."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, next(self._order), future))
        self._let_in()
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self._end()
            raise
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._end()

        return end

    def _end(self) -> None:
        self._taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and (self._limit is None or self._taken < self._limit):
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                self._taken += 1
                future.set_result(None)
