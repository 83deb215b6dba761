"""Parts whose samples are used in the order of their positions, some at a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from headrace.parts import Part


class _PiledPart:
    """A part, of which the first `taken` samples are taken."""

    def __init__(self, start: int, part: Part) -> None:
        self.start, self.part, self.taken = start, part, 0  # `start`: the position of the first one that is not


class Pile:
    """Parts by the positions of their samples; it takes their leases over.

    What is taken costs the same however much lies there: a part is cut where samples are taken, and what is left of it
    only each time that half of it is gone, so that its leases end with it.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, _PiledPart]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def start(self) -> int:
        """The lowest position; there must be one."""
        return self._entries[0][0]

    @property
    def size(self) -> int:
        """How many samples the part there has that are not taken."""
        entry = self._entries[0][2]
        return entry.part.count - entry.taken

    def add(self, start: int, part: Part) -> None:
        """Samples at the positions from `start` on."""
        if part.count:
            heapq.heappush(self._entries, (start, next(self._numbers), _PiledPart(start, part)))
        else:
            part.release()

    def take(self, count: int) -> tuple[int, Part]:
        """(position, samples) from the lowest position on: at most `count`, of one part."""
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
        """Take all samples at positions below `stop`."""
        while self._entries and self.start < stop:
            yield self.take(stop - self.start)

    def drop(self) -> None:
        """Let go of everything."""
        for _, _, entry in self._entries:
            entry.part.release()
        self._entries.clear()
