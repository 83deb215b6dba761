"""Messages from the engine to the trainer: finished batches, errors and progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.types import Ranges
from headrace.workers.failures import PackedError

if TYPE_CHECKING:
    from headrace.order.row_states import RowProgress


@dataclass(slots=True)
class Delivery:
    """A finished batch, or the error that replaces it: a message of a few hundred bytes.

    Attributes:
        kind: "slots" (leaves in a slab), "packed" (a pickle and its buffers in a slab) or "error".
        segment: Number of the slab.
        lengths: For "packed": bytes of the pickle and of each buffer.
        columns: For "slots": the values that are not in the slab.
        capacity: For "slots": number of slots in the slab.
        holes: For "slots": the empty ones among the first `count + len(holes)` slots.
        blob: For "slots": the packed spec of a sample.
        after: Change of the state once the batch has been received. None if no state is kept.
        late: Change of the state before the batch, by batches that an error ended before all their samples were known.
    """

    batch: int
    count: int
    position: int
    kind: Literal["slots", "packed", "error"]
    segment: int = 0
    lengths: tuple[int, ...] = ()
    columns: tuple[list[object], ...] = ()
    capacity: int = 0
    holes: tuple[int, ...] = ()
    blob: bytes = b""
    error: PackedError | None = None
    note: str = ""
    after: ProgressDelta | None = None
    late: ProgressDelta | None = None


@dataclass(frozen=True, slots=True)
class RaisedError:
    error: PackedError
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChunkDelivery:
    """Finished batches in one slab.

    Attributes:
        outcomes: For each batch the bytes of its pickle and buffers, or the error that replaces the batch. With
            `slots`: the (first, last + 1) slots of the batch.
        counts: Samples of each batch.
        after: Change of the state after each batch.
        late: Change of the state before the first batch.
        slots: Describes the slots of all batches. None: the batches are pickles.
    """

    segment: int
    outcomes: Sequence[tuple[int, ...] | RaisedError]
    counts: Sequence[int]
    after: Afters
    late: ProgressDelta | None = None
    slots: Delivery | None = None


@dataclass(frozen=True, slots=True)
class ProgressDelta:
    """The change of a state when a batch is received.

    Attributes:
        covers: Ranges of source samples consumed by the batch, and by skipped batches before it.
        mark: Resume point of a source whose samples have no numbers.
        skipped: Number of failed samples skipped: (in total, directly before this point).
        used: Number of samples these batches were cut from, failed ones included.
        parts: Number of samples already emitted of the first source sample that is not consumed, and of each group made
            from them. Empty if none is partly emitted.
        passed: For each group level: those of its first input samples whose groups are not made again. Empty if there
            are no such samples.
        given: For each level but the last: samples emitted before those that are repeated on resume. Empty if none of
            these levels has a limit.
        rows: Progress of packed rows.
        repeated: Number of the samples that belong to a second or later pass over the rank's data, if counted.
    """

    covers: tuple[tuple[int, int], ...]
    mark: object = None
    skipped: tuple[int, int] = (0, 0)
    used: int = 0
    parts: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    rows: RowProgress | None = None
    repeated: int = 0


class Afters(Protocol):
    """The changes of a state after each of consecutive batches."""

    def __len__(self) -> int: ...

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        """Return the changes made by receiving the batches [start, stop)."""
        ...


class AfterThese(tuple[ProgressDelta, ...]):
    __slots__ = ()

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        return self[start:stop]


@dataclass(frozen=True, slots=True)
class AfterEach:
    """Changes of `count` consecutive batches of `size` samples, none skipped.

    Attributes:
        first: Position of the first sample.
        marks: Resume mark after each batch. Empty if there are none.
    """

    first: int
    count: int
    size: int
    skipped: tuple[int, int]
    marks: Sequence[object] = ()

    def __len__(self) -> int:
        return self.count

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        if start == stop:
            return ()
        mark = self.marks[stop - 1] if self.marks else None
        begin, end = self.first + start * self.size, self.first + stop * self.size
        return (ProgressDelta(((begin, end),), mark, self.skipped, end - begin),)
