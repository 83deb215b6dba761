"""Where the samples of an epoch are: their positions in its plan, and which of them have been delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.delivery import AfterEach, ProgressDelta
from headrace.failures import PackedError
from headrace.scheduler.boundaries import BatchBoundaries
from headrace.scheduler.origins import Origins
from headrace.tasks import Task
from headrace.types import Ints, Ranges

Repeated = Callable[[Ints], int]
"""How many of the source's samples, given by their numbers, are of a second or later pass over its data."""

Positions = Callable[[int, int], Sequence[int]]
"""The positions in the epoch of the `start`-th up to the `stop`-th sample that a source gives."""


class RunAgain(NamedTuple):
    """What must be run again for the samples of batches from some one on.

    Attributes:
        first: the first of the source's samples, by its numbers.
        known: of each level, how many samples are known that it then gives first.
        passed: for each level behind the first, which of the samples that it is then given are of groups that are not
            made again.
        given: of each level but the last, how many samples it gave in the epoch before those that it then gives first.
    """

    first: int
    known: tuple[int, ...]
    passed: tuple[Ranges, ...]
    given: tuple[int, ...]


class PositionMap:
    """The samples of one epoch on one rank.

    The source counts what it gives; where some of that may be left out, what is left is counted anew for batches.

    Args:
        positions: of what the source gives; None: its own numbers.
        kept_from: the position of the first sample that is left; None: none is left out, and none becomes many.
        mark: asked for a place where the source can be begun again; None: positions tell it.
        levels: of what samples are made, where some are left out, or become many, or are put together on the way.
        is_limited: whether a level before the last one gives some number of samples at most, so that they are counted.
        repeated: counts samples of later passes than the first, until the source says where these begin; None: they are
            not counted.
    """

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
        self._delivered: set[int] = set()  # batches that were, above the first that was not
        self._first_not = 0
        self._covers: list[tuple[int, int]] = []  # since the last message
        self._used = 0  # samples of batches, since then
        self._repeated_of, self._repeated, self._is_again = repeated, 0, False
        self._known = 0  # samples by their numbers in batches, of which it is known what they are
        self._unknown: list[tuple[int, int, int]] = []  # batches that were delivered before all of theirs were known

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
        return [
            self.positions(at, at + 1)[0]
            for at in (self.source_number(len(self.levels) - 1, number) for number in range(start, stop))
        ]

    def left_out(self, start: int, stop: int) -> Sequence[tuple[int, PackedError]]:  # noqa: ARG002 (lanes need it)
        """(position, error) of what was left out on the way to these samples of batches; asked for once."""
        return ()

    def arrived(self, level: int, units: Sequence[int]) -> None:
        """The next samples of a level are of these units: of the first one's, by the source's numbers."""
        if self._kept_from is not None:
            self.levels[level].arrived(units)
            self._known = max(0, self.levels[-1].stop)

    def source_number(self, level: int, number: int) -> int:
        """The source's number of what has this one in a level; -1 before the first."""
        for origins in reversed(self.levels[: level + 1]):
            number = origins.first(origins.unit(number))
        return number

    def needed(self, number: int) -> int:
        """The first of the source's samples that must be run again for those of batches from this one on."""
        for origins in reversed(self.levels):
            number = origins.begin(origins.needed(number)[0])
        return number

    def run_again(self, number: int) -> RunAgain:
        """What must be run again for the samples of batches from this one on."""
        known, passed, given = list[int](), list[Ranges](), list[int]()
        for origins in reversed(self.levels):
            given.append(origins.before + number)
            unit, part = origins.needed(number)
            number = origins.begin(unit)
            known.append(part)
            passed.append(origins.passed(unit))
        return RunAgain(number, tuple(known[::-1]), tuple(passed[-2::-1]), tuple(given[:0:-1]))

    def put(self, stop: int) -> None:
        """The source has put all samples before this one, by its own numbers."""
        if self._kept_from is None:
            self._known = stop

    def begin_again(self, number: int) -> None:
        """The source's samples from this number on are of a later pass than the first."""
        if self._repeated_of is not None and not self._is_again:
            self._is_again = True
            self._repeated_of = lambda numbers: int((numbers >= number).sum())

    def cover(self, number: int, start: int, stop: int, boundaries: BatchBoundaries) -> None:
        """A batch was delivered, or left out, that has these samples.

        An error may have ended it before all of them came. Where they lie in the source is not known then, or whether
        it goes on as far: states tell of it once that is.
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
        """How many of these samples of batches are of a later pass than the first."""
        if self._repeated_of is None:
            return 0
        if self._kept_from is None:
            return self._repeated_of(np.arange(start, stop))
        last = len(self.levels) - 1
        return self._repeated_of(np.array([self.source_number(last, number) for number in range(start, stop)]))

    def _use(self, start: int, stop: int) -> None:
        """These samples of batches are used up."""
        if self._kept_from is None:
            self._covers.append((start, stop))
        elif (first := self.needed(start)) < (end := self.needed(stop)):
            self._covers.append((first, end))

    def _forget(self, oldest: int) -> None:
        """Samples of batches before this one are not asked for any more."""
        for origins in reversed(self.levels):
            origins.forget(oldest)
            oldest = origins.begin(origins.needed(oldest)[0])

    def after_each(self, number: int, count: int, skipped: tuple[int, int]) -> AfterEach | None:
        """`cover` and `after` for each of so many batches of one sample, the first of them with this number.

        None, and nothing is done: more is to be said of them than that they follow one another.
        """
        if self._kept_from is not None or self._covers or self._delivered or self._first_not != number:
            return None
        stop, mark = number + count, self._mark
        if self._count_repeated(number, stop):
            return None
        if mark is not None and stop > self._known:
            return None
        self._first_not = stop
        return AfterEach(number, count, skipped, () if mark is None else [mark(at + 1) for at in range(number, stop)])

    def late(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ProgressDelta | None:
        """What a state says besides of batches that were delivered before this was known; None: nothing."""
        if not any(stop <= self._known for _, _, stop in self._unknown):
            return None
        unknown, self._unknown = self._unknown, []
        for number, start, stop in unknown:
            self.cover(number, start, stop, boundaries)
        return self.after(boundaries, skipped)

    def after(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ProgressDelta:
        """What a state says once all that was delivered so far has been received."""
        covers, self._covers = tuple(self._covers), []
        used, self._used = self._used, 0
        repeated, self._repeated = self._repeated, 0
        oldest = boundaries.start(self._first_not)
        known, passed, given = tuple[int, ...](), tuple[Ranges, ...](), tuple[int, ...]()
        if self._kept_from is not None:
            oldest, known, passed, given = self.run_again(oldest)
        mark = None if self._mark is None else self._mark(oldest)
        if not any(passed):
            passed, known = (), known if any(known) else ()
        given = given if self._is_limited else ()
        return ProgressDelta(covers, mark, skipped, used, known, passed, given, repeated=repeated)


def as_numbers(positions: Ints) -> Sequence[int]:
    """Positions as a task carries them, of Python's own numbers: a range where they follow one another."""
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1 and bool((np.diff(positions) == 1).all()):
        return range(int(positions[0]), int(positions[-1]) + 1)
    numbers: list[int] = positions.tolist()
    return numbers
