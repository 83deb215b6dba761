"""Where the samples of an epoch are: their positions in its plan, and which of them have been delivered."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.scheduler.cuts import Cuts
from headrace.tasks import After, Task
from headrace.types import Ints

Positions = Callable[[int, int], Sequence[int]]
"""The positions in the epoch of the `start`-th up to the `stop`-th sample that a source gives."""


class Track:
    """The samples of one epoch on one rank.

    The source counts what it gives; where some of that may be left out, what is left is counted anew for batches.

    Args:
        positions: of what the source gives; None: its own numbers.
        kept_from: the position of the first sample that is left; None: none is left out.
        mark: asked for a place where the source can be begun again; None: positions tell it.
    """

    def __init__(
        self,
        positions: Positions | None = None,
        kept_from: int | None = None,
        mark: Callable[[int], Any] | None = None,
    ) -> None:
        self._positions, self._kept_from, self._mark = positions, kept_from, mark
        self._kept: list[tuple[int, Sequence[int]]] = []  # (number of the first one, source's numbers), ascending
        self._delivered: set[int] = set()  # batches that were, above the first that was not
        self._first_not = 0
        self._covers: list[tuple[int, int]] = []  # since the last message
        self._used = 0  # samples of batches, since then

    def positions(self, start: int, stop: int) -> Sequence[int]:
        """The positions of samples by the source's numbers."""
        return range(start, stop) if self._positions is None else self._positions(start, stop)

    def place(self, task: Task, start: int, count: int) -> None:
        """Tell a task the positions of its samples, which have these numbers in batches."""
        task.position = start
        if self._kept_from is not None:
            task.positions = range(self._kept_from + start, self._kept_from + start + count)
        elif self._positions is not None:
            task.positions = self._positions(start, start + count)

    def in_batches(self, start: int, stop: int) -> Sequence[int]:
        """The positions of samples by their numbers in batches, as far as they are known."""
        if self._kept_from is None:
            return self.positions(start, stop)
        return [self.positions(at, at + 1)[0] for at in map(self._source_number, range(start, stop))]

    def arrived(self, start: int, numbers: Sequence[int]) -> None:
        """What is left of some samples, by the source's numbers, has the numbers from `start` on in batches."""
        if self._kept_from is not None and len(numbers):
            self._kept.append((start, numbers))

    def cover(self, number: int, start: int, stop: int, cuts: Cuts) -> None:
        """A batch was delivered, or left out, that has these samples."""
        self._used += stop - start
        if self._kept_from is None:
            self._covers.append((start, stop))
        else:
            self._covers.append((self._source_number(start - 1) + 1, self._source_number(stop - 1) + 1))
        self._delivered.add(number)
        while self._first_not in self._delivered:
            self._delivered.discard(self._first_not)
            self._first_not += 1
        oldest = cuts.start(self._first_not)
        while len(self._kept) > 1 and self._kept[1][0] < oldest:
            del self._kept[0]

    def after(self, cuts: Cuts, skipped: tuple[int, int]) -> After:
        """What a state says once all that was delivered so far has been received."""
        covers, self._covers = tuple(self._covers), []
        used, self._used = self._used, 0
        mark = None
        if self._mark is not None:
            oldest = cuts.start(self._first_not)
            mark = self._mark(oldest if self._kept_from is None else self._source_number(oldest - 1) + 1)
        return After(covers, mark, skipped, used)

    def _source_number(self, number: int) -> int:
        """The source's number of what has this one in batches; -1 before the first."""
        if number < 0:
            return -1
        at = bisect.bisect_right(self._kept, number, key=lambda kept: kept[0]) - 1
        start, numbers = self._kept[at]
        return int(numbers[min(number - start, len(numbers) - 1)])


def as_numbers(positions: Ints) -> Sequence[int]:
    """Positions as a task carries them, of Python's own numbers: a range where they follow one another."""
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1 and bool((np.diff(positions) == 1).all()):
        return range(int(positions[0]), int(positions[-1]) + 1)
    numbers: list[int] = positions.tolist()
    return numbers
