"""Chunks of samples: parts. Their memory is leased in the engine, and has an address in the tasks of workers.

The engine knows where the bytes of a part are, not what they contain. In a worker a part decodes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._util.pickled import as_call
from headrace._util.sample_ranges import LeasedBodies, Rows, member_pieces, spans_of
from headrace._util.shared_memory import LARGE_BYTES, Arena, Claim, Lease, Segment
from headrace.torch_compat import serialize
from headrace.types import Ints
from headrace.workers.failures import Failure, Made, failures_among

if TYPE_CHECKING:
    from headrace.workers.task_inputs import Inputs

Place = tuple[int, int, int] | bytes | int
"""Location of bytes: (segment number, offset, size) in shared memory. Without shared memory: the bytes themselves, or
the size of a result to be written."""

_RUN_BYTES = 16 * 2**20  # copied out of fetched ranges at once


def size_of(place: Place) -> int:
    if isinstance(place, tuple):
        return place[2]
    return place if isinstance(place, int) else len(place)


Undecoded = tuple[Rows, LeasedBodies, Sequence[str]]
"""A row table, its bytes, and the URL of each sample's shard."""


class Part:
    """Consecutive samples of an epoch.

    Attributes:
        are_objects: True for objects of the trainer's process, whose operators must not run twice.
    """

    __slots__ = ()

    are_objects = False

    @property
    def count(self) -> int:
        raise NotImplementedError

    @property
    def failed(self) -> Sequence[int]:
        """Ascending indices of failed samples. Of several, at least the first."""
        return ()

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the shared blocks that must be decoded for these samples."""
        return ()

    @property
    def has_large(self) -> bool:
        """True if a sample, or a block of samples, is large."""
        return False

    @property
    def shares_blocks(self) -> bool:
        """True for rows of blocks, whose bytes other samples share."""
        return False

    def cut(self, start: int, stop: int) -> Part:
        """Return the samples [start, stop), with separate leases."""
        raise NotImplementedError

    def release(self) -> None: ...

    def sent(self) -> tuple[Part, list[Segment]]:
        """Return the samples for a task, and the segments that the worker must map."""
        raise NotImplementedError

    def carried(self) -> Part:
        """Return the samples with their bytes, for a worker without shared memory."""
        raise NotImplementedError

    def origin(self, index: int) -> tuple[object, str | None]:
        """Return the key and URL of a sample, if known before decoding."""
        return None, None

    # In a worker.

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        """Yield the samples, some at a time."""
        raise NotImplementedError

    def undecoded(self, memory: Inputs) -> Undecoded | None:
        """Return the undecoded samples, or None if they are decoded."""
        return None

    def offset_of(self, index: int) -> int | None:
        """Return the byte offset of a sample in its shard. None if it is in no shard."""
        return None

    def remember(self, made: Sequence[object]) -> None:
        """Store the results of the first samples, if they are objects."""


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of runs of at most `_RUN_BYTES`. A larger sample is a run of its own."""
    ends, start = np.cumsum(rows.sizes()), 0
    while start < len(rows):
        most = _RUN_BYTES + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield start, stop
        start = stop


def offset_in(parts: Sequence[Part], index: int) -> int | None:
    """Return the byte offset of sample `index` of all parts in its shard. None if it is in no shard."""
    for part in parts:
        if index < part.count:
            return part.offset_of(index)
        index -= part.count
    return None


def address_of(lease: Lease) -> tuple[int, int, int]:
    return lease.segment.number, lease.offset, lease.size


def sorted_spans(spans: dict[int, Lease]) -> list[tuple[int, Lease]]:
    return sorted(spans.items(), key=lambda span: span[0])


