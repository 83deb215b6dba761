"""A buffer that samples wait in until they are drawn from it at random."""

from __future__ import annotations

import numpy as np

from headrace.types import Ints


class ShuffleBuffer:
    """Says which sample leaves the buffer whenever one comes that it has no room for.

    It knows numbers only: those that wait are 0, 1, …, and those that come follow them.

    Args:
        size: how many samples wait at most.
        key: from which the random numbers are made.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._random = np.random.Generator(np.random.Philox(key=key))
        self.waiting = 0

    def slot(self) -> int | None:
        """The place of the one that leaves as one more comes, which takes that place; None: there is room."""
        if self.waiting < self._size:
            self.waiting += 1
            return None
        return int(self._random.integers(0, self._size))

    def come(self, count: int) -> tuple[Ints, Ints]:
        """(the numbers of those that leave, in order; of those that stay) as `count` more come."""
        stay = list(range(self.waiting))
        room = max(0, min(count, self._size - self.waiting))
        stay += range(self.waiting, self.waiting + room)
        leave = []
        drawn = self._random.integers(0, self._size, count - room)
        for k, number in enumerate(drawn.tolist(), self.waiting + room):
            leave.append(stay[number])
            stay[number] = k
        self.waiting = len(stay)
        return np.array(leave, np.int64), np.array(stay, np.int64)

    def end(self) -> Ints:
        """The numbers of those that are left, in the order in which they leave."""
        waiting, self.waiting = self.waiting, 0
        return self._random.permutation(waiting)
