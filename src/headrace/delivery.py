"""What the engine tells the trainer's side of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.failures import PackedError
from headrace.lanes import LaneProgress
from headrace.types import Ranges


@dataclass(slots=True)
class Delivery:
    """A finished batch, or the error in its place, as told to the trainer's side: a few hundred bytes.

    Attributes:
        batch: its number in the epoch.
        count: how many samples it has.
        position: the position of its first sample.
        kind: "slots" (leaves in a slab), "packed" (a pickle and its buffers in a slab), "error".
        segment: the number of the slab.
        lengths: of "packed".
        columns: of "slots": the values that are not in the slab.
        capacity: of "slots": how many slots the slab has.
        holes: of "slots": which of the first slots, as many as the batch was to have, hold no sample.
        blob: of "slots": the packed form of a sample.
        error: of "error".
        note: of "error": what is said on the exception besides.
        after: what a state says once it has been received; None where nobody asks.
        late: what a state says already before: of batches that errors ended before all of their samples were known.
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
    """An error in the place of a batch.

    Attributes:
        error: the exception.
        note: what is said on it besides.
    """

    error: PackedError
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChunkDelivery:
    """Finished samples that are given on one by one, each of which is a batch of its own.

    Attributes:
        segment: the number of the slab.
        outcomes: for each the bytes of its pickle and of its buffers, or the error in its place.
        after: for each what a state says once it has been received.
        late: what a state says already before the first.
    """

    segment: int
    outcomes: Sequence[tuple[int, ...] | RaisedError]
    after: Sequence[ProgressDelta]
    late: ProgressDelta | None = None


@dataclass(frozen=True, slots=True)
class ProgressDelta:
    """What a state says besides, once a batch has been received.

    Attributes:
        covers: ranges of the source's samples that are used up by it, and by those before it that were left out.
        mark: where a source can be begun again whose samples have no numbers.
        skipped: how many failed samples have been left out: (in all, right before this point).
        used: how many samples these batches were cut from, failed ones too.
        parts: of those that the source's first sample gives that is not used up, and each group put together of them,
            how many are known already; empty where nothing is begun.
        passed: for each level of groups, of the samples that it is given first those that are of groups which are not
            made again; empty where there are none.
        given: of each level but the last, how many samples it gave before those that come again; empty where none of
            these levels has a limit.
        lanes: how far lanes are, where documents are packed in these.
    """

    covers: tuple[tuple[int, int], ...]
    mark: object = None
    skipped: tuple[int, int] = (0, 0)
    used: int = 0
    parts: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    lanes: LaneProgress | None = None


class AfterEach(Sequence[ProgressDelta]):
    """What a state says after each of some samples that follow one another, where none is left out.

    Args:
        start: the position of the first.
        count: how many.
        skipped: see `ProgressDelta`.
    """

    __slots__ = ("_skipped", "_start", "_stop")

    def __init__(self, start: int, count: int, skipped: tuple[int, int]) -> None:
        self._start, self._stop, self._skipped = start, start + count, skipped

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: Any) -> Any:
        at = range(self._start, self._stop)[index]
        return ProgressDelta(((at, at + 1),), None, self._skipped, 1)
