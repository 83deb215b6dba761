"""Positions and batches of an epoch's samples, what they were made of, and which have been delivered."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from headrace.order.cursor import united
from headrace.state.state import EvenPoints, ResumePoint, StagePoint
from headrace.types import Ints, Ranges
from headrace.workers.failures import PackedError
from headrace.workers.tasks import Task

_START = StagePoint()


class Origins:
    """Maps the samples of a level, by number, to the units they were made from.

    A unit may give many samples, or none. All samples of a unit arrive at once, and units arrive in order. After a
    resume in the middle of the first unit, its samples that are already known have negative numbers.

    Attributes:
        known: Number of the first unit's samples that are already known.
        begun_with: Samples of the level before whose groups are known. They join no other group.
        before: Number of samples of the level in the epoch before number 0.
    """

    def __init__(self, begin: StagePoint = _START) -> None:
        self.known, self.begun_with, self.before = begin
        self.stop = -self.known  # number of the next sample
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

    def used(self, unit: int) -> Ranges:
        """Return the samples from that number on, relative to it, that belong to earlier units."""
        return ()

    def _chunk(self, number: int) -> tuple[int, Sequence[int]]:
        return self._kept[bisect.bisect_right(self._kept, number, key=lambda kept: kept[0]) - 1]


class GroupOrigins(Origins):
    """Origins of a level whose units are groups of samples of the level before.

    Stores the groups that may be repeated, and the set of samples used by earlier groups.
    """

    def __init__(self, begin: StagePoint = _START) -> None:
        super().__init__(begin)
        self._oldest = 0
        self._groups: deque[Ranges] = deque()  # starting with the oldest
        self._used = united(self.begun_with)  # samples of groups before the oldest: few ranges

    def formed(self, numbers: Sequence[int]) -> None:
        self._groups.append(united((number, number + 1) for number in numbers))

    def first(self, unit: int) -> int:
        if unit < 0:
            return -1
        at = max(0, unit - self._oldest)
        return self._groups[at][0][0] if at < len(self._groups) else self.begin(unit)

    def begin(self, unit: int) -> int:
        return _first_gap(self._used_before(unit))

    def used(self, unit: int) -> Ranges:
        used = self._used_before(unit)
        begin = _first_gap(used)
        return tuple((start - begin, stop - begin) for start, stop in used if start > begin)

    def forget(self, number: int) -> None:
        super().forget(number)
        unit, _ = self.needed(number)
        while self._oldest < unit:
            self._used = united([*self._used, *self._groups.popleft()])
            self._oldest += 1

    def _used_before(self, unit: int) -> Ranges:
        if unit <= self._oldest:
            return self._used
        groups = itertools.islice(self._groups, unit - self._oldest)
        return united(itertools.chain(self._used, *groups))


def _first_gap(ranges: Ranges) -> int:
    """Return the lowest number from 0 on that is not in the ranges."""
    return ranges[0][1] if ranges and not ranges[0][0] else 0


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


Repeated = Callable[[Ints], int]
"""Counts the source samples, given by number, that belong to a second or later pass over the data."""

Positions = Callable[[int, int], Sequence[int]]
"""Returns positions in the epoch of a source's samples [start, stop)."""


