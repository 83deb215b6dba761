"""Which epoch is next, and where it begins."""

from __future__ import annotations

import numpy as np

from headrace.deliver.progress import Progress
from headrace.engine.epoch_plan import EpochPlan
from headrace.plan import Cursor
from headrace.state import State


class EpochCursor:
    """Which epoch is next, and with what it begins. Iterators advance it: nothing of the loader hangs on it."""

    def __init__(self, begin: State | None = None) -> None:
        self.number = 0 if begin is None else begin.epoch
        self.carried = Cursor.at()  # where it begins
        self.mark: object = None
        self.is_announced = False  # while an iterator is in use, which one it shall be: it advances no more
        self.is_told = False  # by set_epoch: a loop that stops early does not advance it
        self._progress: Progress | None = None
        self._begun_at = 0  # batches that the last iterator began behind
        if begin is not None and begin.carried:
            self.carried = Cursor(0, np.array(begin.carried, np.int64))

    def begin(self, progress: Progress) -> None:
        """An iterator has begun, whose end is that of the epoch; not that of one that was begun before."""
        self._progress, self.is_announced = progress, False
        self._begun_at = progress.received.batches

    def advance(self, finished: EpochPlan, progress: Progress) -> None:
        """An iterator is at its end."""
        if progress is self._progress and not self.is_announced:
            self.number, self.carried = finished.number + 1, finished.carried()
            self.mark = finished.next_mark(progress.received.mark)
            self._progress = None

    def leave(self) -> None:
        """Advance if the last iterator has given batches and was not read to its end, as torch draws a new order."""
        progress = self._progress
        if progress is None or self.is_told or progress.received.batches <= self._begun_at:
            return
        self.number, self.carried, self._progress = self.number + 1, Cursor.at(), None
