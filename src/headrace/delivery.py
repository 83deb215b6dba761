"""What the engine tells the trainer's side of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
    after: Afters
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
        repeated: how many of the samples are of a second or later pass over the rank's data, where that is counted.
    """

    covers: tuple[tuple[int, int], ...]
    mark: object = None
    skipped: tuple[int, int] = (0, 0)
    used: int = 0
    parts: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    lanes: LaneProgress | None = None
    repeated: int = 0


class Afters(Protocol):
    """What a state says after each of some batches that follow one another."""

    def __len__(self) -> int: ...

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        """What it says once those in [start, stop) of them have been received, besides what it said before."""
        ...


class AfterThese(tuple[ProgressDelta, ...]):
    """It is said of each."""

    __slots__ = ()

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        return self[start:stop]


@dataclass(frozen=True, slots=True)
class AfterEach:
    """Each is one sample, and none is left out: to say it of some of them at once takes no longer than of one.

    Attributes:
        first: the number of the first.
        count: how many.
        skipped: see `ProgressDelta`.
        marks: the mark behind each; empty: they have none.
    """

    first: int
    count: int
    skipped: tuple[int, int]
    marks: Sequence[object] = ()

    def __len__(self) -> int:
        return self.count

    def said(self, start: int, stop: int) -> Sequence[ProgressDelta]:
        if start == stop:
            return ()
        mark = self.marks[stop - 1] if self.marks else None
        return (ProgressDelta(((self.first + start, self.first + stop),), mark, self.skipped, stop - start),)