class PositionMap:
    """The samples of one epoch on one rank.

    Source samples have numbers. If some may be skipped, the remaining ones are numbered separately for batches.

    Args:
        positions: Returns positions of source samples. None: position and number are equal.
        kept_from: Position of the first remaining sample. None: each source sample gives exactly one.
        mark: Returns a resume mark of the source. None: positions suffice.
        levels: Origins of samples, if some are skipped, multiplied or grouped.
        is_limited: True if a level before the last one has a limit, so that its samples are counted.
        repeated: Counts samples of later passes, until the source reports where these begin. None: not counted.
    """

    has_rows = False

    def __init__(
        self,
        positions: Positions | None = None,
        kept_from: int | None = None,
        mark: Callable[[int], object] | None = None,
        levels: Sequence[Origins] = (),
        *,
        is_limited: bool = False,
        repeated: Repeated | None = None,
    ) -> None:
        self._positions, self._kept_from, self._mark = positions, kept_from, mark
        self.levels, self._is_limited = levels or (Origins(),), is_limited
        self._delivered: set[int] = set()  # delivered batches after the first that was not
        self._first_not = 0
        self._covers: Ranges = ()  # source samples of delivered batches
        self._used = 0  # samples of delivered batches
        self._repeated_of, self._repeated, self._is_again = repeated, 0, False
        self._known = 0  # samples of batches before this number have arrived
        self._unknown: list[tuple[int, int, int]] = []  # batches delivered before all their samples were known

    def positions(self, start: int, stop: int) -> Sequence[int]:
        return range(start, stop) if self._positions is None else self._positions(start, stop)

    def place(self, task: Task, start: int, count: int) -> None:
        """Set the positions of a task's samples, given by their numbers in batches."""
        task.position = start
        if self._kept_from is not None:
            task.positions = range(self._kept_from + start, self._kept_from + start + count)
        elif self._positions is not None:
            task.positions = self._positions(start, start + count)

    def in_batches(self, start: int, stop: int) -> Sequence[int]:
        """Return the source positions of samples of batches, as far as known."""
        if self._kept_from is None:
            return self.positions(start, stop)
        return [
            self.positions(at, at + 1)[0]
            for at in (self.source_number(len(self.levels) - 1, number) for number in range(start, stop))
        ]

    def left_out(self, start: int, stop: int) -> Sequence[tuple[int, PackedError]]:
        """Return and forget (position, error) of inputs skipped in these samples of batches."""
        return ()

    def arrived(self, level: int, units: Sequence[int]) -> None:
        if self._kept_from is not None:
            self.levels[level].arrived(units)
            self._known = max(0, self.levels[-1].stop)

    def source_number(self, level: int, number: int) -> int:
        """Return the source number of a level's sample; -1 before the first."""
        for origins in reversed(self.levels[: level + 1]):
            number = origins.first(origins.unit(number))
        return number

    def needed(self, number: int) -> int:
        """Return the first source sample to repeat for samples of batches from `number` on."""
        for origins in reversed(self.levels):
            number = origins.begin(origins.needed(number)[0])
        return number

    def put(self, stop: int) -> None:
        if self._kept_from is None:
            self._known = stop

    def begin_again(self, number: int) -> None:
        """Record that source samples from `number` on belong to a later pass."""
        if self._repeated_of is not None and not self._is_again:
            self._is_again = True
            self._repeated_of = lambda numbers: int((numbers >= number).sum())

    def cover(self, number: int, start: int, stop: int, boundaries: BatchBoundaries) -> None:
        """Mark a batch as delivered or dropped.

        If an error ended the batch before all its samples came, their positions in the source are not known. `late`
        reports them as soon as they are.
        """
        if stop > self._known and (self._kept_from is not None or self._mark is not None):
            self._unknown.append((number, start, stop))
            return
        self._used += stop - start
        self._repeated += self._count_repeated(start, stop)
        self._use(start, stop)
        self._delivered.add(number)
        while self._first_not in self._delivered:
            self._delivered.discard(self._first_not)
            self._first_not += 1
        self._forget(boundaries.start(self._first_not))

    def _count_repeated(self, start: int, stop: int) -> int:
        if self._repeated_of is None:
            return 0
        if self._kept_from is None:
            return self._repeated_of(np.arange(start, stop))
        last = len(self.levels) - 1
        return self._repeated_of(np.array([self.source_number(last, number) for number in range(start, stop)]))

    def _use(self, start: int, stop: int) -> None:
        if self._kept_from is not None:
            start, stop = self.needed(start), self.needed(stop)
        self._covers = united([*self._covers, (start, stop)])

    def _forget(self, oldest: int) -> None:
        for origins in reversed(self.levels):
            origins.forget(oldest)
            oldest = origins.begin(origins.needed(oldest)[0])

    def after_each(self, number: int, count: int, start: int, size: int, skipped: tuple[int, int]) -> EvenPoints | None:
        """Run `cover` and `after` for `count` batches of `size` samples, from batch `number` at position `start` on.

        Returns None without any effect if the batches do not simply follow each other.
        """
        stop, mark = start + count * size, self._mark
        is_next = self._first_not == number and not self._delivered
        if self._kept_from is not None or not is_next or self._count_repeated(start, stop):
            return None
        if mark is not None and stop > self._known:
            return None
        marks = () if mark is None else [mark(end) for end in range(start + size, stop + 1, size)]
        before = ResumePoint(self._covers, self._used, None, skipped, repeated=self._repeated)
        self._first_not, self._used, self._covers = number + count, self._used + stop - start, ((0, stop),)
        return EvenPoints(before, count, size, marks)

    def late(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ResumePoint | None:
        """Return the resume point after earlier batches that have become known, if any."""
        if not any(stop <= self._known for _, _, stop in self._unknown):
            return None
        unknown, self._unknown = self._unknown, []
        for number, start, stop in unknown:
            self.cover(number, start, stop, boundaries)
        return self.after(boundaries, skipped)

    def after(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ResumePoint:
        """Return the resume point once everything delivered so far has been received."""
        number, stages = boundaries.start(self._first_not), list[StagePoint]()
        if self._kept_from is not None:
            for origins in reversed(self.levels):
                emitted = origins.before + number if self._is_limited and stages else 0  # not of the last level
                unit, skip = origins.needed(number)
                number = origins.begin(unit)
                stages.append(StagePoint(skip, origins.used(unit), emitted))
        mark = None if self._mark is None else self._mark(number)
        of_stages = tuple(reversed(stages)) if any(map(any, stages)) else ()
        return ResumePoint(self._covers, self._used, mark, skipped, of_stages, repeated=self._repeated)


def as_numbers(positions: Ints) -> Sequence[int]:
    """Convert positions to Python ints: a range if they are consecutive."""
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1 and bool((np.diff(positions) == 1).all()):
        return range(int(positions[0]), int(positions[-1]) + 1)
    numbers: list[int] = positions.tolist()
    return numbers
