"""What moves between the stages: parts of samples, the steps done to them, and the tasks that workers are given.

Positions count the samples of an epoch in the order of its plan, from 0. Everything here is plain: a part knows where
its bytes are leased, and not what is in them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

import numpy as np

from headrace.memory import Claim, Lease, Segment
from headrace.types import Ints, Rows


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a chain, run for each sample (or, after collation, for each batch).

    Attributes:
        name: what errors and reports call it, such as "map(augment)".
        kind: "map" gives the next sample, "filter" says whether to keep it.
        fn: the function; a coroutine function runs on the event loop, any other in a worker.
        random: whether the random number generators are set for each sample before it runs.
    """

    name: str
    kind: Literal["map", "filter"]
    fn: Callable[[Any], Any]
    random: bool = False

    @property
    def keeps_count(self) -> bool:
        """Whether one sample comes out for each that goes in."""
        return self.kind == "map"

    @property
    def keeps_position(self) -> bool:
        """Whether it can be told from what has come out how much has gone in, so that a state is exact."""
        return True


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands in the place of a sample that could not be made; `blob` is the packed exception."""

    blob: bytes


_NOBODYS = b"nobody's "  # before the bytes of an exception


def nobodys(blob: bytes) -> bytes:
    """A packed exception that is no single sample's, such as a source's end before its time: it is never skipped."""
    return blob if blob.startswith(_NOBODYS) else _NOBODYS + blob


def owned(blob: bytes) -> tuple[bytes, bool]:
    """(the packed exception itself, whether it is a single sample's)."""
    bare = blob.removeprefix(_NOBODYS)
    return bare, len(bare) == len(blob)


@dataclass(frozen=True, slots=True)
class Made:
    """Stands in the place of a sample that went through its chain already, and may have been changed in place by it."""

    value: Any


# How a part tells a worker where its samples are: leases by segment number, offset and size.
Description = tuple[Any, ...]


class Part(Protocol):
    """Some consecutive samples on their way, and the leases of the memory that they lie in."""

    @property
    def count(self) -> int: ...

    def cut(self, start: int, stop: int) -> Part:
        """The samples [start, stop) of this part, with leases of their own."""
        ...

    def release(self) -> None:
        """End this part's leases."""
        ...

    def describe(self) -> tuple[Description, list[Segment]]:
        """What a worker needs to find the samples, and the segments it must have mapped."""
        ...


@dataclass(slots=True)
class RawPart:
    """Samples that lie undecoded in fetched ranges.

    Attributes:
        rows: the samples; offsets count in the epoch's own address space, in which each shard has its own place.
        shards: for each sample the number of its shard in `urls`.
        bases: for each of `urls` where the shard begins in that address space.
        spans: (first address, lease) of the ranges that hold them, by address.
    """

    rows: Rows
    shards: Ints
    urls: tuple[str, ...]
    spans: list[tuple[int, Lease]]

    @property
    def count(self) -> int:
        return len(self.rows)

    def cut(self, start: int, stop: int) -> RawPart:
        if (start, stop) == (0, self.count):
            spans = [(a, lease.retain()) for a, lease in self.spans]
            return RawPart(self.rows, self.shards, self.urls, spans)
        return self._with(self.rows.cut(start, stop), self.shards[start:stop])

    def take(self, chosen: Ints) -> RawPart:
        """The samples with the indices `chosen`, in that order, with leases of their own."""
        return self._with(self.rows.take(chosen), self.shards[chosen])

    def _with(self, rows: Rows, shards: Ints) -> RawPart:
        """Some of the samples, and the leases of the ranges that hold them."""
        first = [address for address, _ in self.spans]
        if len(first) <= 1 or not len(rows.offset):
            used = self.spans[:1]
        else:
            low = np.searchsorted(first, rows.offset, side="right") - 1
            high = np.searchsorted(first, rows.offset + np.maximum(rows.size, 1) - 1, side="right") - 1
            touched = np.unique(np.concatenate([low, high, *_between(low, high)]))
            used = [self.spans[k] for k in touched if k >= 0]  # a member without bytes may lie before the first
        return RawPart(rows, shards, self.urls, [(a, lease.retain()) for a, lease in used])

    @staticmethod
    def concat(parts: Sequence[RawPart]) -> RawPart:
        """All samples of `parts`, which give up their leases to it."""
        if len(parts) == 1:
            return parts[0]
        urls = tuple(dict.fromkeys(url for p in parts for url in p.urls))
        number = {url: k for k, url in enumerate(urls)}
        shards = [np.array([number[u] for u in p.urls], np.int64)[p.shards] for p in parts]
        spans = {}
        for address, lease in (span for p in parts for span in p.spans):
            if address in spans:
                lease.release()
            else:
                spans[address] = lease
        return RawPart(Rows.concat([p.rows for p in parts]), np.concatenate(shards), urls, sorted_spans(spans))

    def release(self) -> None:
        for _, lease in self.spans:
            lease.release()

    def describe(self) -> tuple[Description, list[Segment]]:
        places = [(address, lease.segment.number, lease.offset, lease.size) for address, lease in self.spans]
        return ("raw", self.rows, self.shards, self.urls, places), [lease.segment for _, lease in self.spans]


def sorted_spans(spans: dict[int, Lease]) -> list[tuple[int, Lease]]:
    """Spans by their first address."""
    return sorted(spans.items(), key=lambda span: span[0])


def _between(low: Ints, high: Ints) -> list[Ints]:
    """The spans between those in which a member begins and ends, for members that reach over more than two."""
    return [np.arange(low[k] + 1, high[k]) for k in np.flatnonzero(high - low > 1).tolist()]


def member_pieces(starts: Sequence[int], ends: Sequence[int], offset: int, size: int) -> list[tuple[int, int, int]]:
    """Which spans hold [offset, offset + size): (span, first byte in it, one past the last)."""
    pieces = []
    k = bisect.bisect_right(starts, offset) - 1
    stop = offset + size
    while offset < stop:
        end = min(stop, ends[k])
        pieces.append((k, offset - starts[k], end - starts[k]))
        offset = end
        k += 1
    return pieces


@dataclass(slots=True)
class PackedPart:
    """Samples that lie pickled, with their buffers beside them, in one lease; `[start, stop)` of the list are meant."""

    lease: Lease
    lengths: tuple[int, ...]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> PackedPart:
        return PackedPart(self.lease.retain(), self.lengths, self.start + start, self.start + stop)

    def release(self) -> None:
        self.lease.release()

    def describe(self) -> tuple[Description, list[Segment]]:
        lease = self.lease
        place = (lease.segment.number, lease.offset, lease.size)
        return ("packed", place, self.lengths, self.start, self.stop), [lease.segment]


@dataclass(slots=True)
class ListPart:
    """Samples that are Python objects of this process: no other one can be given them. `claim` is for their bytes."""

    samples: list[Any]
    start: int = 0
    stop: int | None = None
    claim: Claim | None = None

    @property
    def count(self) -> int:
        return (len(self.samples) if self.stop is None else self.stop) - self.start

    def cut(self, start: int, stop: int) -> ListPart:
        claim = None if self.claim is None else self.claim.retain()
        return ListPart(self.samples, self.start + start, self.start + stop, claim)

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def describe(self) -> tuple[Description, list[Segment]]:
        return ("list", self.samples, self.start, self.start + self.count), []


@dataclass(slots=True)
class KeyPart:
    """Keys of samples that workers get for themselves; they go with the task, and take no shared memory.

    Attributes:
        pack: a list of keys as bytes; None where they are such as any pickle carries.
    """

    keys: list[Any]
    pack: Callable[[list[Any]], bytes] | None
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> KeyPart:
        return KeyPart(self.keys, self.pack, self.start + start, self.start + stop)

    def release(self) -> None:
        pass

    def describe(self) -> tuple[Description, list[Segment]]:
        keys = self.keys[self.start : self.stop]
        return ("list", keys, 0, len(keys)) if self.pack is None else ("keys", self.pack(keys)), []


class Finish(Enum):
    """What a worker does with the samples that its chain made."""

    SLOTS = "slots"  # write each into its place in the batch's slab
    BATCH = "batch"  # collate them and write the batch into the slab
    COLLATE = "collate"  # the same, of samples that went through the chain already
    SAMPLES = "samples"  # write them, as a list, where the next stage finds them
    CHECK = "check"  # leave them; only what failed is of interest
    SCAN = "scan"  # not samples yet: find where they lie in fetched bytes


@dataclass(slots=True, eq=False)
class Task:
    """Work for one worker. It may be given to another until its reply has come: what it names stays as it is.

    Attributes:
        chain: the number of the chain of steps, as the workers were told it.
        key: from which, with the positions, the samples' random numbers are made.
        batch: the batch it helps to make; tasks of earlier batches go first.
        finish: what to do with the samples.
        parts: the samples.
        position: the position of the first one.
        positions: the position of each, where they do not follow one another.
        slot: the place of the first one in its batch.
        capacity: how many slots the slab has.
        place: where to write, if that is known already.
        scan: (the shard's scanner, the buffer's offset in the shard, whether it is the last) for Finish.SCAN, whose
            buffer is at `place`.
        failures: for samples that have ended too many workers, by their index in the task, the error in their place.
        deaths: how many workers have ended at which sample of it.
    """

    chain: int
    key: int
    batch: int
    finish: Finish
    parts: list[Part]
    position: int = 0
    positions: Sequence[int] | None = None
    slot: int = 0
    capacity: int = 0
    place: Lease | None = None
    scan: tuple[Any, int, bool] | None = None
    failures: dict[int, bytes] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


@dataclass(slots=True)
class Reply:
    """What a worker answers to a task.

    Attributes:
        kind: "written"; "held" (made, but there is no place for it, or none of the size `size`); "mismatch" (the
            samples do not have the form that the slots were made for); "failed" (one exception for the whole task).
        size: bytes needed, of "held".
        spec: the form of a sample, of "held" for Finish.SLOTS; None where slots cannot be made for it.
        lengths: of the pickle and its buffers, of "written" for BATCH and SAMPLES.
        kept: for SAMPLES which of the task's samples are in the list.
        errors: (slot, packed exception); for SAMPLES a Failure stands in the list too. For SLOTS, where the chain
            skips, the other samples are written one after the other from the task's first slot on: its last ones stay
            empty.
        columns: values that are not written into slots: for each such leaf a list.
        value: what Finish.SCAN found.
        busy_s: for each step of the chain (collation and writing last) seconds spent in it.
        made_s: seconds spent on the samples themselves, with those of the replies before it to the same task.
    """

    kind: Literal["written", "held", "mismatch", "failed"]
    size: int = 0
    spec: bytes | None = None
    lengths: tuple[int, ...] = ()
    kept: Sequence[int] = ()
    errors: list[tuple[int, bytes]] = field(default_factory=list)
    columns: list[list[Any]] = field(default_factory=list)
    value: Any = None
    busy_s: dict[str, float] = field(default_factory=dict)
    made_s: float = 0.0


class Flow(Protocol):
    """What a source is given: the right to read ahead, and somewhere to put what it has read.

    Attributes:
        key: from which, with their positions, the samples' random numbers are made.
    """

    key: int

    @property
    def is_starved(self) -> bool:
        """Whether a worker has nothing to do."""
        ...

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        """Wait until `size` more bytes may be held, and get memory for them.

        Those who wait are let in by rank, the lowest first; and the first of them even over the budget, where the
        oldest batch lacks samples and nothing is on its way to it. It ends with `scan` and a release, or with `drop`.
        """
        ...

    def drop(self, lease: Lease) -> None:
        """Give back a lease that nothing was read into."""
        ...

    def loaded(self, lease: Lease) -> None:
        """Say that the bytes of a lease have come, where nobody scans them: others may need room to go on with them."""
        ...

    def go_on(self, worker: object) -> None:
        """Say that something gets on without more memory, so that nobody is let in over the budget meanwhile."""
        ...

    def pause(self, worker: object) -> None:
        """Say that it waits, for memory or for what is being read; or that it has ended."""
        ...

    async def turn(self, size: int, position: int) -> Claim:
        """Wait until about `size` more bytes may be read for the samples from `position` on, and claim them.

        It ends with `part_of`.
        """
        ...

    async def enlarge(self, claim: Claim, size: int, position: int) -> None:
        """Wait until a claim, for the samples from `position` on, may be `size` bytes larger."""
        ...

    def trim(self, lease: Lease, size: int) -> None:
        """Keep only the first bytes of a lease."""
        ...

    def cut(self, count: int) -> None:
        """Say that the next batch has `count` samples, where batches are as long as the source says."""
        ...

    def put(self, start: int, part: Part) -> None:
        """Hand over the samples at the positions from `start` on, with their leases."""
        ...

    def come_again(self, count: int) -> None:
        """Say that so many samples have been put, and that they come again and again, without end."""
        ...

    def part_of(self, samples: list[Any], claim: Claim) -> Part:
        """Python objects, read by that claim, as a part that workers can be given."""
        ...

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> tuple[Rows, Any]:
        """Have a worker find the samples in a fetched range; gives their rows and the scanner as it stands after it."""
        ...


class Source(Protocol):
    """Gives an epoch's samples to a flow: plan and fetch behind one face."""

    async def run(self, flow: Flow) -> None:
        """Put every sample, in any order where positions are known beforehand, and return."""
        ...

    def mark(self, position: int) -> Any:
        """Where to begin again for the samples from `position` on; None where positions themselves tell that.

        Marks before it are not asked for again.
        """
        ...


@dataclass(frozen=True, slots=True)
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
        blob: the packed exception of "error", or the packed form of "slots".
        note: of "error": what is said on the exception besides.
        after: what a state says once it has been received; None where nobody asks.
    """

    batch: int
    count: int
    position: int
    kind: Literal["slots", "packed", "error"]
    segment: int = 0
    lengths: tuple[int, ...] = ()
    columns: tuple[list[Any], ...] = ()
    capacity: int = 0
    holes: tuple[int, ...] = ()
    blob: bytes = b""
    note: str = ""
    after: After | None = None


@dataclass(frozen=True, slots=True)
class After:
    """What a state says besides, once a batch has been received.

    Attributes:
        covers: ranges of the source's samples that are used up by it, and by those before it that were left out.
        mark: where a source can be begun again whose samples have no numbers.
        skipped: how many failed samples have been left out: (in all, right before this point).
        used: how many samples these batches were cut from, failed ones too.
    """

    covers: tuple[tuple[int, int], ...]
    mark: Any = None
    skipped: tuple[int, int] = (0, 0)
    used: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Chain:
    """What is done to samples in workers: `steps` to each sample, then `collate` and `after` to the batch.

    Attributes:
        collate: makes a batch of a list of samples; None where the list's only sample is the batch.
        init: called once in each worker process, with its number.
        columns: does what `steps` do, for all samples of a row table at once; None where it cannot: see
            `headrace.formats.columns`.
        skips: whether a batch is collated without its samples that have failed; False: one that has any is not.
        by_key: whether samples come as keys, and their random numbers go by those and not by positions.
        many: does what `steps` do, for all keys of a task at once.
        begin: called in each worker, process or thread, with its number, before the first task of this chain.
        pack_error: an exception as bytes, with the worker's number; None: as the engine packs its own.
    """

    steps: tuple[Step, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
    after: tuple[Step, ...] = ()
    init: Callable[[int], Any] | None = None
    columns: Callable[[Rows, Any], list[Any] | None] | None = None
    skips: bool = False
    by_key: bool = False
    many: Callable[[list[Any]], Sequence[Any]] | None = None
    begin: Callable[[int], Any] | None = None
    pack_error: Callable[[BaseException, int], bytes] | None = None
