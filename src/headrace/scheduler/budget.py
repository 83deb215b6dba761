"""How many bytes may be held, and who is let in next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

RAMP_BYTES = 16 * 2**20
AHEAD_BYTES = 256 * 2**20


@dataclass(slots=True, order=True)
class _Waiting:
    rank: tuple[int, ...]
    number: int
    size: int = field(compare=False)
    grant: Callable[[], Any] = field(compare=False)
    is_urgent: Callable[[], bool] = field(compare=False)
    is_early: Callable[[], bool] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)


class Budget:
    """Admission by bytes, lowest rank first, and never a lock-up.

    Args:
        limit: bytes that inputs and slabs may take together.
        held: how many bytes they take now.
        inputs: how many of those are inputs.
    """

    def __init__(self, limit: int, held: Callable[[], int], inputs: Callable[[], int]) -> None:
        self.limit = limit
        self._held, self._inputs = held, inputs
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._ahead = RAMP_BYTES

    def widen(self, ahead: int) -> None:
        """Allow at least `ahead` bytes to be read ahead."""
        self._ahead = max(self._ahead, ahead)

    def starved(self) -> None:
        """The workers have nothing to do. If reads wait only for the right to read ahead, that was too small.

        It starts small: the first batch does not wait for the tenth's bytes, and memory is used again and again.
        """
        if self._waiting and not self._waiting[0].is_early():
            self._ahead = max(self._ahead, min(2 * self._ahead, AHEAD_BYTES))

    async def admit(
        self,
        size: int,
        rank: tuple[int, ...],
        grant: Callable[[], T],
        *,
        is_urgent: Callable[[], bool],
        is_early: Callable[[], bool],
    ) -> T:
        """Wait until `size` more bytes may be held; gives what `grant` gave, which is called at that very moment.

        Args:
            rank: among those who wait the lowest is let in first.
            is_urgent: whether nothing would move without it; it is let in whatever is held.
            is_early: whether it is too early for it, however much room there is.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = _Waiting(rank, next(self._numbers), size, grant, is_urgent, is_early, future)
        heapq.heappush(self._waiting, entry)
        self.changed()
        try:
            return await future
        finally:
            if entry in self._waiting:  # cancelled: it must not keep its epoch, and all that it knows
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def changed(self) -> None:
        """Something was released, delivered or asked for: let in whom there is room for."""
        while self._waiting:
            entry = self._next()
            if entry is None:
                return
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
            if not entry.future.done():
                try:
                    entry.future.set_result(entry.grant())
                except MemoryError as error:
                    entry.future.set_exception(error)

    def _next(self) -> _Waiting | None:
        """Who is let in now, if anyone is."""
        first = self._waiting[0]
        if first.future.done() or first.is_urgent():
            return first
        is_early = first.is_early()
        if not is_early and self._has_room(first.size):
            return first
        # The first may be of an epoch that nobody reads: it must not keep the others out.
        able = (
            entry
            for entry in self._waiting[1:]
            if entry.is_urgent() or (is_early and not entry.is_early() and self._has_room(entry.size))
        )
        return min(able, default=None)

    def _has_room(self, size: int) -> bool:
        return self._held() + size <= self.limit and self._inputs() + size <= self._ahead
