"""Of what the samples of a level were made: of which of the source's samples, or of which groups."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.types import Ranges


class Origins:
    """The samples of one level by number, and the units that they were made of: of the source's samples, first of all.

    A unit may give many samples, or none. All that one gives arrives at once, and units arrive in order. After a
    restart in the middle of what the first unit gives, what is known of that already has numbers below 0.

    Args:
        known: how many of the first unit's samples are known already.
        before: how many samples of the level came before number 0, in the whole epoch.
    """

    def __init__(self, known: int = 0, *, before: int = 0) -> None:
        self.known, self.before = known, before
        self.begun_with: Ranges = ()
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

    def formed(self, numbers: Sequence[int]) -> None:
        """The next unit is of these samples of the level before, in any order. The source's need not be told."""

    def first(self, unit: int) -> int:
        """The number in the level before of the first sample of a unit, or -1 before the first unit."""
        return unit

    def begin(self, unit: int) -> int:
        """The number in the level before of the first sample that this unit or a later one needs."""
        return unit

    def passed(self, unit: int) -> Ranges:  # noqa: ARG002 (others need it)
        """Which samples from that one on, counted from it, are of earlier units."""
        return ()

    def _chunk(self, number: int) -> tuple[int, Sequence[int]]:
        return self._kept[bisect.bisect_right(self._kept, number, key=lambda kept: kept[0]) - 1]


class GroupOrigins(Origins):
    """The same of a level whose units are groups of samples of the level before.

    What is remembered are the groups that may have to be made again, and what earlier ones have left over.

    Args:
        begun_with: which samples of the level before were in groups that are known, and do not come in others.
    """

    def __init__(self, known: int = 0, begun_with: Ranges = (), *, before: int = 0) -> None:
        super().__init__(known, before=before)
        self.begun_with = begun_with
        self._oldest = 0
        self._groups: deque[Ranges] = deque()  # from the oldest on
        self._used = NumberSet(begun_with)  # by the groups before it

    def formed(self, numbers: Sequence[int]) -> None:
        """The next group has these samples of the level before, in any order."""
        self._groups.append(_ranges(numbers))

    def first(self, unit: int) -> int:
        if unit < 0:
            return -1
        at = max(0, unit - self._oldest)
        return self._groups[at][0][0] if at < len(self._groups) else self.begin(unit)

    def begin(self, unit: int) -> int:
        return self._used_before(unit).first_not

    def passed(self, unit: int) -> Ranges:
        used = self._used_before(unit)
        return tuple((start - used.first_not, stop - used.first_not) for start, stop in used.behind)

    def forget(self, number: int) -> None:
        super().forget(number)
        unit, _ = self.needed(number)
        while self._oldest < unit:
            self._used.add(self._groups.popleft())
            self._oldest += 1

    def _used_before(self, unit: int) -> NumberSet:
        if unit <= self._oldest:
            return self._used
        used = self._used.copy()
        for group in itertools.islice(self._groups, unit - self._oldest):
            used.add(group)
        return used


class NumberSet:
    """Numbers from 0 on, of which nearly all the first ones are in it: as few ranges."""

    def __init__(self, ranges: Ranges = ()) -> None:
        self._ranges = [(0, 0)]
        self.add(ranges)

    @property
    def first_not(self) -> int:
        """The first number that is not in it."""
        return self._ranges[0][1]

    @property
    def behind(self) -> Ranges:
        """What is in it behind that."""
        return tuple(self._ranges[1:])

    def copy(self) -> NumberSet:
        """The same numbers."""
        other = NumberSet()
        other._ranges = list(self._ranges)
        return other

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Put ranges in, of which none is in it yet."""
        joined = list[tuple[int, int]]()
        for start, stop in sorted([*self._ranges, *ranges]):  # both ascend: to sort them takes one pass
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        self._ranges = joined


def _ranges(numbers: Sequence[int]) -> Ranges:
    """Numbers, each of which is there once, as ranges that ascend."""
    result: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if result and result[-1][1] == number:
            result[-1] = result[-1][0], number + 1
        else:
            result.append((number, number + 1))
    return tuple(result)
