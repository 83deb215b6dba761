"""Samples as workers are told of them: each kind opens itself, against the memory that the worker has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.failures import Failure, Made
from headrace.memory import LARGE_BYTES
from headrace.pickled import as_call
from headrace.rows import Rows
from headrace.types import Ints

Place = tuple[int, int, int] | bytes | int
"""Where bytes lie: (segment's number, offset, size) of shared memory. Where none is shared: the bytes themselves, or of
what is to be written how many."""

_RUN_BYTES = 16 * 2**20  # copied out of fetched ranges at once


def size_of(place: Place) -> int:
    """How many bytes there are at a place."""
    if isinstance(place, tuple):
        return place[2]
    return place if isinstance(place, int) else len(place)


class MemberBytes(Protocol):
    """The members of samples, in the ranges that were fetched."""

    def all(self, offsets: Ints, sizes: Ints) -> list[bytes]:
        """The bytes of each (offset, size)."""
        ...

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """The `length` bytes at each of `offsets`: `[len(offsets), length]`."""
        ...

    def gather_into(self, out: NDArray[np.uint8], offsets: Ints) -> None:
        """The same, into an array of this shape."""
        ...


Undecoded = tuple[Rows, MemberBytes, Sequence[str]]
"""A row table, its bytes, and of each sample its shard's address."""


class Memory(Protocol):
    """What a worker finds the bytes of samples in."""

    def bodies(self, places: Sequence[tuple[int, Place]]) -> MemberBytes:
        """The bytes of the ranges at (first address, place)."""
        ...

    def opened(self, rows: Rows, shards: Ints, urls: Sequence[str], bodies: MemberBytes) -> list[object]:
        """The samples of a row table, out of their bytes."""
        ...

    def packed(self, place: Place, lengths: Sequence[int]) -> list[object]:
        """Samples that were pickled, with their buffers."""
        ...

    def apart(self, place: Place, pieces: Sequence[tuple[int, ...]]) -> list[object]:
        """Samples that were pickled each by itself."""
        ...

    def unpack(self, blob: bytes) -> list[object]:
        """The same as `packed` of a string of bytes."""
        ...

    def in_table(self, place: Place, lengths: Sequence[int], chosen: Sequence[int]) -> Sequence[object]:
        """Some of the samples of a table."""
        ...


class SentPart(Protocol):
    """Some samples, as a task has them that goes to a worker."""

    @property
    def count(self) -> int | None:
        """How many there are; None where nobody knows before they are opened."""
        ...

    def offset_of(self, index: int) -> int | None:
        """Where sample `index` begins in its shard, in bytes; None where it lies in none."""
        ...

    @property
    def are_objects(self) -> bool:
        """Whether they are the trainer's own objects: what is done to them must not be done twice."""
        ...

    @property
    def has_large(self) -> bool:
        """Whether one of them, or of the blocks that they share, is large."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether they are rows of blocks, whose bytes are not theirs alone."""
        ...

    def open(self, memory: Memory) -> Iterator[list[object]]:
        """The samples, some at a time."""
        ...

    def undecoded(self, memory: Memory) -> Undecoded | None:
        """What they are made of; None where something was done to them."""
        ...

    def remember(self, made: Sequence[object]) -> None:
        """Take in what became of samples that are objects."""
        ...


@as_call
@dataclass(slots=True)
class SentRows:
    """Samples that lie undecoded in fetched ranges: see `headrace.parts.RawPart`.

    Attributes:
        moved: how much was added to each offset, where members lie elsewhere than they were fetched to.
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
        """Samples a few at a time: their bytes are a second time in memory, beside the ranges."""
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

    def remember(self, made: Sequence[object]) -> None:
        """Nothing: they are made of the same bytes again."""


class _Whole:
    """Samples that are opened at once, and nothing is known of before."""

    __slots__ = ()

    are_objects = False
    has_large = False
    shares_blocks = False

    @property
    def count(self) -> int | None:
        return None

    def offset_of(self, index: int) -> int | None:  # noqa: ARG002 (others need it)
        return None

    def undecoded(self, memory: Memory) -> Undecoded | None:  # noqa: ARG002 (others need it)
        return None

    def remember(self, made: Sequence[object]) -> None:
        """Nothing: they are opened again."""


@as_call
@dataclass(slots=True)
class SentPickle(_Whole):
    """Samples `[start, stop)` of a list that lies pickled in one place."""

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
    """Samples that lie pickled in one place, each by itself; `pieces` as `headrace.parts.ApartPart` has them."""

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
    """Some of the samples of a table that lies in one place; see `headrace.parts.TablePart`."""

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
    """Objects of the trainer's process, for workers that are threads of it; or plain keys, which any pickle carries."""

    samples: list[object]
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def are_objects(self) -> bool:  # type: ignore[override]
        return True

    def open(self, memory: Memory) -> Iterator[list[object]]:  # noqa: ARG002 (others need it)
        yield self.samples[self.start : self.stop]

    def remember(self, made: Sequence[object]) -> None:
        self.samples[self.start : self.stop] = [m if isinstance(m, Failure) else Made(m) for m in made]


@dataclass(slots=True)
class SentKeys(_Whole):
    """Keys that were pickled by what knows how to send them."""

    blob: bytes

    def open(self, memory: Memory) -> Iterator[list[object]]:
        yield memory.unpack(self.blob)


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Where to cut samples so that none but a single one has more than so many bytes."""
    ends, start = np.cumsum(rows.sizes()), 0
    while start < len(rows):
        most = _RUN_BYTES + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
        yield start, stop
        start = stop


def offset_in(parts: Sequence[SentPart], index: int) -> int | None:
    """Where sample `index` of all parts begins in its shard, in bytes; None where that is not known."""
    for part in parts:
        count = part.count
        if count is None:
            return None
        if index < count:
            return part.offset_of(index)
        index -= count
    return None
