"""Division of an epoch's samples into batches."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Sequence
from typing import Protocol


class BatchBoundaries(Protocol):
    """Batches by number, samples by position. Both count from 0."""

    def find(self, position: int) -> tuple[int, int]: ...

    def start(self, number: int) -> int:
        """Return the position of a batch's first sample, or the end of the last known batch."""
        ...

    def size(self, number: int) -> int:
        """Return the number of samples of a batch. The last one of an epoch may be shortened later."""
        ...


class EvenBoundaries:
    """Batches of one size: `count` of them (None: all), then batches of the sizes in `last`."""

    def __init__(self, size: int, count: int | None = None, last: Sequence[int] = ()) -> None:
        self._size, self._count, self._last = size, count, tuple(last)
        self._starts = [0]
        if count is not None:
            self._starts = [count * size, *(count * size + end for end in itertools.accumulate(self._last))]

    def find(self, position: int) -> tuple[int, int]:
        if self._count is None or position < self._starts[0]:
            return divmod(position, self._size)
        at = bisect.bisect_right(self._starts, position) - 1
        return self._count + at, position - self._starts[at]

    def start(self, number: int) -> int:
        if self._count is None or number <= self._count:
            return number * self._size
        return self._starts[min(number - self._count, len(self._last))]

    def size(self, number: int) -> int:
        if self._count is None or number < self._count:
            return self._size
        return self._last[number - self._count]


class GivenBoundaries:
    """Batches whose sizes the source announces. Takes 8 bytes per batch of the epoch."""

    def __init__(self) -> None:
        self._starts = array("q", [0])  # and the end of the last one

    def add(self, size: int) -> int:
        self._starts.append(self._starts[-1] + size)
        return len(self._starts) - 2

    def find(self, position: int) -> tuple[int, int]:
        number = bisect.bisect_right(self._starts, position) - 1
        return number, position - self._starts[number]

    def start(self, number: int) -> int:
        return self._starts[min(number, len(self._starts) - 1)]

    def size(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]
