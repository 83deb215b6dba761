"""Chunks of samples in the engine, and the leases of their memory.

A chunk knows where its bytes are leased, not what they contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from headrace._util.sample_ranges import Rows, member_pieces, spans_of
from headrace._util.shared_memory import Claim, Lease, Segment
from headrace.types import Ints
from headrace.workers.failures import Failure
from headrace.workers.wire_chunks import SentApart, SentKeys, SentObjects, SentPart, SentPickle, SentRows, SentTable


class Part(Protocol):
    """Consecutive samples of an epoch, and the leases of their memory."""

    @property
    def count(self) -> int: ...

    @property
    def failed(self) -> Sequence[int]:
        """Ascending indices of failed samples. Of several, at least the first."""
        ...

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the shared blocks that must be decoded for these samples."""
        ...

    def cut(self, start: int, stop: int) -> Part:
        """Return the samples [start, stop), with separate leases."""
        ...

    def release(self) -> None: ...

    def sent(self) -> tuple[SentPart, list[Segment]]:
        """Return the samples for a task, and the segments that the worker must map."""
        ...

    def carried(self) -> SentPart:
        """Return the samples with their bytes, for a worker without shared memory."""
        ...

    def origin(self, index: int) -> tuple[object, str | None]:
        """Return the key and URL of a sample, if known before decoding."""
        ...


class _Plain:
    """Samples that have not failed, and whose keys are unknown before decoding."""

    __slots__ = ()

    blocks: Sequence[int] = ()

    @property
    def failed(self) -> Sequence[int]:
        return ()

    def origin(self, index: int) -> tuple[object, str | None]:
        return None, None


@dataclass(slots=True)
class RawPart:
    """Undecoded samples in fetched ranges.

    Attributes:
        rows: Table of the samples. Offsets count in the epoch's address space, in which each shard has its own range.
        shards: For each sample the index of its shard in `urls`.
        bases: For each of `urls` the first address of the shard.
        spans: (first address, lease) of the ranges that contain the samples, ascending.
    """

    rows: Rows
    shards: Ints
    urls: tuple[str, ...]
    spans: list[tuple[int, Lease]]
    bases: tuple[int, ...]
    count: int = field(init=False)  # read some twenty times a batch

    def __post_init__(self) -> None:
        self.count = len(self.rows)

    @property
    def failed(self) -> Sequence[int]:
        return ()

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

    def sent(self) -> tuple[SentPart, list[Segment]]:
        places = [(address, address_of(lease)) for address, lease in self.spans]
        return SentRows(self.rows, self.shards, self.urls, places, self.bases), [
            lease.segment for _, lease in self.spans
        ]

    def carried(self) -> SentPart:
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
        return SentRows(rows, self.shards, self.urls, [(0, b"".join(pieces))], self.bases, moved)

    def origin(self, index: int) -> tuple[object, str | None]:
        key = bytes(self.rows.keys[index]).decode("utf-8", "surrogateescape")
        return key, self.urls[int(self.shards[index])]


def address_of(lease: Lease) -> tuple[int, int, int]:
    return lease.segment.number, lease.offset, lease.size


def sorted_spans(spans: dict[int, Lease]) -> list[tuple[int, Lease]]:
    return sorted(spans.items(), key=lambda span: span[0])


@dataclass(slots=True)
class _Leased(_Plain):
    """Samples made by workers, in one lease."""

    lease: Lease

    def release(self) -> None:
        self.lease.release()


@dataclass(slots=True)
class PackedPart(_Leased):
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

    def sent(self) -> tuple[SentPart, list[Segment]]:
        return SentPickle(address_of(self.lease), self.lengths, self.start, self.stop), [self.lease.segment]

    def carried(self) -> SentPart:
        return SentPickle(bytes(self.lease.view), self.lengths, self.start, self.stop)


@dataclass(slots=True)
class ApartPart(_Leased):
    """Samples pickled one by one, in one lease. Any of them can be read alone.

    Attributes:
        pieces: For each sample (offset in the lease, size) of its pickle and of each buffer, in one flat tuple.
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

    def sent(self) -> tuple[SentPart, list[Segment]]:
        return SentApart(address_of(self.lease), self.pieces), [self.lease.segment]

    def carried(self) -> SentPart:
        """Return the samples with only their own bytes: other samples are stored between them."""
        blob, moved = bytearray(), []
        for pieces in self.pieces:
            places: list[int] = []
            for at, size in zip(pieces[::2], pieces[1::2], strict=True):
                places += (len(blob), size)
                blob += self.lease.view[at : at + size]
            moved.append(tuple(places))
        return SentApart(bytes(blob), moved)


@dataclass(slots=True)
class TablePart(_Leased):
    """Samples `chosen` of a table in columns, in one lease. Any can be read alone; none fails."""

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

    def sent(self) -> tuple[SentPart, list[Segment]]:
        return SentTable(address_of(self.lease), self.lengths, self.chosen), [self.lease.segment]

    def carried(self) -> SentPart:
        return SentTable(bytes(self.lease.view), self.lengths, self.chosen)


@dataclass(slots=True)
class ListPart(_Plain):
    """Samples that are Python objects of this process, which no other process can receive.

    Attributes:
        nbytes: Estimated size of the samples, if known.
    """

    samples: list[Any]
    start: int = 0
    stop: int | None = None
    claim: Claim | None = None
    nbytes: int = 0

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

    def sent(self) -> tuple[SentPart, list[Segment]]:
        return SentObjects(self.samples, self.start, self.start + self.count), []

    def carried(self) -> SentPart:
        """Return the samples as objects. Outside thread workers they are failures only."""
        return SentObjects(self.samples[self.start : self.start + self.count], 0, self.count)


@dataclass(slots=True)
class KeyPart(_Plain):
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

    def release(self) -> None:
        pass

    def sent(self) -> tuple[SentPart, list[Segment]]:
        return self.carried(), []

    def carried(self) -> SentPart:
        keys = self.keys[self.start : self.stop]
        return SentObjects(keys, 0, len(keys)) if self.pack is None else SentKeys(self.pack(keys))

    def origin(self, index: int) -> tuple[object, str | None]:
        return self.keys[self.start + index], None
