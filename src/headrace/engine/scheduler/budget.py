"""Admission of memory by bytes and priority."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace._util.shared_memory import Claim

T = TypeVar("T")

RAMP_BYTES = 16 * 2**20
AHEAD_BYTES = 256 * 2**20


@dataclass(slots=True, order=True)
class _BytesRequest:
    rank: tuple[int, ...]
    number: int
    size: int = field(compare=False)
    is_input: bool = field(compare=False)
    grant: Callable[[], object] = field(compare=False)
    is_urgent: Callable[[], bool] = field(compare=False)
    is_early: Callable[[], bool] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)
    is_let_in: bool = field(default=False, compare=False)


class Budget:
    """Admission by bytes, lowest rank first, without deadlocks.

    Args:
        held: Returns the bytes of inputs and slabs.
        inputs: Returns the bytes of inputs.
    """

    def __init__(self, limit: int, held: Callable[[], int], inputs: Callable[[], int]) -> None:
        self.limit = limit
        self.claimed = 0
        self._held, self._inputs = held, inputs
        self._waiting: list[_BytesRequest] = []
        self._numbers = itertools.count()
        self._ahead = RAMP_BYTES

    @property
    def in_use(self) -> int:
        return self._held() + self.claimed

    @property
    def is_full(self) -> bool:
        return self.in_use >= self.limit

    def claim(self, nbytes: int) -> Claim:
        return Claim(nbytes, self._count)

    def widen(self, ahead: int) -> None:
        """Raise the read-ahead limit to at least `ahead` bytes."""
        self._ahead = max(self._ahead, ahead)

    def starved(self) -> None:
        """Report that workers are idle. If only the read-ahead limit holds reads back, double it.

        The limit starts small, so that the first batch does not wait for bytes of the tenth, and memory is reused.
        """
        if self._waiting and not self._waiting[0].is_early():
            self._ahead = max(self._ahead, min(2 * self._ahead, AHEAD_BYTES))

    def has_room(self, size: int) -> bool:
        """True if `size` bytes may be held now, ahead of waiting requests and without a read."""
        return self._fits(size, is_input=False)

    async def admit(
        self,
        size: int,
        rank: tuple[int, ...],
        grant: Callable[[], T],
        *,
        is_urgent: Callable[[], bool],
        is_early: Callable[[], bool],
        is_input: bool = True,
    ) -> T:
        """Wait until `size` bytes are admitted, then return the result of `grant`.

        Args:
            rank: Waiting requests are admitted in ascending order of rank.
            is_urgent: True if nothing would move without the bytes. Admitted even over the limit.
            is_early: True to delay the request, even if there is room.
            is_input: True for bytes of the arena, which the read-ahead limit bounds too.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = _BytesRequest(rank, next(self._numbers), size, is_input, grant, is_urgent, is_early, future)
        heapq.heappush(self._waiting, entry)
        self.changed()
        try:
            return await future
        finally:
            if not entry.is_let_in:  # cancelled: the entry would keep its epoch alive
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def changed(self) -> None:
        """Recheck waiting requests after a release, a delivery or a new request."""
        while self._waiting:
            entry = self._next()
            if entry is None:
                return
            entry.is_let_in = True
            if entry is self._waiting[0]:
                heapq.heappop(self._waiting)
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            if not entry.future.done():
                try:
                    entry.future.set_result(entry.grant())
                except MemoryError as error:
                    entry.future.set_exception(error)

    def _count(self, nbytes: int) -> None:
        self.claimed += nbytes
        if nbytes < 0:
            self.changed()

    def _next(self) -> _BytesRequest | None:
        first = self._waiting[0]
        if first.future.done() or first.is_urgent():
            return first
        is_early = first.is_early()
        if not is_early and self._fits(first.size, is_input=first.is_input):
            return first
        # The first may belong to an abandoned epoch and must not block the others.
        able = (
            entry
            for entry in self._waiting[1:]
            if entry.is_urgent()
            or (is_early and not entry.is_early() and self._fits(entry.size, is_input=entry.is_input))
        )
        return min(able, default=None)

    def _fits(self, size: int, *, is_input: bool) -> bool:
        if is_input and self._inputs() + size > self._ahead:
            return False
        return self.in_use + size <= self.limit
