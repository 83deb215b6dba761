"""The number and start of the next epoch."""

from __future__ import annotations

import numpy as np

from headrace.deliver.progress import Progress
from headrace.engine.epoch_plan import EpochPlan
from headrace.plan import Cursor
from headrace.state import State


class EpochCursor:
    """The number and start of the next epoch. Must not hold the loader, as iterators advance it."""

    def __init__(self, begin: State | None = None) -> None:
        self.number = 0 if begin is None else begin.epoch
        self.carried = Cursor.at()  # start of the epoch
        self.mark: object = None
        self.is_announced = False  # set while an iterator is in use: that iterator no longer advances the number
        self.is_told = False  # set by set_epoch: a loop that stops early does not advance the number
        self._progress: Progress | None = None
        self._begun_at = 0  # batches received before the last iterator started
        if begin is not None and begin.carried:
            self.carried = Cursor(0, np.array(begin.carried, np.int64))

    def begin(self, progress: Progress) -> None:
        """Register a new iterator, whose end is the end of the epoch. Replaces an earlier one."""
        self._progress, self.is_announced = progress, False
        self._begun_at = progress.received.batches

    def advance(self, finished: EpochPlan, progress: Progress) -> None:
        """Advance at the end of an iterator."""
        if progress is self._progress and not self.is_announced:
            self.number, self.carried = finished.number + 1, finished.carried()
            self.mark = finished.next_mark(progress.received.mark)
            self._progress = None

    def leave(self) -> None:
        """Advance if the last iterator was abandoned after some batches, as torch draws a new order."""
        progress = self._progress
        if progress is None or self.is_told or progress.received.batches <= self._begun_at:
            return
        self.number, self.carried, self._progress = self.number + 1, Cursor.at(), None
