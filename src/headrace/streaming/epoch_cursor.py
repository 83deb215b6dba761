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
        self._progress: Progress | None = None
        if begin is not None and begin.carried:
            self.carried = Cursor(0, np.array(begin.carried, np.int64))

    def begin(self, progress: Progress) -> None:
        """An iterator has begun, whose end is that of the epoch; not that of one that was begun before."""
        self._progress, self.is_announced = progress, False

    def advance(self, finished: EpochPlan, progress: Progress) -> None:
        """An iterator is at its end."""
        if progress is self._progress and not self.is_announced:
            self.number, self.carried = finished.number + 1, finished.carried()
            self.mark = finished.next_mark(progress.received.mark)
