"""The level that packs documents into sequences, row by row, and the positions of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.engine.scheduler.epoch_spec import EpochSpec, InnerStage
from headrace.engine.scheduler.group_level import SharedPart, TogetherLevel, in_parts
from headrace.engine.scheduler.inner_stages import SKIPPED_LEAST, Outcome, Units
from headrace.engine.scheduler.position_map import BatchBoundaries, Origins, PositionMap, as_numbers
from headrace.errors import OptionError, StateMismatchError
from headrace.state.state import ResumePoint
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import ListPart, Part
from headrace.workers.tasks import Reply

if TYPE_CHECKING:
    from headrace.order.packed_rows import PackedRows


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
