"""What of an epoch is still to come: everything from a position on, and holes below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class Cursor:
    """The positions of an epoch that are still to come, in the order in which they will: holes first, then the rest.

    Attributes:
        position: every position from here on is to come.
        holes: [k, 2] int64: disjoint ranges [start, stop) below it that are to come too, ascending. Negative
            positions count from the end of the epoch before.
    """

    position: int
    holes: Ints

    @staticmethod
    def at(position: int = 0) -> Cursor:
        """Everything from `position` on, without holes."""
        return Cursor(position, np.zeros((0, 2), np.int64))

    @property
    def hole_count(self) -> int:
        """How many positions lie in holes."""
        return int((self.holes[:, 1] - self.holes[:, 0]).sum())

    def coming(self, start: int, stop: int) -> Ints:
        """The `start`-th up to the `stop`-th of the positions to come."""
        held = self.hole_count
        after = np.arange(self.position + max(start - held, 0), self.position + max(stop - held, 0))
        if start >= held:
            return after
        return np.concatenate([expanded(self.holes)[start:stop], after])

    def after(self, count: int) -> Cursor:
        """What is to come once the first `count` of these positions have been delivered."""
        held = self.hole_count
        if count >= held:
            return Cursor.at(self.position + count - held)
        return Cursor(self.position, compressed(self.coming(count, held)))

    def without(self, delivered: Ints) -> Cursor:
        """What is to come once `delivered` have been, which are among these."""
        if not len(delivered):
            return self
        top = max(self.position, int(delivered.max()) + 1)
        planned = np.concatenate([expanded(self.holes), np.arange(self.position, top)])
        left = np.setdiff1d(planned, delivered)
        while len(left) and left[-1] == top - 1 and top > self.position:  # nobody has begun the highest ones
            gap = np.flatnonzero(np.diff(left) != 1)
            first = left[gap[-1] + 1] if len(gap) else left[0]
            top = max(int(first), self.position)
            left = left[left < top]
        return Cursor(top, compressed(left))


def expanded(ranges: Ints) -> Ints:
    """All numbers of ranges [start, stop)."""
    sizes = ranges[:, 1] - ranges[:, 0]
    first = np.repeat(ranges[:, 0] - np.cumsum(sizes) + sizes, sizes)
    return np.asarray(first + np.arange(len(first)), np.int64)


def compressed(numbers: Ints) -> Ints:
    """Ascending numbers as ranges [start, stop)."""
    if not len(numbers):
        return np.zeros((0, 2), np.int64)
    ends = np.flatnonzero(np.diff(numbers) != 1)
    starts = np.concatenate([numbers[:1], numbers[ends + 1]])
    stops = np.concatenate([numbers[ends], numbers[-1:]]) + 1
    return np.stack([starts, stops], axis=1)


def pack_ranges(ranges: Ints) -> list[int]:
    """Ranges as a flat list of small numbers: how far each begins behind the one before, and how long it is."""
    if not len(ranges):
        return []
    before = np.concatenate([[0], ranges[:-1, 1]])
    return [int(x) for x in np.stack([ranges[:, 0] - before, ranges[:, 1] - ranges[:, 0]], axis=1).ravel()]


def unpack_ranges(packed: Sequence[int]) -> Ints:
    """The reverse of `pack_ranges`.

    Raises:
        ValueError: these are no such numbers.
    """
    pairs = np.array(packed, np.int64).reshape(-1, 2)
    if (pairs[:, 1] < 1).any() or (pairs[1:, 0] < 1).any():
        raise ValueError("ranges must ascend, and hold something")
    stops = np.cumsum(pairs.sum(axis=1))
    return np.stack([stops - pairs[:, 1], stops], axis=1)