@as_call
@dataclass(slots=True)
class RawPart(Part):
    """Undecoded samples in fetched ranges.

    Attributes:
        rows: Table of the samples. Offsets count in the epoch's address space, in which each shard has its own range.
        shards: For each sample the index of its shard in `urls`.
        bases: For each of `urls` the first address of the shard.
        spans: (first address, lease) of the ranges that contain the samples, ascending. Empty in a task.
        places: In a task: (first address, location) of the same ranges.
        moved: Amount added to each offset, if members were moved after the fetch.
    """

    rows: Rows
    shards: Ints
    urls: tuple[str, ...]
    spans: list[tuple[int, Lease]]
    bases: tuple[int, ...]
    places: Sequence[tuple[int, Place]] = ()
    moved: Ints | None = None
    count: int = field(init=False)  # read some twenty times a batch

    def __post_init__(self) -> None:
        self.count = len(self.rows)

    @property
    def blocks(self) -> Sequence[int]:
        return () if self.rows.reads is None else [number for number in self.rows.reads.tolist() if number]

    def cut(self, start: int, stop: int) -> RawPart:
        if (start, stop) == (0, self.count):
            spans = [(a, lease.retain()) for a, lease in self.spans]
            return RawPart(self.rows, self.shards, self.urls, spans, self.bases)
        return self._with(self.rows.cut(start, stop), self.shards[start:stop])

    def take(self, chosen: Ints) -> RawPart:
        return self._with(self.rows.take(chosen), self.shards[chosen])

    def _with(self, rows: Rows, shards: Ints) -> RawPart:
        if len(self.spans) <= 1 or not len(rows.offset):
            used = self.spans[:1]
        else:
            used = [self.spans[k] for k in spans_of(rows, [address for address, _ in self.spans])]
        return RawPart(rows, shards, self.urls, [(a, lease.retain()) for a, lease in used], self.bases)

    @staticmethod
    def concat(parts: Sequence[RawPart]) -> RawPart:
        """Return all samples of `parts`, whose leases move to the result."""
        if len(parts) == 1:
            return parts[0]
        places = dict.fromkeys(place for p in parts for place in zip(p.urls, p.bases, strict=True))
        number = {place: k for k, place in enumerate(places)}
        shards = [
            np.array([number[place] for place in zip(p.urls, p.bases, strict=True)], np.int64)[p.shards] for p in parts
        ]
        urls, bases = tuple(url for url, _ in places), tuple(base for _, base in places)
        spans = {}
        for address, lease in (span for p in parts for span in p.spans):
            if address in spans:
                lease.release()
            else:
                spans[address] = lease
        return RawPart(Rows.concat([p.rows for p in parts]), np.concatenate(shards), urls, sorted_spans(spans), bases)

    def release(self) -> None:
        for _, lease in self.spans:
            lease.release()

    def sent(self) -> tuple[RawPart, list[Segment]]:
        places = [(address, address_of(lease)) for address, lease in self.spans]
        part = RawPart(self.rows, self.shards, self.urls, [], self.bases, places)
        return part, [lease.segment for _, lease in self.spans]

    def carried(self) -> RawPart:
        """Return the samples with only their own bytes. The ranges contain other tasks' samples too."""
        first = [address for address, _ in self.spans]
        views = [lease.view for _, lease in self.spans]
        ends = [address + len(view) for address, view in zip(first, views, strict=True)]
        pieces = [
            views[k][a:b]
            for offset, size in zip(self.rows.offset.tolist(), self.rows.size.tolist(), strict=True)
            for k, a, b in member_pieces(first, ends, offset, size)
        ]
        rows = replace(self.rows, offset=np.cumsum(self.rows.size) - self.rows.size)
        moved = rows.offset - self.rows.offset
        return RawPart(rows, self.shards, self.urls, [], self.bases, [(0, b"".join(pieces))], moved)

    def origin(self, index: int) -> tuple[object, str | None]:
        key = bytes(self.rows.keys[index]).decode("utf-8", "surrogateescape")
        return key, self.urls[int(self.shards[index])]

    @property
    def has_large(self) -> bool:
        sizes = self.rows.size
        return int(sizes.sum()) > LARGE_BYTES and int(sizes.max()) > LARGE_BYTES

    @property
    def shares_blocks(self) -> bool:
        return self.rows.block is not None

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        """Yield a few samples at a time: decoding copies their bytes out of the ranges."""
        bodies = memory.bodies(self.places)
        if int(self.rows.size.sum()) <= _RUN_BYTES:
            yield memory.opened(self.rows, self.shards, self.urls, bodies)
            return
        for start, stop in _runs(self.rows):
            yield memory.opened(self.rows.cut(start, stop), self.shards[start:stop], self.urls, bodies)

    def undecoded(self, memory: Inputs) -> Undecoded | None:
        return self.rows, memory.bodies(self.places), [self.urls[shard] for shard in self.shards.tolist()]

    def offset_of(self, index: int) -> int | None:
        block = index if self.rows.block is None else int(self.rows.block[index])
        first, stop = int(self.rows.starts[block]), int(self.rows.starts[block + 1])
        if first == stop:
            return None
        moved = 0 if self.moved is None else int(self.moved[first])
        return int(self.rows.offset[first]) - moved - self.bases[int(self.shards[index])]


