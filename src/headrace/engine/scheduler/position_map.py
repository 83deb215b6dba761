"""Positions of an epoch's samples in its plan, and which of them have been delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.delivery.messages import AfterEach, ProgressDelta
from headrace.engine.scheduler.batch_bounds import BatchBoundaries
from headrace.engine.scheduler.lineage import Origins
from headrace.types import Ints, Ranges
from headrace.workers.failures import PackedError
from headrace.workers.tasks import Task

Repeated = Callable[[Ints], int]
"""Counts the source samples, given by number, that belong to a second or later pass over the data."""

Positions = Callable[[int, int], Sequence[int]]
"""Returns positions in the epoch of a source's samples [start, stop)."""


class RunAgain(NamedTuple):
    """The work to repeat for the samples of batches from a given one on.

    Attributes:
        first: First source sample, by source number.
        known: Per level: number of first samples that are already known.
        passed: Per level after the first: input samples whose groups are not made again.
        given: Per level but the last: samples emitted in the epoch before the repeated ones.
    """

    first: int
    known: tuple[int, ...]
    passed: tuple[Ranges, ...]
    given: tuple[int, ...]


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
        self._covers: list[tuple[int, int]] = []  # since the last message
        self._used = 0  # samples of batches since the last message
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

    def left_out(self, start: int, stop: int) -> Sequence[tuple[int, PackedError]]:  # noqa: ARG002 (packed rows need it)
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

    def run_again(self, number: int) -> RunAgain:
        """Return the work to repeat for samples of batches from `number` on."""
        known, passed, given = list[int](), list[Ranges](), list[int]()
        for origins in reversed(self.levels):
            given.append(origins.before + number)
            unit, part = origins.needed(number)
            number = origins.begin(unit)
            known.append(part)
            passed.append(origins.passed(unit))
        return RunAgain(number, tuple(known[::-1]), tuple(passed[-2::-1]), tuple(given[:0:-1]))

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
        if self._kept_from is None:
            self._covers.append((start, stop))
        elif (first := self.needed(start)) < (end := self.needed(stop)):
            self._covers.append((first, end))

    def _forget(self, oldest: int) -> None:
        for origins in reversed(self.levels):
            origins.forget(oldest)
            oldest = origins.begin(origins.needed(oldest)[0])

    def after_each(self, number: int, count: int, start: int, size: int, skipped: tuple[int, int]) -> AfterEach | None:
        """Run `cover` and `after` for `count` batches of `size` samples, from batch `number` at position `start` on.

        Returns None without any effect if the batches do not simply follow each other.
        """
        if self._kept_from is not None or self._covers or self._delivered or self._first_not != number:
            return None
        stop, mark = start + count * size, self._mark
        if self._count_repeated(start, stop):
            return None
        if mark is not None and stop > self._known:
            return None
        self._first_not = number + count
        marks = () if mark is None else [mark(end) for end in range(start + size, stop + 1, size)]
        return AfterEach(start, count, size, skipped, marks)

    def late(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ProgressDelta | None:
        """Return the state change for earlier batches that have become known, if any."""
        if not any(stop <= self._known for _, _, stop in self._unknown):
            return None
        unknown, self._unknown = self._unknown, []
        for number, start, stop in unknown:
            self.cover(number, start, stop, boundaries)
        return self.after(boundaries, skipped)

    def after(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ProgressDelta:
        """Return the state change once everything delivered so far has been received."""
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
    """Convert positions to Python ints: a range if they are consecutive."""
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1 and bool((np.diff(positions) == 1).all()):
        return range(int(positions[0]), int(positions[-1]) + 1)
    numbers: list[int] = positions.tolist()
    return numbers
