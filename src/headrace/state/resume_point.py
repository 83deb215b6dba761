"""Where an epoch resumes after a batch: source samples, and what stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.types import Ranges

if TYPE_CHECKING:
    from headrace.order.row_states import RowProgress


class StagePoint(NamedTuple):
    """Where a stage resumes. Its units are source samples or groups, which may give several outputs or none.

    Attributes:
        skip: Outputs of the first repeated unit that are not emitted again.
        used: Ranges of inputs, counted from the first repeated one, whose groups are not made again.
        emitted: Outputs of the epoch before the repeated ones. Counted only if a later stage needs this number.
    """

    skip: int = 0
    used: Ranges = ()
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an epoch resumes, on this rank. Numbers count from the start of the epoch's plan.

    Attributes:
        covers: Ranges of consumed source samples.
        used: Samples that batches were cut from, failed ones included.
        mark: Resume mark of a source whose samples have no numbers.
        skipped: Failed samples that were skipped in the epoch: (in total, directly before this point).
        stages: Resume points of the stages. Empty if all are at the start of a unit.
        rows: Progress of packed rows. None: at the start.
        repeated: Samples that belong to a second or later pass over the data, if counted.
        batches, samples: Numbers received in the epoch, counted by the trainer.
        is_over: True if the trainer has received the end of the epoch.
    """

    covers: Ranges = ()
    used: int = 0
    mark: Any = None
    skipped: tuple[int, int] = (0, 0)
    stages: tuple[StagePoint, ...] = ()
    rows: RowProgress | None = None
    repeated: int = 0
    batches: int = 0
    samples: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class EvenPoints:
    """The points after each of `count` consecutive batches of `size` samples, without skipped ones.

    Attributes:
        before: The point before the first batch. All batches before it are covered.
        marks: Resume mark after each batch. Empty if there are none.
    """

    before: ResumePoint
    count: int
    size: int
    marks: Sequence[object] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, batch: int) -> ResumePoint:
        if not 0 <= batch < self.count:
            raise IndexError(batch)
        size, (_, end) = (batch + 1) * self.size, (self.before.covers or ((0, 0),))[-1]
        mark = self.marks[batch] if self.marks else None
        return replace(self.before, covers=((0, end + size),), used=self.before.used + size, mark=mark)


ResumePoints = Sequence[ResumePoint] | EvenPoints