@dataclass(slots=True)
class _Stored(Part):
    """Samples made by workers, in one lease, or at one place in a task."""

    memory: Lease | Place

    @property
    def lease(self) -> Lease:
        return self.memory  # type: ignore[return-value]  # in the engine

    @property
    def place(self) -> Place:
        return self.memory  # type: ignore[return-value]  # in a task

    def release(self) -> None:
        self.lease.release()

    def sent(self) -> tuple[Part, list[Segment]]:
        return replace(self, memory=address_of(self.lease)), [self.lease.segment]

    def carried(self) -> Part:
        return replace(self, memory=bytes(self.lease.view))


@as_call
@dataclass(slots=True)
class PackedPart(_Stored):
    """The samples `[start, stop)` of a list that was pickled as a whole.

    Attributes:
        lengths: Bytes of the pickle and of each buffer after it.
        failures: Ascending indices of failures in the list.
    """

    lengths: tuple[int, ...]
    start: int
    stop: int
    failures: Sequence[int] = ()

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)

    @property
    def failed(self) -> Sequence[int]:
        return [k - self.start for k in self.failures if self.start <= k < self.stop]

    def cut(self, start: int, stop: int) -> PackedPart:
        lease = self.lease.retain()
        return PackedPart(lease, self.lengths, self.start + start, self.start + stop, self.failures)

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        yield memory.packed(self.place, self.lengths)[self.start : self.stop]


@as_call
@dataclass(slots=True)
class ApartPart(_Stored):
    """Samples pickled one by one. Any of them can be read alone.

    Attributes:
        pieces: For each sample (offset in the memory, size) of its pickle and of each buffer, in one flat tuple.
    """

    pieces: Sequence[tuple[int, ...]]
    failed: Sequence[int] = ()

    @property
    def count(self) -> int:
        return len(self.pieces)

    @property
    def nbytes(self) -> int:
        return sum(map(sum, (pieces[1::2] for pieces in self.pieces)))

    def cut(self, start: int, stop: int) -> ApartPart:
        return self.take(range(start, stop))

    def take(self, chosen: Sequence[int]) -> ApartPart:
        known = set(self.failed)
        failed = [k for k, index in enumerate(chosen) if index in known] if known else ()
        return ApartPart(self.lease.retain(), [self.pieces[index] for index in chosen], failed)

    def carried(self) -> ApartPart:
        """Return the samples with only their own bytes: other samples are stored between them."""
        blob, moved = bytearray(), []
        for pieces in self.pieces:
            places: list[int] = []
            for at, size in zip(pieces[::2], pieces[1::2], strict=True):
                places += (len(blob), size)
                blob += self.lease.view[at : at + size]
            moved.append(tuple(places))
        return ApartPart(bytes(blob), moved)

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        yield memory.apart(self.place, self.pieces)


@as_call
@dataclass(slots=True)
class TablePart(_Stored):
    """Samples `chosen` of a table in columns. Any can be read alone; none fails."""

    lengths: tuple[int, ...]
    chosen: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.chosen)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)

    def cut(self, start: int, stop: int) -> TablePart:
        return TablePart(self.lease.retain(), self.lengths, self.chosen[start:stop])

    def take(self, chosen: Sequence[int]) -> TablePart:
        return TablePart(self.lease.retain(), self.lengths, [self.chosen[index] for index in chosen])

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        yield list(memory.in_table(self.place, self.lengths, self.chosen))


