"""The level that packs documents into sequences, as lanes determine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import OptionError, StateMismatchError
from headrace.lanes import PackedPiece, PackedSequence
from headrace.parts import ListPart, Part
from headrace.scheduler.group_level import SharedPart, TogetherLevel, in_parts
from headrace.scheduler.inner import LEFT_OUT_LEAST, Outcome, Units
from headrace.scheduler.lane_map import LaneMap
from headrace.scheduler.recipe import InnerStage
from headrace.scheduler.wiring import EpochSpec
from headrace.tasks import Reply


class LaneLevel(TogetherLevel):
    """Documents packed in lanes: a sequence is a unit and gives one sample."""

    def __init__(self, number: int, stages: Sequence[InnerStage], spec: EpochSpec, *args: Any) -> None:
        super().__init__(number, stages, spec, *args)
        assert isinstance(spec.position_map, LaneMap)
        self._lane_map, self._lanes = spec.position_map, spec.position_map.lanes
        self._held: dict[int, SharedPart] = {}  # documents that are not consumed, by name
        self._come = 0  # finished units of the level before
        self._has_failed = False  # no more sequences are made
        self._to_fail = spec.skips is None  # a failed document is raised, not skipped
        self._in_vain = 0  # consecutive units of the level before without tokens
        self._in_vain_most = None if spec.pass_count is None else max(2 * spec.pass_count, LEFT_OUT_LEAST)

    def put(self, outcome: Outcome, stop: int) -> None:
        if self.is_over or self._has_failed:
            outcome.part.release()
            return
        part, measures = outcome.part, outcome.measures or (0,) * outcome.part.count
        all_failed = not outcome.measures  # the whole task has failed
        failed = set(range(part.count) if all_failed else part.failed)
        shared, first = SharedPart(part, self._put), self._put
        try:
            for unit in range(self._come, stop):
                begin = self._put - first
                end = begin
                while end < part.count and outcome.units[end] == unit:
                    end += 1
                has_failed = [k in failed for k in range(begin, end)]
                kept = self._lanes.came(self._put, measures[begin:end], has_failed)
                self._in_vain = 0 if any(measures[begin:end]) else self._in_vain + 1
                for name, is_kept in enumerate(kept, self._put):
                    if is_kept:
                        self._held[name] = shared.share()
                for name in self._lanes.let_go():
                    self._held.pop(name).end()
                self._put = first + end
        except StateMismatchError as error:
            self._fail(ListPart([self._host.failure(error)]))
        self._come = stop
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
        failed = self._lanes.failed
        if not self._lanes.is_over and not self._has_failed:
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
        while not self._has_failed and (sequence := self._lanes.take(to_fail=self._to_fail)) is not None:
            notes = [_note(piece) for piece in sequence.pieces]
            self._add_unit(self._parts(sequence), [sequence.position], notes)

    def _fail(self, why: Part) -> None:
        self._has_failed = True
        self._add_unit([why], [self._begun])

    def _parts(self, sequence: PackedSequence) -> list[Part]:
        names = [piece.document.name for piece in sequence.pieces]
        parts = in_parts([self._held[name] for name in names], names)
        for piece in sequence.pieces:
            if piece.is_last:
                self._held.pop(piece.document.name).end()
        return parts

    def _answered(self, units: Units, reply: Reply) -> None:
        """Record failed documents missing in a sequence, to be reported with the sequence."""
        if reply.left_out:
            errors = [(units.notes[k][0], error) for k, error in reply.left_out]
            self._lane_map.leave_out(units.start, errors)

    @property
    def _chunk(self) -> int:
        return len(self._whole[0].notes) or 1


def _note(piece: PackedPiece) -> tuple[int, ...]:
    return piece.document.position, piece.start, piece.stop, piece.document.tokens
