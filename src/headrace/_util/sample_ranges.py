"""Tables of samples: their byte ranges in a shard."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """Byte ranges of samples: a table of numpy arrays, without an object per sample.

    Sample i has the key `keys[i]` (UTF-8 bytes, surrogateescape) and is row `row[i]` of block `block[i]`. Block b has
    the members `starts[b]:starts[b + 1]`. Member m is `size[m]` bytes at `offset[m]` and holds `fields[field[m]]`, such
    as a field of a tar sample. If `block` and `row` are None, sample i is all of block i.

    Attributes:
        reads: For fetched blocks: a number unique in this process per shared block, else 0.
        about: Per block: metadata, beside its bytes, that the format needs to decode it. None: no metadata.
        wanted: For fetched blocks: number of rows needed from each fetched block.
    """

    keys: NDArray[np.bytes_]
    starts: Ints
    field: NDArray[np.int32]
    offset: Ints
    size: Ints
    fields: tuple[str, ...]
    block: Ints | None = None
    row: Ints | None = None
    reads: Ints | None = None
    about: tuple[object, ...] | None = None
    wanted: Ints | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all numbers as one byte string: each array would cost as much."""
        arrays = self.starts, self.field, self.offset, self.size, self.block, self.row, self.reads, self.wanted
        counts = tuple(-1 if array is None else len(array) for array in arrays)
        data = np.concatenate([array for array in arrays if array is not None]).tobytes()
        return _rows_of, (self.keys.tobytes(), self.keys.itemsize, data, counts, self.fields, self.about)

    def cut(self, start: int, stop: int) -> Rows:
        """Return rows [start, stop), without a copy if their blocks are in order."""
        block, first, last = None if self.block is None else self.block[start:stop], start, stop
        if block is not None:
            if not len(block) or (np.diff(block) >> 1).any():  # steps other than 0 and 1
                return self.take(np.arange(start, stop))
            first, last = int(block[0]), int(block[-1]) + 1
        starts, blocks = self.starts[first : last + 1], slice(first, last)
        some, keys = slice(int(starts[0]), int(starts[-1])), self.keys[start:stop]
        own = keys, starts - some.start, self.field[some], self.offset[some], self.size[some], self.fields
        if block is None or self.row is None:
            return Rows(*own)
        shared: list[Any] = [None if of is None else of[blocks] for of in (self.reads, self.about, self.wanted)]
        return Rows(*own, block - first, self.row[start:stop], *shared)

    def take(self, chosen: Ints) -> Rows:
        """Return the rows at the indices `chosen`, in that order. Shared blocks keep their order."""
        blocks = self.blocks(chosen)
        members, starts = self._members_of(blocks), np.zeros(len(blocks) + 1, np.int64)
        np.cumsum(self.starts[blocks + 1] - self.starts[blocks], out=starts[1:])
        field, offset, size = self.field[members], self.offset[members], self.size[members]
        if self.block is None or self.row is None:
            return Rows(self.keys[chosen], starts, field, offset, size, self.fields)
        block = np.searchsorted(blocks, self.block[chosen])
        reads = None if self.reads is None else self.reads[blocks]
        about = None if self.about is None else tuple(self.about[k] for k in blocks.tolist())
        wanted = None if self.wanted is None else self.wanted[blocks]
        own = self.keys[chosen], starts, field, offset, size, self.fields
        return Rows(*own, block, self.row[chosen], reads, about, wanted)

    def blocks(self, chosen: Ints) -> Ints:
        """Return the block numbers of the samples `chosen`. Shared blocks come once, ascending."""
        return chosen if self.block is None else np.unique(self.block[chosen])

    def members(self, chosen: Ints) -> Ints:
        return self._members_of(self.blocks(chosen))

    def _members_of(self, blocks: Ints) -> Ints:
        counts = self.starts[blocks + 1] - self.starts[blocks]
        ends = np.cumsum(counts)
        first = np.repeat(self.starts[blocks] - ends + counts, counts)
        return np.asarray(np.arange(len(first)) + first, np.int64)

    def only(self, members: NDArray[np.bool_]) -> Rows:
        total = np.concatenate([[0], np.cumsum(members)])
        starts = np.asarray(total[self.starts], np.int64)
        offset, size, field = self.offset[members], self.size[members], self.field[members]
        return replace(self, starts=starts, field=field, offset=offset, size=size)

    def shifted(self, base: int) -> Rows:
        return replace(self, offset=self.offset + base)

    def as_read(self, numbers: BlockNumbers | None = None, shard: Hashable = None) -> Rows:
        """Return the rows of fetched blocks: shared blocks get numbers.

        Args:
            numbers: Numbering for blocks that may be read again. The number of needed rows is then unknown and set to
                0.
            shard: Identifies the shard and its version.
        """
        if self.block is None or self.reads is not None:
            return self
        count = len(self.starts) - 1
        if numbers is not None:
            return replace(self, reads=numbers.of(self, shard), wanted=np.zeros(count, np.int64))
        reads = np.array([next(BLOCK_READS) for _ in range(count)], np.int64)
        return replace(self, reads=reads, wanted=np.bincount(self.block, minlength=count))

    def sizes(self) -> Ints:
        """Return the bytes of each sample. A shared block counts for its first sample."""
        total = np.concatenate([[0], np.cumsum(self.size)])
        sizes = np.asarray(total[self.starts[1:]] - total[self.starts[:-1]], np.int64)
        if self.block is None:
            return sizes
        of_samples = np.zeros(len(self), np.int64)
        blocks, first = np.unique(self.block, return_index=True)
        of_samples[first] = sizes[blocks]
        return of_samples

    @staticmethod
    def empty() -> Rows:
        none = np.zeros(0, np.int64)
        return Rows(np.zeros(0, "S1"), np.zeros(1, np.int64), none.astype(np.int32), none, none, ())

    @staticmethod
    def concat(tables: Sequence[Rows]) -> Rows:
        if len(tables) == 1:
            return tables[0]
        fields = tuple(dict.fromkeys(name for t in tables for name in t.fields))
        number = {name: k for k, name in enumerate(fields)}
        renumbered = [np.array([number[f] for f in t.fields] or [0], np.int32)[t.field] for t in tables]
        ends = np.cumsum([0] + [len(t.offset) for t in tables])
        shared = _shared(tables) if any(t.block is not None for t in tables) else (None, None, None, None, None)
        starts = [t.starts[:-1] + end for t, end in zip(tables, ends, strict=False)]
        return Rows(
            np.concatenate([t.keys for t in tables]) if tables else np.zeros(0, "S1"),
            np.concatenate([*starts, ends[-1:]]).astype(np.int64),
            np.concatenate(renumbered) if tables else np.zeros(0, np.int32),
            np.concatenate([t.offset for t in tables]) if tables else np.zeros(0, np.int64),
            np.concatenate([t.size for t in tables]) if tables else np.zeros(0, np.int64),
            fields,
            *shared,
        )