@as_call
@dataclass(slots=True)
class ListPart(Part):
    """Samples that are Python objects of this process, which only its threads can receive; or keys of plain types.

    Attributes:
        nbytes: Estimated size of the samples, if known.
    """

    samples: list[Any]
    start: int = 0
    stop: int | None = None
    claim: Claim | None = None
    nbytes: int = 0

    are_objects = True

    @property
    def count(self) -> int:
        return (len(self.samples) if self.stop is None else self.stop) - self.start

    @property
    def failed(self) -> Sequence[int]:
        kinds = list(map(type, self.samples[self.start : self.stop]))
        return (kinds.index(Failure),) if Failure in kinds else ()

    def cut(self, start: int, stop: int) -> ListPart:
        claim = None if self.claim is None else self.claim.retain()
        return ListPart(self.samples, self.start + start, self.start + stop, claim)

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def sent(self) -> tuple[ListPart, list[Segment]]:
        return ListPart(self.samples, self.start, self.start + self.count), []

    def carried(self) -> ListPart:
        """Return the samples alone. Outside thread workers they are failures only."""
        return ListPart(self.samples[self.start : self.start + self.count])

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        yield self.samples[self.start : self.stop]

    def remember(self, made: Sequence[object]) -> None:
        self.samples[self.start : self.start + len(made)] = [m if isinstance(m, Failure) else Made(m) for m in made]


@dataclass(slots=True)
class KeyPart(Part):
    """Keys of samples that workers get themselves. Sent with the task, without shared memory.

    Attributes:
        pack: Pickles a list of keys. None for keys of plain types.
    """

    keys: list[object]
    pack: Callable[[list[Any]], bytes] | None
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> KeyPart:
        return KeyPart(self.keys, self.pack, self.start + start, self.start + stop)

    def sent(self) -> tuple[Part, list[Segment]]:
        return self.carried(), []

    def carried(self) -> Part:
        keys = self.keys[self.start : self.stop]
        return ListPart(keys) if self.pack is None else PickledKeys(self.pack(keys), len(keys))

    def origin(self, index: int) -> tuple[object, str | None]:
        return self.keys[self.start + index], None


@dataclass(slots=True)
class PickledKeys(Part):
    """Keys in a task that are not of plain types."""

    blob: bytes
    count: int = field()

    def open(self, memory: Inputs) -> Iterator[list[object]]:
        yield memory.unpack(self.blob)


_PLAIN = {int, str}
"""Types of keys that always pickle."""


class PartPacker:
    """Makes parts from objects. Objects that cannot be sent to workers become Failures."""

    def __init__(self, arena: Arena, *, shares_objects: bool) -> None:
        self._arena, self._shares_objects = arena, shares_objects

    def of_samples(self, samples: list[object]) -> Part:
        if self._shares_objects:
            return ListPart(samples)
        try:
            parts = serialize.pack(samples)
        except Exception:
            samples = [_sendable(sample) for sample in samples]
            parts = serialize.pack(samples)
        lease = self._arena.lease(serialize.packed_size(parts))
        failures = [k for k, _ in failures_among(samples)]
        return PackedPart(lease, serialize.write(parts, lease.view), 0, len(samples), failures)

    def of_keys(self, keys: list[object]) -> Part:
        """Make a part of samples that workers read by key."""
        if self._shares_objects:
            return ListPart(keys)
        if set(map(type, keys)) <= _PLAIN:
            return KeyPart(keys, None, 0, len(keys))
        try:
            serialize.pack(keys)
        except Exception:
            keys = [_sendable_key(key) for key in keys]
        return KeyPart(keys, serialize.pack_bytes, 0, len(keys))


def _sendable_key(key: object) -> object:
    from headrace.torch_compat.serialize import cannot_carry_index

    try:
        serialize.pack(key)
    except Exception as error:
        refusal = cannot_carry_index(error, key)
        refusal.__cause__ = error
        return Failure(serialize.pack_error(refusal))
    return key


def _sendable(sample: object) -> object:
    try:
        serialize.pack(sample)
    except Exception as error:
        error.add_note(f"stage: fetch; a sample of type {type(sample).__name__} cannot be sent to a worker")
        return Failure(serialize.pack_error(error))
    return sample
