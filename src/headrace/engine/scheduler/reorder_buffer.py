"""Buffer of parts, emptied in order of the samples' positions."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from headrace.workers.sample_chunks import Part


class _PiledPart:
    """A part whose first `taken` samples are taken."""

    def __init__(self, start: int, part: Part) -> None:
        self.start, self.part, self.taken = start, part, 0  # `start`: position of the first sample not taken


class Pile:
    """Parts ordered by the positions of their samples. Takes over their leases.

    The cost of taking does not depend on the size of the buffer. A part is cut when samples are taken. Its remainder is
    cut each time half of it is gone, which frees leases early.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, _PiledPart]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def start(self) -> int:
        return self._entries[0][0]

    @property
    def size(self) -> int:
        """Number of samples not taken of the part at the lowest position."""
        entry = self._entries[0][2]
        return entry.part.count - entry.taken

    def add(self, start: int, part: Part) -> None:
        if part.count:
            heapq.heappush(self._entries, (start, next(self._numbers), _PiledPart(start, part)))
        else:
            part.release()

    def take(self, count: int) -> tuple[int, Part]:
        """Take (position, samples) from the lowest position on: at most `count`, of one part."""
        entry = self._entries[0][2]
        start, part, begin = entry.start, entry.part, entry.taken
        end = min(begin + count, part.count)
        if begin == 0 and end == part.count:
            heapq.heappop(self._entries)
            return start, part
        some = part.cut(begin, end)
        if end == part.count:
            heapq.heappop(self._entries)
            part.release()
            return start, some
        entry.start, entry.taken = start + end - begin, end
        if 2 * end >= part.count:
            entry.part, entry.taken = part.cut(end, part.count), 0
            part.release()
        heapq.heapreplace(self._entries, (entry.start, next(self._numbers), entry))
        return start, some

    def below(self, stop: int) -> Iterator[tuple[int, Part]]:
        while self._entries and self.start < stop:
            yield self.take(stop - self.start)

    def drop(self) -> None:
        for _, _, entry in self._entries:
            entry.part.release()
        self._entries.clear()