_About = tuple[object, ...] | None


def _rows_of(
    keys: bytes, key_bytes: int, data: bytes, counts: Sequence[int], fields: tuple[str, ...], about: _About
) -> Rows:
    """Return the table that `Rows.__reduce__` has taken apart. Its arrays are read-only."""
    ends = itertools.accumulate(max(0, count) for count in counts)
    numbers, names = np.frombuffer(data, np.int64), np.frombuffer(keys, f"S{key_bytes}")
    arrays = [None if count < 0 else numbers[end - count : end] for count, end in zip(counts, ends, strict=True)]
    starts, field, offset, size, block, row, reads, wanted = cast("list[Ints]", arrays)
    return Rows(names, starts, field.astype(np.int32), offset, size, fields, block, row, reads, about, wanted)


BLOCK_READS = itertools.count(1)  # numbers of blocks, each read once
_NUMBERED_MOST = 1024  # blocks: a shuffle window has some of a few hundred stretches, and all stay in memory


class BlockNumbers:
    """Numbers of blocks. The same members of a block that is soon read again keep its number."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[object, ...], tuple[object, int]] = OrderedDict()

    def of(self, rows: Rows, shard: Hashable) -> Ints:
        """Return the numbers of a table's blocks. Offsets count from the start of the shard."""
        return np.array([self._number(rows, shard, block) for block in range(len(rows.starts) - 1)], np.int64)

    def _number(self, rows: Rows, shard: Hashable, block: int) -> int:
        part = slice(int(rows.starts[block]), int(rows.starts[block + 1]))
        fields = tuple(rows.fields[k] for k in rows.field[part].tolist())
        read = shard, rows.offset[part].tobytes(), rows.size[part].tobytes(), fields
        about = None if rows.about is None else rows.about[block]
        known = self._known.pop(read, None)
        if known is None or known[0] is not about:  # cached rows may belong to other metadata
            known = about, next(BLOCK_READS)
        self._known[read] = known
        if len(self._known) > _NUMBERED_MOST:
            self._known.popitem(last=False)
        return known[1]


