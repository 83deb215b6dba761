"""Origins of the samples of a level: source samples or groups."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.types import Ranges


class Origins:
    """Maps the samples of a level, by number, to the units they were made from.

    A unit may give many samples, or none. All samples of a unit arrive at once, and units arrive in order. After a
    resume in the middle of the first unit, its samples that are already known have negative numbers.

    Args:
        known: Number of the first unit's samples that are already known.
        before: Number of samples of the level in the epoch before number 0.
    """

    def __init__(self, known: int = 0, *, before: int = 0) -> None:
        self.known, self.before = known, before
        self.begun_with: Ranges = ()
        self.stop = -known  # number of the next sample
        self._kept: list[tuple[int, Sequence[int]]] = []  # (number of the first sample, units), ascending

    def arrived(self, units: Sequence[int]) -> None:
        if len(units):
            self._kept.append((self.stop, units))
            self.stop += len(units)

    def unit(self, number: int) -> int:
        """Return the unit of a sample, or the last known unit; -1 before the first."""
        if number < 0 or not self._kept:
            return -1
        start, units = self._chunk(number)
        return int(units[min(number - start, len(units) - 1)])

    def needed(self, number: int) -> tuple[int, int]:
        """Return (first unit to repeat for a sample and later ones, number of its samples to skip)."""
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
        """Forget samples before the one directly before `number`."""
        while len(self._kept) > 1 and self._kept[1][0] < number:
            del self._kept[0]

    def formed(self, numbers: Sequence[int]) -> None:
        """Record the samples of the next unit, in any order. Not needed for source samples."""

    def first(self, unit: int) -> int:
        """Return the number in the level before of a unit's first sample; -1 before the first unit."""
        return unit

    def begin(self, unit: int) -> int:
        """Return the lowest number in the level before that this unit or a later one needs."""
        return unit

    def passed(self, unit: int) -> Ranges:  # noqa: ARG002 (subclasses need it)
        """Return the samples from that number on, relative to it, that belong to earlier units."""
        return ()

    def _chunk(self, number: int) -> tuple[int, Sequence[int]]:
        return self._kept[bisect.bisect_right(self._kept, number, key=lambda kept: kept[0]) - 1]


class GroupOrigins(Origins):
    """Origins of a level whose units are groups of samples of the level before.

    Stores the groups that may be repeated, and the set of samples used by earlier groups.

    Args:
        begun_with: Samples of the level before whose groups are known. They join no other group.
    """

    def __init__(self, known: int = 0, begun_with: Ranges = (), *, before: int = 0) -> None:
        super().__init__(known, before=before)
        self.begun_with = begun_with
        self._oldest = 0
        self._groups: deque[Ranges] = deque()  # starting with the oldest
        self._used = NumberSet(begun_with)  # samples of groups before the oldest

    def formed(self, numbers: Sequence[int]) -> None:
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
    """A set of numbers from 0 on, stored as few ranges, as it contains nearly all low numbers."""

    def __init__(self, ranges: Ranges = ()) -> None:
        self._ranges = [(0, 0)]
        self.add(ranges)

    @property
    def first_not(self) -> int:
        return self._ranges[0][1]

    @property
    def behind(self) -> Ranges:
        return tuple(self._ranges[1:])

    def copy(self) -> NumberSet:
        other = NumberSet()
        other._ranges = list(self._ranges)
        return other

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        joined = list[tuple[int, int]]()
        for start, stop in sorted([*self._ranges, *ranges]):  # both ascend, so sorting takes one pass
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        self._ranges = joined


def _ranges(numbers: Sequence[int]) -> Ranges:
    result: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if result and result[-1][1] == number:
            result[-1] = result[-1][0], number + 1
        else:
            result.append((number, number + 1))
    return tuple(result)
