"""Levels that make one unit from several samples, as a batcher determines."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from headrace.engine.scheduler.epoch_spec import EpochSpec, GroupStage, InnerStage
from headrace.engine.scheduler.inner_stages import SKIPPED_LEAST, Level, Outcome, Units
from headrace.engine.scheduler.position_map import BatchBoundaries, Origins, PositionMap, as_numbers
from headrace.errors import OptionError, StateMismatchError
from headrace.order.packed_rows import PackedRows
from headrace.state.state import ResumePoint
from headrace.types import Batcher, LastingBatcher
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import ApartPart, ListPart, Part, TablePart
from headrace.workers.tasks import Reply

_WAITING_MOST = 2**20  # limit of waiting samples: no group will ever come


class FoundGroup(NamedTuple):
    """Numbers of a group's samples in order, or the error to raise in place of the group."""

    numbers: Sequence[int]
    error: Exception | None = None


class GroupFinder:
    """Finds one group after the other.

    A new batcher finds each group from the waiting samples, in order. A lasting batcher finds the same groups. The next
    group thus depends on these samples only, and a run that resumes from a state without the earlier samples finds it
    too.
    """

    def __init__(self, begin: Callable[[], Batcher], name: str) -> None:
        self._begin, self._name = begin, name
        self._batcher: Batcher | None = None
        self._offered = 0  # number of samples offered to the batcher
        self._known: list[int] = []  # per offered waiting sample: its number in the batcher's count
        self._numbers: list[int] = []
        self._measures: list[int] = []

    @property
    def waiting(self) -> Sequence[int]:
        return self._numbers

    def offer(self, numbers: Iterable[int], measures: Iterable[int]) -> Iterator[FoundGroup]:
        """Add samples in ascending order and yield the groups found."""
        self._numbers.extend(numbers)
        self._measures.extend(measures)
        yield from self._found()

    def end(self) -> Iterator[FoundGroup]:
        """Yield the last groups. Samples that still wait belong to no group."""
        while self._batcher is not None and self._numbers:
            try:
                named = self._batcher.end()
                chosen = self._checked(named) if named is not None else ()
            except Exception as error:
                yield self._anew(range(len(self._numbers)), self._noted(error))
                continue
            if not chosen:
                break
            yield self._taken(chosen)
            yield from self._found()

    def cut(self) -> FoundGroup:
        """Make a group of all waiting samples, without the batcher."""
        return self._anew(range(len(self._numbers)))

    def drop(self) -> None:
        self._anew(range(len(self._numbers)))

    def _found(self) -> Iterator[FoundGroup]:
        while len(self._known) < len(self._numbers):
            self._known.append(self._offered)
            self._offered += 1
            this = len(self._known) - 1
            try:
                if this >= _WAITING_MOST:
                    raise OptionError(f"{self._name}: {_WAITING_MOST} samples wait, and its batcher names no group")
                if self._batcher is None:
                    self._batcher = self._begin()
                named = self._batcher.offer(self._measures[this])
                chosen = self._checked(named) if named is not None and len(named) else ()
            except Exception as error:  # replaces that sample; the others are offered to a new batcher
                yield self._anew([this], self._noted(error))
                continue
            if chosen:
                yield self._taken(chosen)

    def _checked(self, chosen: Sequence[int]) -> Sequence[int]:
        """Return the indices of the waiting samples that a batcher has named, or raise OptionError."""
        numbers = [operator.index(one) for one in chosen]
        places = [bisect_left(self._known, one) for one in numbers]
        if len(set(numbers)) < len(numbers) or [self._known[k] for k in places if k < len(self._known)] != numbers:
            raise OptionError(
                f"{self._name}: of {self._offered} samples that it was offered, its batcher named {numbers!r:.200}: "
                "they count from 0, and each can be in a group once"
            )
        return places

    def _taken(self, chosen: Sequence[int]) -> FoundGroup:
        """Remove the group at these indices of waiting samples. A lasting batcher stays."""
        if not isinstance(self._batcher, LastingBatcher):
            return self._anew(chosen)
        lasting, offered, known = self._batcher, self._offered, self._known
        for k in sorted(chosen, reverse=True):
            del known[k]
        group = self._anew(chosen)
        self._batcher, self._offered, self._known = lasting, offered, known
        return group

    def _anew(self, chosen: Sequence[int], error: Exception | None = None) -> FoundGroup:
        """Remove the group and offer the remaining samples to a new batcher."""
        numbers = [self._numbers[k] for k in chosen]
        for k in sorted(chosen, reverse=True):
            del self._numbers[k], self._measures[k]
        self._batcher, self._offered, self._known = None, 0, []
        return FoundGroup(numbers, error)

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"stage: {self._name}, while samples were put together")
        return error


