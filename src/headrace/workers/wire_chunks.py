"""Chunks of samples in worker tasks. Each kind decodes itself from the worker's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace._util.pickled import as_call
from headrace._util.sample_ranges import Rows
from headrace._util.shared_memory import LARGE_BYTES
from headrace.types import Ints
from headrace.workers.failures import Failure, Made

Place = tuple[int, int, int] | bytes | int
"""Location of bytes: (segment number, offset, size) in shared memory. Without shared memory: the bytes themselves, or
the size of a result to be written."""

_RUN_BYTES = 16 * 2**20  # copied out of fetched ranges at once


def size_of(place: Place) -> int:
    if isinstance(place, tuple):
        return place[2]
    return place if isinstance(place, int) else len(place)


class MemberBytes(Protocol):
    def all(self, offsets: Ints, sizes: Ints) -> list[bytes]:
        """Return the bytes of each (offset, size)."""
        ...

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """Return the `length` bytes at each of `offsets`: `[len(offsets), length]`."""
        ...

    def gather_into(self, out: NDArray[np.uint8], offsets: Ints) -> None:
        """Write the result of `gather` into an array of this shape."""
        ...


Undecoded = tuple[Rows, MemberBytes, Sequence[str]]
"""A row table, its bytes, and the URL of each sample's shard."""


class Memory(Protocol):
    """A worker's access to the bytes of samples."""

    def bodies(self, places: Sequence[tuple[int, Place]]) -> MemberBytes:
        """Return the bytes of the ranges at (first address, location)."""
        ...

    def opened(self, rows: Rows, shards: Ints, urls: Sequence[str], bodies: MemberBytes) -> list[object]:
        """Decode the samples of a row table."""
        ...

    def packed(self, place: Place, lengths: Sequence[int]) -> list[object]:
        """Unpickle samples that were pickled as one list."""
        ...

    def apart(self, place: Place, pieces: Sequence[tuple[int, ...]]) -> list[object]:
        """Unpickle samples that were pickled one by one."""
        ...

    def unpack(self, blob: bytes) -> list[object]:
        """Unpickle samples from a byte string."""
        ...

    def in_table(self, place: Place, lengths: Sequence[int], chosen: Sequence[int]) -> Sequence[object]:
        """Return some of the samples of a table."""
        ...


class SentPart(Protocol):
    """Some samples in a worker's task."""

    @property
    def count(self) -> int | None:
        """Number of samples. None if unknown before decoding."""
        ...

    def offset_of(self, index: int) -> int | None:
        """Return the byte offset of a sample in its shard. None if it is in no shard."""
        ...

    @property
    def are_objects(self) -> bool:
        """True for objects of the trainer's process, whose operators must not run twice."""
        ...

    @property
    def has_large(self) -> bool:
        """True if a sample, or a block of samples, is large."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """True for rows of blocks, whose bytes other samples share."""
        ...

    def open(self, memory: Memory) -> Iterator[list[object]]:
        """Yield the samples, some at a time."""
        ...

    def undecoded(self, memory: Memory) -> Undecoded | None:
        """Return the undecoded samples, or None if they are decoded."""
        ...

    def remember(self, made: Sequence[object]) -> None:
        """Store the results of the first samples, if they are objects."""
        ...


@as_call
@dataclass(slots=True)
class SentRows:
    """Undecoded samples in fetched ranges. See `headrace.workers.sample_chunks.RawPart`.

    Attributes:
        moved: Amount added to each offset, if members were moved after the fetch.
    """

    rows: Rows
    shards: Ints
    urls: Sequence[str]
    places: Sequence[tuple[int, Place]]
    bases: Sequence[int]
    moved: Ints | None = None

    are_objects = False

    @property
    def has_large(self) -> bool:
        sizes = self.rows.size
        return int(sizes.sum()) > LARGE_BYTES and int(sizes.max()) > LARGE_BYTES

    @property
    def shares_blocks(self) -> bool:
        return self.rows.block is not None

    def open(self, memory: Memory) -> Iterator[list[object]]:
        """Yield a few samples at a time: decoding copies their bytes out of the ranges."""
        bodies = memory.bodies(self.places)
        if int(self.rows.size.sum()) <= _RUN_BYTES:
            yield memory.opened(self.rows, self.shards, self.urls, bodies)
            return
        for start, stop in _runs(self.rows):
            yield memory.opened(self.rows.cut(start, stop), self.shards[start:stop], self.urls, bodies)

    def undecoded(self, memory: Memory) -> Undecoded | None:
        return self.rows, memory.bodies(self.places), [self.urls[shard] for shard in self.shards.tolist()]

    @property
    def count(self) -> int:
        return len(self.rows)

    def offset_of(self, index: int) -> int | None:
        block = index if self.rows.block is None else int(self.rows.block[index])
        first, stop = int(self.rows.starts[block]), int(self.rows.starts[block + 1])
        if first == stop:
            return None
        moved = 0 if self.moved is None else int(self.moved[first])
        return int(self.rows.offset[first]) - moved - self.bases[int(self.shards[index])]

    def remember(self, made: Sequence[object]) -> None: ...


class _Whole:
    """Samples decoded all at once, and not known before."""

    __slots__ = ()

    are_objects = False
    has_large = False
    shares_blocks = False

    @property
    def count(self) -> int | None:
        return None

    def offset_of(self, index: int) -> int | None:
        return None

    def undecoded(self, memory: Memory) -> Undecoded | None:
        return None

    def remember(self, made: Sequence[object]) -> None: ...


@as_call
@dataclass(slots=True)
class SentPickle(_Whole):
    place: Place
    lengths: Sequence[int]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield memory.packed(self.place, self.lengths)[self.start : self.stop]


@as_call
@dataclass(slots=True)
class SentApart(_Whole):
    """Samples pickled one by one. See `headrace.workers.sample_chunks.ApartPart` for `pieces`."""

    place: Place
    pieces: Sequence[tuple[int, ...]]

    @property
    def count(self) -> int:
        return len(self.pieces)

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield memory.apart(self.place, self.pieces)


@as_call
@dataclass(slots=True)
class SentTable(_Whole):
    place: Place
    lengths: Sequence[int]
    chosen: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.chosen)

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield list(memory.in_table(self.place, self.lengths, self.chosen))


@as_call
@dataclass(slots=True)
class SentObjects(_Whole):
    """Objects of the trainer's process, for thread workers; or keys of plain types."""

    samples: list[object]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def are_objects(self) -> bool:  # type: ignore[override]
        return True

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield self.samples[self.start : self.stop]

    def remember(self, made: Sequence[object]) -> None:
        self.samples[self.start : self.start + len(made)] = [m if isinstance(m, Failure) else Made(m) for m in made]


@dataclass(slots=True)
class SentKeys(_Whole):
    """Keys that are not of plain types, pickled."""

    blob: bytes

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield memory.unpack(self.blob)


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of runs of at most `_RUN_BYTES`. A larger sample is a run of its own."""
    ends, start = np.cumsum(rows.sizes()), 0
    while start < len(rows):
        most = _RUN_BYTES + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield start, stop
        start = stop


def offset_in(parts: Sequence[SentPart], index: int) -> int | None:
    """Return the byte offset of sample `index` of all parts in its shard. None if unknown."""
    for part in parts:
        count = part.count
        if count is None:
            return None
        if index < count:
            return part.offset_of(index)
        index -= count
    return None