def _shared(tables: Sequence[Rows]) -> tuple[Ints, Ints, Ints | None, tuple[object, ...] | None, Ints | None]:
    """Concatenate `block`, `row`, `reads`, `about` and `wanted` of several tables."""
    blocks, rows, reads, wanted, about, first = [], [], [], [], list[object](), 0
    for table in tables:
        count = len(table.starts) - 1
        own, none = np.arange(count), np.zeros(count, np.int64)
        blocks.append((own if table.block is None else table.block) + first)
        rows.append(np.zeros(len(table), np.int64) if table.row is None else table.row)
        reads.append(none if table.reads is None else table.reads)
        wanted.append(none if table.wanted is None else table.wanted)
        about += [None] * count if table.about is None else table.about
        first += count
    are_read = any(table.reads is not None for table in tables)
    is_told = any(table.about is not None for table in tables)
    numbers, counts = (np.concatenate(reads), np.concatenate(wanted)) if are_read else (None, None)
    return np.concatenate(blocks), np.concatenate(rows), numbers, tuple(about) if is_told else None, counts


def texts_of(keys: NDArray[np.bytes_]) -> list[str]:
    each = keys.tolist()
    texts = b"\0".join(each).decode("utf-8", "surrogateescape").split("\0")
    return texts if len(texts) == len(each) else [key.decode("utf-8", "surrogateescape") for key in each]


class Scanner(Protocol):
    """Finds the samples of a shard in successive buffers.

    A scanner is pickled between calls and holds no bytes.

    Attributes:
        error: The damage found. Samples before it were returned, and nothing is read after it.
        done: True if all was read, or `error` is set.
        low: Lowest offset whose bytes are still needed.
    """

    @property
    def error(self) -> Exception | None: ...

    @property
    def done(self) -> bool: ...

    @property
    def low(self) -> int: ...

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows:
        """Return the samples completed by `buffer`, the part of the shard at `offset`.

        Damage does not raise: the samples before it are returned, and `error` is set.
        """
        ...


def spans_of(rows: Rows, starts: Sequence[int]) -> Sequence[int]:
    """Return the indices of spans, by ascending start, that hold members of a non-empty table."""
    low = bisect.bisect_right(starts, int(rows.offset.min())) - 1
    high = bisect.bisect_right(starts, int((rows.offset + np.maximum(rows.size, 1)).max()) - 1) - 1
    return range(low, high + 1) if low >= 0 and high <= low + 1 else spans_of_each(rows, starts)


