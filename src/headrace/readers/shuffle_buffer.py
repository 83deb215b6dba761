"""A buffer from which samples are drawn at random."""

from __future__ import annotations

import numpy as np

from headrace.types import Ints


class ShuffleBuffer:
    """Determines the sample that leaves a full buffer when another one comes.

    Samples are represented by numbers: waiting ones are 0, 1, …, and new ones follow.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._random = np.random.Generator(np.random.Philox(key=key))
        self.waiting = 0

    def slot(self) -> int | None:
        """Return the slot of the sample replaced by a new one. None if there is room."""
        if self.waiting < self._size:
            self.waiting += 1
            return None
        return int(self._random.integers(0, self._size))

    def come(self, count: int) -> tuple[Ints, Ints]:
        """Add `count` samples: (numbers of those that leave, in order; of those that stay)."""
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
        """Empty the buffer and return the numbers of its samples in order of leaving."""
        waiting, self.waiting = self.waiting, 0
        return self._random.permutation(waiting)
