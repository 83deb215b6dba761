"""Of what the samples of a level were made: of which of the source's samples, or of which groups."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Origins:
    """The samples of one level by number, and the units that they were made of: those of its stages' input.

    A unit may give many samples, or none. All that one gives arrives at once, and units arrive in order. After a
    restart in the middle of what the first unit gives, what is known of that already has numbers below 0.

    Args:
        size: samples of the level before in a unit.
        known: how many of the first unit's samples are known already.
    """

    def __init__(self, size: int = 1, known: int = 0) -> None:
        self.size, self.known = size, known
        self.stop = -known  # the number of the next sample
        self._kept: list[tuple[int, Sequence[int]]] = []  # (number of the first one, units), ascending

    def arrived(self, units: Sequence[int]) -> None:
        """The next samples are of these units, in this order."""
        if len(units):
            self._kept.append((self.stop, units))
            self.stop += len(units)

    def unit(self, number: int) -> int:
        """The unit that a sample is of, or the last one that is known; -1 before the first."""
        if number < 0 or not self._kept:
            return -1
        start, units = self._chunk(number)
        return int(units[min(number - start, len(units) - 1)])

    def needed(self, number: int) -> tuple[int, int]:
        """(the first unit that must be run again for a sample and those behind it, how many of its samples not)."""
        if number < self.stop and self._kept:
            start, units = self._chunk(number)
            unit = units[number - start]
            part = number - start - bisect.bisect_left(units, unit)
            if part:
                return int(unit), part
        elif number <= 0:
            return 0, self.known
        return self.unit(number - 1) + 1, 0

    def forget(self, number: int) -> None:
        """Samples before the one right before this are not asked for any more."""
        while len(self._kept) > 1 and self._kept[1][0] < number:
            del self._kept[0]

    def _chunk(self, number: int) -> tuple[int, Sequence[int]]:
        return self._kept[bisect.bisect_right(self._kept, number, key=lambda kept: kept[0]) - 1]
