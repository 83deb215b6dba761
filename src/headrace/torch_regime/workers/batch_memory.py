"""Shared memory of batches: segments that are reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace._util.shared_memory import Segment

_FREE_MOST = 2  # in addition to batches under way: the trainer usually holds as many


class BatchMemory:
    """The segments of one pool, by number in `segments`.

    Workers create segments on demand. A segment stays with the worker that filled it, so that few workers map it. It
    goes to another worker only if there are enough segments.

    Args:
        limit: Maximum number of batches under way.
        forget: Called with the number of a deleted segment, so that workers unmap it.
    """

    def __init__(self, workers: int, limit: int, forget: Callable[[int], None]) -> None:
        self.segments: dict[int, Segment] = {}
        self.unlock_pages: Callable[[int], None] = lambda _: None  # called before a segment is closed
        self._free: list[list[Segment]] = [[] for _ in range(workers)]
        self._limit, self._forget = limit, forget
        self._out: dict[int, int] = {}  # worker by number of a segment that the trainer holds
        self._promised = 0
        self._returned: deque[int] = deque()
        self._retired: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(segment.size for segment in self.segments.values())

    def add(self, segment: Segment) -> None:
        self.segments[segment.number] = segment

    def free_for(self, worker: int) -> Segment | None:
        """Return a free segment. None: the worker may create one, reserved until `settled`."""
        self._take_back()
        if self._free[worker]:
            return self._free[worker].pop()
        found = None
        if len(self.segments) + self._promised >= self._limit + _FREE_MOST:
            found = next((free.pop() for free in self._free if free), None)
        self._promised += found is None
        return found

    def settled(self) -> None:
        """Record that a worker without a free segment has created one, or needs none."""
        self._promised -= 1

    def filled(self, number: int, worker: int) -> None:
        self._out[number] = worker

    def unused(self, segment: Segment, worker: int, *, is_too_small: bool) -> None:
        if is_too_small:
            self._discard(segment)
        else:
            self._free[worker].append(segment)

    def left(self, place: Segment | None, worker: int, *, is_too_small: bool) -> None:
        """Record that a batch did not use the result of `free_for`."""
        if place is None:
            self.settled()
        else:
            self.unused(place, worker, is_too_small=is_too_small)

    def give_back(self, number: int) -> None:
        """Return a segment without views. Safe in any thread and inside garbage collection."""
        self._returned.append(number)

    def retire(self, number: int) -> None:
        """Never reuse a segment: a forked process has views of it, whose end cannot be observed."""
        self._retired.add(number)

    def close(self) -> None:
        """Close all segments. Views that the trainer still has keep their memory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._forget = self.unlock_pages = lambda _: None  # their owners refer to this object

    def _take_back(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            worker = self._out.pop(number, None)
            if worker is None or number not in self.segments:
                continue
            if number in self._retired:
                self._discard(self.segments[number])
            else:
                self._free[worker].append(self.segments[number])

    def _discard(self, segment: Segment) -> None:
        self.unlock_pages(segment.number)
        del self.segments[segment.number]
        self._retired.discard(segment.number)
        segment.close()
        self._forget(segment.number)
