"""Where an epoch's samples are cut into batches."""

from __future__ import annotations

import bisect
from array import array
from typing import Protocol


class Cuts(Protocol):
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


class EvenCuts:
    """All batches are of one size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def find(self, position: int) -> tuple[int, int]:
        return divmod(position, self._size)

    def start(self, number: int) -> int:
        return number * self._size

    def size(self, number: int) -> int:  # noqa: ARG002 (they are all of one size)
        return self._size


class ToldCuts:
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