class TogetherLevel(Level):
    """A level whose units are made of several samples and wait until complete."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._whole: deque[Units] = deque()
        self._begun = 0  # number of units

    def drop(self) -> None:
        super().drop()
        for part in (part for units in self._whole for part in units.parts):
            part.release()
        self._whole.clear()

    def _add_unit(self, parts: list[Part], positions: Sequence[int], notes: Sequence[tuple[int, ...]] = ()) -> None:
        self._whole.append(Units(self._begun, 1, parts, positions, notes))
        self._begun += 1
        self.inside += len(positions)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._whole)

    @property
    def _first_waiting(self) -> int:
        return self._whole[0].start

    def _take(self) -> Units:
        return self._whole.popleft()

    def _size_of(self, units: Units) -> int:
        return len(units.positions)


class GroupLevel(TogetherLevel):
    """Groups samples: a group is a unit. The first stage has the batcher and makes the groups."""

    def __init__(self, number: int, stages: Sequence[InnerStage], spec: EpochSpec, *args: Any) -> None:
        super().__init__(number, stages, spec, *args)
        (stage,) = (stage for stage in stages if isinstance(stage, GroupStage))
        assert stage.batcher is not None
        self._finder, self._is_measured = GroupFinder(stage.batcher, stage.name), stage.is_measured
        self._to_fail = stage.is_measured and spec.skips is None  # failed samples have no measure
        self._clock = _Clock(stage.max_wait_s)
        # Samples without a group, by number: the part that contains the sample, and its position.
        self._waiting: dict[int, tuple[SharedPart, int]] = {}
        self._begun_with = deque(self._origins.begun_with)

    def put(self, outcome: Outcome, stop: int) -> None:
        if self.is_over:
            outcome.part.release()
            return
        part, first = outcome.part, self._put
        self._put += part.count
        measures = outcome.measures or [0 if self._is_measured else 1] * part.count
        numbers: Sequence[int] = range(first, self._put)
        if self._begun_with:
            numbers = [number for number in numbers if not self._is_begun_with(number)]
        shared = SharedPart(part, first, 1 + len(numbers))
        self._waiting |= zip(numbers, [(shared, outcome.positions[number - first]) for number in numbers], strict=True)
        failed = [first + place for place in part.failed] if self._to_fail else []
        for some, alone in divided(numbers, failed):
            for group in self._finder.offer(some, [measures[number - first] for number in some]):
                self._close(group)
            if alone is not None:
                self._close(FoundGroup([alone]))
        shared.end()
        self.begin()

    def begin(self) -> None:
        """Start waiting units. Close a group that has timed out only if the consumer can take it.

        An earlier cut would only make the group smaller, as it would have to wait afterwards.
        """
        if self._clock.is_due(self._finder.waiting) and not self._whole and self._host.lacks:
            self._close(self._finder.cut())
        self._clock.watch(self._finder.waiting, self.group, self.begin)
        super().begin()

    def flush(self) -> None:
        """End the input: drop samples without a group. The first failure among them is reported."""
        for group in self._finder.end():
            self._close(group)
        left = list(self._finder.waiting)
        self._finder.drop()
        positions, parts = self._take_out(left)
        failed = next((part.cut(part.failed[0], part.failed[0] + 1) for part in parts if part.failed), None)
        for part in parts:
            part.release()
        if failed is not None:
            self._form(left, [failed], positions[:1])
        self.begin()

    def drop(self) -> None:
        super().drop()
        self._clock.stop()
        self._finder.drop()
        for shared, _ in self._waiting.values():
            shared.end()
        self._waiting.clear()

    def _is_begun_with(self, number: int) -> bool:
        """True if the sample belongs to a group that was made before the state."""
        begun_with = self._begun_with
        while begun_with and begun_with[0][1] <= number:
            begun_with.popleft()
        return bool(begun_with) and begun_with[0][0] <= number

    def _close(self, group: FoundGroup) -> None:
        positions, parts = self._take_out(group.numbers)
        if group.error is not None:
            for part in parts:
                part.release()
            positions, parts = positions[:1], [ListPart([self._host.failure(group.error)])]
        self._form(group.numbers, parts, positions)

    def _form(self, numbers: Sequence[int], parts: list[Part], positions: Sequence[int]) -> None:
        self._origins.formed(numbers)
        self._add_unit(parts, positions)

    def _take_out(self, numbers: Sequence[int]) -> tuple[list[int], list[Part]]:
        """Return (positions of waiting samples, the samples in as few parts as possible)."""
        waiting = [self._waiting.pop(number) for number in numbers]
        parts = in_parts([shared for shared, _ in waiting], numbers)
        for shared, _ in waiting:
            shared.end()
        return [position for _, position in waiting], parts

    @property
    def _chunk(self) -> int:
        return len(self._whole[0].positions)


class _Clock:
    """Measures how long the first sample without a group has waited."""

    def __init__(self, max_wait_s: float | None) -> None:
        self._max_wait_s = max_wait_s
        self._first: int | None = None  # number of the watched sample
        self._scope: anyio.CancelScope | None = None  # scope of the running timer
        self._is_over = False  # the watched sample has timed out

    def is_due(self, waiting: Sequence[int]) -> bool:
        return self._is_over and bool(waiting) and waiting[0] == self._first

    def watch(self, waiting: Sequence[int], group: TaskGroup | None, due: Callable[[], None]) -> None:
        """Call `due` once the first waiting sample has timed out, unless another is first by then."""
        first = waiting[0] if waiting else None
        if self._max_wait_s is None or first == self._first:
            return
        self.stop()
        self._first, self._is_over = first, False
        if first is not None:
            assert group is not None
            self._scope = anyio.CancelScope()
            group.start_soon(self._wait, self._scope, anyio.current_time() + self._max_wait_s, due)

    def stop(self) -> None:
        self._first = None
        if self._scope is not None:
            self._scope.cancel()

    async def _wait(self, scope: anyio.CancelScope, until: float, due: Callable[[], None]) -> None:
        with scope:
            await anyio.sleep_until(until)
            self._is_over = True
        if self._scope is scope and self._is_over:
            due()


class SharedPart:
    """A part with a reference count of the samples that wait. `start` is its first number."""

    def __init__(self, part: Part, start: int, users: int = 1) -> None:
        self._part, self._start, self._users = part, start, users

    def share(self) -> SharedPart:
        self._users += 1
        return self

    def end(self) -> None:
        self._users -= 1
        if not self._users:
            self._part.release()

    def some(self, numbers: Sequence[int]) -> list[Part]:
        """Return the samples with these numbers in as few parts as possible, with their own leases."""
        chosen = [number - self._start for number in numbers]
        if isinstance(self._part, ApartPart | TablePart):
            return [self._part.take(chosen)]
        edges = [k for k in range(1, len(chosen)) if chosen[k] != chosen[k - 1] + 1]
        return [self._part.cut(chosen[a], chosen[b - 1] + 1) for a, b in pairwise([0, *edges, len(chosen)])]


def divided(numbers: Sequence[int], failed: Sequence[int]) -> Iterator[tuple[Sequence[int], int | None]]:
    """Split ascending numbers into runs, each with the number of `failed` that ends it, or None."""
    start = 0
    for number in failed:
        stop = bisect_left(numbers, number, start)
        if stop < len(numbers) and numbers[stop] == number:
            yield numbers[start:stop], number
            start = stop + 1
    yield numbers[start:], None


def in_parts(shared: Sequence[SharedPart], numbers: Sequence[int]) -> list[Part]:
    """Return samples, by part and number, in as few parts as possible, with their own leases."""
    parts, done = list[Part](), 0
    while done < len(numbers):
        stop = done + 1
        while stop < len(numbers) and shared[stop] is shared[done]:
            stop += 1
        parts += shared[done].some(numbers[done:stop])
        done = stop
    return parts


class RowMap(PositionMap):
    """The sequences of one epoch on one rank. `kept_from` is the position of the first one."""

    has_rows = True

    def __init__(self, kept_from: int, rows: PackedRows) -> None:
        positions = lambda start, stop: as_numbers(rows.positions(start, stop))
        super().__init__(positions, kept_from, levels=(Origins(), Origins()))
        self.rows = rows
        self._skipped: dict[int, list[tuple[int, PackedError]]] = {}  # by the sequence that would have had them

    def in_batches(self, start: int, stop: int) -> Sequence[int]:
        assert self._kept_from is not None
        return range(self._kept_from + start, self._kept_from + stop)

    def arrived(self, level: int, units: Sequence[int]) -> None:
        if level:  # documents are tracked by the rows
            self._known += len(units)

    def skip(self, number: int, errors: list[tuple[int, PackedError]]) -> None:
        """Record (position, error) of failed documents missing in the sequence `number`."""
        self._skipped[number] = errors

    def left_out(self, start: int, stop: int) -> Sequence[tuple[int, PackedError]]:
        return [one for number in range(start, stop) for one in self._skipped.pop(number, ())]

    def after(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ResumePoint:
        rows = self.rows.after(boundaries.start(self._first_not))
        return ResumePoint(used=self._used, skipped=skipped, rows=rows)

    def _use(self, start: int, stop: int) -> None:
        """Nothing to do: rows track this."""

    def _forget(self, oldest: int) -> None:
        """Nothing to do: rows track this."""


class RowLevel(TogetherLevel):
    """Documents packed in rows: a sequence is a unit and gives one sample."""

    def __init__(self, number: int, stages: Sequence[InnerStage], spec: EpochSpec, *args: Any) -> None:
        super().__init__(number, stages, spec, *args)
        assert isinstance(spec.position_map, RowMap)
        self._map, self._rows = spec.position_map, spec.position_map.rows
        self._held: dict[int, SharedPart] = {}  # documents that are not consumed, by name
        self._arrived = 0  # finished units of the level before
        self._has_failed = False  # no more sequences are made
        self._to_fail = spec.skips is None  # a failed document is raised, not skipped
        self._in_vain = 0  # consecutive units of the level before without tokens
        self._in_vain_most = None if spec.pass_count is None else max(2 * spec.pass_count, SKIPPED_LEAST)

    def put(self, outcome: Outcome, stop: int) -> None:
        if self.is_over or self._has_failed:
            outcome.part.release()
            return
        part, measures = outcome.part, outcome.measures or (0,) * outcome.part.count
        failed = set(part.failed if outcome.measures else range(part.count))  # no measures: the whole task has failed
        shared, first, begin = SharedPart(part, self._put), self._put, 0
        try:
            for unit in range(self._arrived, stop):
                end = begin
                while end < part.count and outcome.units[end] == unit:
                    self._held[first + end] = shared.share()
                    end += 1
                has_failed = [k in failed for k in range(begin, end)]
                for name in self._rows.arrive(first + begin, measures[begin:end], has_failed):
                    self._held.pop(name).end()
                self._in_vain = 0 if any(measures[begin:end]) else self._in_vain + 1
                begin = end
        except StateMismatchError as error:
            self._fail(ListPart([self._host.failure(error)]))
        self._put, self._arrived = first + begin, stop
        shared.end()
        self._make()
        if self._in_vain_most is not None and self._in_vain > self._in_vain_most and not self._has_failed:
            why = (
                f".pack(): {self._in_vain} documents one after the other had no tokens, or failed, and a row of the "
                "batch lacks some; without .shuffle() before .pack() a row may get the same documents in each pass"
            )
            self._fail(ListPart([self._host.failure(OptionError(why))]))
            self._host.filled(self.number - 1)  # rows without a sequence must not delay the error's batch
        self.begin()

    def flush(self) -> None:
        """End the input. If documents are missing, the source's error is one of the documents."""
        self._make()
        failed = self._rows.failed
        if not self._rows.is_over and not self._has_failed:
            assert failed is not None, "a source has ended without an error before all documents came"
            (part,) = self._held[failed.name].some([failed.name])
            self._fail(part)
        self.begin()

    def drop(self) -> None:
        super().drop()
        for shared in self._held.values():
            shared.end()
        self._held.clear()

    def _make(self) -> None:
        while not self._has_failed and (sequence := self._rows.take(to_fail=self._to_fail)) is not None:
            pieces = sequence.pieces
            names = [document.name for document, _, _ in pieces]
            parts = in_parts([self._held[name] for name in names], names)
            for piece in pieces:
                if piece.is_last:
                    self._held.pop(piece.document.name).end()
            notes = [(document.position, start, stop, document.tokens) for document, start, stop in pieces]
            self._add_unit(parts, [sequence.position], notes)

    def _fail(self, why: Part) -> None:
        self._has_failed = True
        self._add_unit([why], [self._begun])

    def _answered(self, units: Units, reply: Reply) -> None:
        """Record failed documents missing in a sequence, to be reported with the sequence."""
        if reply.left_out:
            errors = [(units.notes[k][0], error) for k, error in reply.left_out]
            self._map.skip(units.start, errors)

    @property
    def _chunk(self) -> int:
        return len(self._whole[0].notes) or 1
