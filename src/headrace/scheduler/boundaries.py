"""Where an epoch's samples are cut into batches."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Sequence
from typing import Protocol


class BatchBoundaries(Protocol):
    """Batches by number, samples by position; both count from 0."""

    def find(self, position: int) -> tuple[int, int]:
        """The batch that the sample at `position` belongs to, and its slot there."""
        ...

    def start(self, number: int) -> int:
        """The position of the first sample of a batch, as far as that is known: where the last known batch ends."""
        ...

    def size(self, number: int) -> int:
        """How many samples a batch has; the last one of an epoch may turn out to have fewer."""
        ...


class EvenBoundaries:
    """All batches are of one size; where an epoch's end is known, its last ones are of others.

    Args:
        size: of the batches.
        count: how many are of that size; None: all.
        last: the sizes of those that follow.
    """

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
    """Batches are as long as the source says, one after the other: 8 bytes for each one of the epoch."""

    def __init__(self) -> None:
        self._starts = array("q", [0])  # and where the last one ends

    def add(self, size: int) -> int:
        """The number of the next batch, which has `size` samples."""
        self._starts.append(self._starts[-1] + size)
        return len(self._starts) - 2

    def find(self, position: int) -> tuple[int, int]:
        number = bisect.bisect_right(self._starts, position) - 1
        return number, position - self._starts[number]

    def start(self, number: int) -> int:
        return self._starts[min(number, len(self._starts) - 1)]

    def size(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]