def spans_of_each(rows: Rows, starts: Sequence[int]) -> list[int]:
    """Return the indices of spans that hold members, for any number of spans."""
    low = np.searchsorted(starts, rows.offset, side="right") - 1
    high = np.searchsorted(starts, rows.offset + np.maximum(rows.size, 1) - 1, side="right") - 1
    between = [np.arange(low[k] + 1, high[k]) for k in np.flatnonzero(high - low > 1).tolist()]
    touched: list[int] = np.unique(np.concatenate([low, high, *between])).tolist()
    return [k for k in touched if k >= 0]  # an empty member may be before the first span


def member_pieces(starts: Sequence[int], ends: Sequence[int], offset: int, size: int) -> list[tuple[int, int, int]]:
    """Split [offset, offset + size) by span: (span, first byte in the span, one past the last)."""
    pieces = []
    k = bisect.bisect_right(starts, offset) - 1
    stop = offset + size
    while offset < stop:
        end = min(stop, ends[k])
        pieces.append((k, offset - starts[k], end - starts[k]))
        offset = end
        k += 1
    return pieces


_LONG_BYTES = 1024


class LeasedBodies:
    """Bytes of samples by address. The fetched ranges, `views`, start at the ascending addresses `first`."""

    def __init__(self, views: Sequence[memoryview], first: Sequence[int]) -> None:
        self._views, self._first = views, first
        self._ends = [address + len(view) for address, view in zip(first, views, strict=True)]

    def one(self, offset: int, size: int) -> bytes:
        if not size:
            return b""  # may be outside of all ranges
        pieces = member_pieces(self._first, self._ends, offset, size)
        return b"".join(self._views[k][a:b] for k, a, b in pieces)

    def all(self, offsets: Ints, sizes: Ints) -> list[bytes]:
        if not self._views:
            return [b""] * len(offsets)  # all are empty
        ends = (offsets + sizes).tolist()
        if len(self._views) == 1:
            view, begin = self._views[0], self._first[0]
            return [
                bytes(view[start - begin : stop - begin]) for start, stop in zip(offsets.tolist(), ends, strict=True)
            ]
        spans = (np.searchsorted(self._first, offsets, side="right") - 1).tolist()
        bodies = []
        for start, stop, span in zip(offsets.tolist(), ends, spans, strict=True):
            begin = self._first[span]
            is_inside = stop <= self._ends[span]
            bodies.append(
                bytes(self._views[span][start - begin : stop - begin]) if is_inside else self.one(start, stop - start)
            )
        return bodies

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """Return `length` bytes at each offset as an array [len(offsets), length]."""
        out = np.empty((len(offsets), length), np.uint8)
        self.gather_into(out, offsets)
        return out

    def gather_into(self, out: NDArray[np.uint8], offsets: Ints) -> None:
        length = out.shape[1]
        if not length or not len(offsets):
            return
        if len(self._views) == 1:
            _copy(self._views[0], offsets - self._first[0], out)
            return
        spans = np.searchsorted(self._first, offsets, side="right") - 1
        reaches_over = offsets + length > np.asarray(self._ends)[spans]
        for k in np.flatnonzero(reaches_over).tolist():
            out[k] = np.frombuffer(self.one(int(offsets[k]), length), np.uint8)
        for span in np.unique(spans[~reaches_over]).tolist():
            chosen = (spans == span) & ~reaches_over
            if chosen.all():
                _copy(self._views[span], offsets - self._first[span], out)
                continue
            some = np.empty((int(chosen.sum()), length), np.uint8)
            _copy(self._views[span], offsets[chosen] - self._first[span], some)
            out[chosen] = some


def _copy(view: memoryview, offsets: Ints, out: NDArray[np.uint8]) -> None:
    array, length = np.frombuffer(view, np.uint8), out.shape[1]
    if length >= _LONG_BYTES:  # copying a row takes longer than the loop around it
        for row, offset in zip(out, offsets.tolist(), strict=True):
            row[:] = array[offset : offset + length]
        return
    windows = np.lib.stride_tricks.as_strided(array, (len(array) - length + 1, length), (1, 1), writeable=False)
    out[:] = windows[offsets]
