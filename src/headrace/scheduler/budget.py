"""How many bytes may be held, and who is let in next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.memory import Claim

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
    """Admission by bytes, lowest rank first, and never a lock-up.

    Args:
        limit: bytes that inputs, slabs and claims may take together.
        held: how many bytes inputs and slabs take now.
        inputs: how many of those are inputs.

    Attributes:
        claimed: bytes that are claimed besides.
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
        """Bytes that inputs, slabs and claims take now."""
        return self._held() + self.claimed

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be held."""
        return self.in_use >= self.limit

    def claim(self, nbytes: int) -> Claim:
        """Count bytes that are held outside the arena; it asks nobody, `admit` does."""
        return Claim(nbytes, self._count)

    def widen(self, ahead: int) -> None:
        """Allow at least `ahead` bytes to be read ahead."""
        self._ahead = max(self._ahead, ahead)

    def starved(self) -> None:
        """The workers have nothing to do. If reads wait only for the right to read ahead, that was too small.

        It starts small: the first batch does not wait for the tenth's bytes, and memory is used again and again.
        """
        if self._waiting and not self._waiting[0].is_early():
            self._ahead = max(self._ahead, min(2 * self._ahead, AHEAD_BYTES))

    def has_room(self, size: int) -> bool:
        """Whether so many more bytes may be held now by one who goes before those that wait, and reads nothing."""
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
        """Wait until `size` more bytes may be held; gives what `grant` gave, which is called at that very moment.

        Args:
            rank: among those who wait the lowest is let in first.
            is_urgent: whether nothing would move without it; it is let in whatever is held.
            is_early: whether it is too early for it, however much room there is.
            is_input: whether it is for bytes of the arena, which are bounded by themselves too.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = _BytesRequest(rank, next(self._numbers), size, is_input, grant, is_urgent, is_early, future)
        heapq.heappush(self._waiting, entry)
        self.changed()
        try:
            return await future
        finally:
            if not entry.is_let_in:  # cancelled: it must not keep its epoch, and all that it knows
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def changed(self) -> None:
        """Something was released, delivered or asked for: let in whom there is room for."""
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
        """Who is let in now, if anyone is."""
        first = self._waiting[0]
        if first.future.done() or first.is_urgent():
            return first
        is_early = first.is_early()
        if not is_early and self._fits(first.size, is_input=first.is_input):
            return first
        # The first may be of an epoch that nobody reads: it must not keep the others out.
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
