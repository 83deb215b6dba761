"""Positions and progress of an epoch whose documents are packed in lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.delivery import ProgressDelta
from headrace.failures import PackedError
from headrace.lanes import Document, LaneProgress, PackedSequence
from headrace.scheduler.boundaries import BatchBoundaries
from headrace.scheduler.origins import Origins
from headrace.scheduler.position_map import PositionMap, Positions


class Lanes(Protocol):
    """One rank's lanes: `headrace.plan.lane_run.LaneRun`."""

    @property
    def is_over(self) -> bool: ...

    @property
    def failed(self) -> Document | None: ...

    def came(self, name: int, tokens: Sequence[int], failed: Sequence[bool]) -> list[bool]: ...

    def let_go(self) -> Sequence[int]: ...

    def take(self, *, to_fail: bool = False) -> PackedSequence | None: ...

    def after(self, sequences: int) -> LaneProgress: ...


class LaneMap(PositionMap):
    """The sequences of one epoch on one rank. `kept_from` is the position of the first one."""

    has_lanes = True

    def __init__(self, positions: Positions, kept_from: int, lanes: Lanes) -> None:
        super().__init__(positions, kept_from, levels=(Origins(), Origins()))
        self.lanes = lanes
        self._left_out: dict[int, list[tuple[int, PackedError]]] = {}  # by the sequence that would have had them

    def in_batches(self, start: int, stop: int) -> Sequence[int]:
        assert self._kept_from is not None
        return range(self._kept_from + start, self._kept_from + stop)

    def arrived(self, level: int, units: Sequence[int]) -> None:
        if level:  # documents are tracked by the lanes
            self._known += len(units)

    def leave_out(self, number: int, errors: list[tuple[int, PackedError]]) -> None:
        """Record (position, error) of failed documents missing in the sequence `number`."""
        self._left_out[number] = errors

    def left_out(self, start: int, stop: int) -> Sequence[tuple[int, PackedError]]:
        return [one for number in range(start, stop) for one in self._left_out.pop(number, ())]

    def after(self, boundaries: BatchBoundaries, skipped: tuple[int, int]) -> ProgressDelta:
        used, self._used = self._used, 0
        lanes = self.lanes.after(boundaries.start(self._first_not))
        return ProgressDelta((), skipped=skipped, used=used, lanes=lanes)

    def _use(self, start: int, stop: int) -> None:
        """Nothing to do: lanes track this."""

    def _forget(self, oldest: int) -> None:
        """Nothing to do: lanes track this."""
