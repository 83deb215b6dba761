"""Where the torch regime's batches lie in shared memory: segments that are filled again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.memory import Segment

_FREE_MOST = 2  # beyond those that batches under way may need: the trainer holds as many, as a rule


class BatchMemory:
    """The segments of one pool.

    Workers make them as they need them. Each stays with the worker that has filled it, so that few are mapped by many;
    only where there are enough of them, one goes to another worker.

    Args:
        workers: how many workers there are.
        limit: how many batches are under way at most.
        forget: called with the number of a segment that is gone, so that workers unmap it.

    Attributes:
        segments: by number.
    """

    def __init__(self, workers: int, limit: int, forget: Callable[[int], None]) -> None:
        self.segments: dict[int, Segment] = {}
        self.unlock_pages: Callable[[int], None] = lambda _: None  # called before a segment is closed
        self._free: list[list[Segment]] = [[] for _ in range(workers)]
        self._limit, self._forget = limit, forget
        self._out: dict[int, int] = {}  # whose a segment is that the trainer has
        self._promised = 0
        self._returned: deque[int] = deque()
        self._retired: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments.values())

    def add(self, segment: Segment) -> None:
        """A worker has made one, for the batch that it tells next."""
        self.segments[segment.number] = segment

    def free_for(self, worker: int) -> Segment | None:
        """A place for a worker's next batch; None where it is to make one if need be, until `settled`."""
        self._take_back()
        if self._free[worker]:
            return self._free[worker].pop()
        found = None
        if len(self.segments) + self._promised >= self._limit + _FREE_MOST:
            found = next((free.pop() for free in self._free if free), None)
        self._promised += found is None
        return found

    def settled(self) -> None:
        """A worker that was given no place has made one, or needs none any more."""
        self._promised -= 1

    def filled(self, number: int, worker: int) -> None:
        """There is a batch in it, which the trainer is about to look at."""
        self._out[number] = worker

    def unused(self, segment: Segment, worker: int, *, is_too_small: bool) -> None:
        """It was given for a batch, and is not what the batch lies in."""
        if is_too_small:
            self._discard(segment)
        else:
            self._free[worker].append(segment)

    def left(self, place: Segment | None, worker: int, *, is_too_small: bool) -> None:
        """A batch has no use for what `free_for` gave."""
        if place is None:
            self.settled()
        else:
            self.unused(place, worker, is_too_small=is_too_small)

    def give_back(self, number: int) -> None:
        """The trainer has no view of it any more. From any thread, also inside a collection of garbage."""
        self._returned.append(number)

    def retire(self, number: int) -> None:
        """A forked process has views of it, and nobody will hear when they are gone: it is not used again."""
        self._retired.add(number)

    def close(self) -> None:
        """Close all; views that the trainer still has keep their memory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._forget = self.unlock_pages = lambda _: None  # whose owner refers to this

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
