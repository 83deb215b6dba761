"""The pages of column chunks: their rows and bounds by page indexes, and checks of page headers.

An absent or damaged index excludes nothing: its column is read completely.

Page headers are checked for damage and memory use before pyarrow decodes the pages. A few bytes of a page can represent
any number of long values: by a dictionary, or because each value states how many bytes of the previous one it begins
with (DELTA_BYTE_ARRAY).
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LimitError
from headrace.formats.arrow_values import arrow_errors, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import (
    ColumnChunk,
    Group,
    ParquetColumn,
    ParquetLeaf,
    Place,
    Struct,
    ThriftReader,
    Value,
)

SMALL_BYTES = 32 * 1024
"""Chunks up to this size are read completely, as reading a page index would cost as much."""

Run = tuple[int, int]
"""Rows [start, stop) of a group."""


class PageIndex(NamedTuple):
    """The locations of the pages of a column chunk, and the first row of each."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rows: tuple[int, ...]


class PageBounds(NamedTuple):
    """The bounds of the values of each page. None: unknown. Text and bytes may be truncated.

    `missing` counts missing values. `are_missing` is True if all values are missing.
    """

    lows: tuple[bytes | None, ...]
    highs: tuple[bytes | None, ...]
    missing: tuple[int | None, ...]
    are_missing: tuple[bool, ...]


class LeafPages(NamedTuple):
    """The pages of a leaf that are read.

    Attributes:
        start, size: Location of the whole chunk.
        values: Number of values of these pages. -1: unknown.
        pieces: Locations of the pages, in file order.
    """

    leaf: ParquetLeaf
    codec: int
    start: int
    size: int
    values: int
    pieces: tuple[Place, ...]


class ColumnPages(NamedTuple):
    """The pages of a column that are read, and their rows, which are equal for all leaves."""

    column: str
    runs: tuple[Run, ...]
    leaves: tuple[LeafPages, ...]

    @property
    def pieces(self) -> list[Place]:
        return sorted(piece for leaf in self.leaves for piece in leaf.pieces)


def page_index(data: bytes, chunk: ColumnChunk, rows: int) -> PageIndex:
    """Parse the page index of a chunk. Damage raises a ValueError."""
    pages = ThriftReader(data).struct().get(1)
    if type(pages) is not list or not pages:
        raise ValueError("it has no pages")
    starts, stops, first = [], [], []
    for page in pages:
        numbers = [page.get(field) if type(page) is dict else None for field in (1, 2, 3)]
        at, size, row = (number if type(number) is int and number >= 0 else -1 for number in numbers)
        if min(at, size, row) < 0:
            raise ValueError("a page does not state its place")
        starts.append(at)
        stops.append(at + size)
        first.append(row)
    if first[0] or any(b <= a for a, b in pairwise([*first, rows])):
        raise ValueError("its rows do not ascend")
    places = [chunk.start, *(edge for pair in zip(starts, stops, strict=True) for edge in pair)]
    if any(b < a for a, b in pairwise([*places, chunk.start + chunk.size])):
        raise ValueError("its pages are not in their column")
    return PageIndex(tuple(starts), tuple(stops), tuple(first))


def page_bounds(data: bytes, chunk: ColumnChunk, index: PageIndex) -> PageBounds:
    """Parse the bounds of the pages of a chunk. Damage raises a ValueError."""
    said, count = ThriftReader(data).struct(), len(index.rows)
    empty, lows, highs, missing = (_list(said, field, count) for field in (1, 2, 3, 5))
    if empty is None or lows is None or highs is None:
        raise ValueError("it does not state the bounds of its pages")
    known = [n for n in missing or () if type(n) is int and n >= 0]
    if missing is not None and (len(known) < count or chunk.statistics[2] not in (None, sum(known))):
        raise ValueError("its pages miss other values than the column does")
    return PageBounds(
        tuple(low if type(low) is bytes else None for low in lows),
        tuple(high if type(high) is bytes and high else None for high in highs),  # b"" may mean no bound
        tuple(known) if known else (None,) * count,
        tuple(one is True for one in empty),
    )


def pages_of(
    columns: Sequence[ParquetColumn], group: Group, indexes: Mapping[int, PageIndex], runs: tuple[Run, ...]
) -> tuple[ColumnPages, ...]:
    """Return the pages of `columns` with some rows. Without an index, return the whole column."""
    return tuple(_pages_of(column, group, indexes, runs) for column in columns)


def _pages_of(
    column: ParquetColumn, group: Group, indexes: Mapping[int, PageIndex], runs: tuple[Run, ...]
) -> ColumnPages:
    chunks, leaves = [group.chunks[leaf.number] for leaf in column.leaves], list[LeafPages]()
    whole: tuple[Run, ...] = ((0, group.rows),)
    own = [] if runs == whole else [indexes[chunk.start] for chunk in chunks if chunk.start in indexes]
    if len(own) < len(chunks):
        found, stretches = whole, None
    else:
        found, stretches = covering(own, runs, group.rows)
    for k, (leaf, chunk) in enumerate(zip(column.leaves, chunks, strict=True)):
        pieces, values = [(chunk.start, chunk.size)], chunk.values
        if stretches is not None:
            values = sum(stop - first for first, stop in found) if leaf.is_flat else -1
            index = own[k]
            dictionary = [(chunk.start, index.starts[0])] if index.starts[0] > chunk.start else []
            edges = joined([*dictionary, *((index.starts[a], index.stops[b - 1]) for a, b in stretches[k])])
            pieces = [(start, stop - start) for start, stop in edges]
        leaves.append(LeafPages(leaf, chunk.codec, chunk.start, chunk.size, values, tuple(pieces)))
    return ColumnPages(column.name, found, tuple(leaves))


def covering(indexes: Sequence[PageIndex], runs: Sequence[Run], rows: int) -> tuple[tuple[Run, ...], list[list[Run]]]:
    """Return the pages that hold some rows, such that all leaves have the same rows.

    The result is (rows of these pages, ranges [start, stop) of pages for each leaf).
    """
    found = tuple(runs)
    while True:
        pages = [[(bisect_right(index.rows, a) - 1, bisect_left(index.rows, b)) for a, b in found] for index in indexes]
        wider = joined(
            (index.rows[a], index.rows[b] if b < len(index.rows) else rows)
            for index, some in zip(indexes, pages, strict=True)
            for a, b in some
        )
        if wider == found:
            return found, [list(joined(some)) for some in pages]
        found = wider


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Sort ranges and merge those that touch."""
    found: list[Run] = []
    for first, stop in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)


def _list(said: Struct, field: int, count: int) -> list[Value] | None:
    found = said.get(field)
    if found is not None and (type(found) is not list or len(found) != count):
        raise ValueError(f"it does not speak of {count} pages")
    return found


_DATA, _INDEX, _DICTIONARY, _DATA_2 = range(4)
_BY_DICTIONARY, _DELTA_BYTE_ARRAY = (2, 8), 7  # encodings
_KNOWN = (0, 2, 3, 4, 5, 6, 7, 8, 9)
_WIDTH_MOST = 64

FILLER_BYTES = 11
"""Size of the header of a skipped page."""


class _Page(NamedTuple):
    """A page. `level_bytes` are uncompressed levels before the values. None: they are in `body`."""

    body: memoryview
    unpacked: int
    values: int
    level_bytes: int | None
    is_packed: bool


class PageSummary(NamedTuple):
    """The number of values of all data pages, and whether to decode them as a dictionary.

    `as_dictionary` is set for text or bytes if all pages use one, or plain values would take too much memory.
    """

    values: int
    as_dictionary: bool


def check_pages(data: bytes, leaf: ParquetLeaf, codec: str, limits: Limits) -> PageSummary:
    """Check the pages of a column chunk and their checksums."""
    view, at, values, unpacked, by_dictionary = memoryview(data), 0, 0, 0, 0
    most = limits.unpacked(len(data))
    dictionary, deltas = None, list[_Page]()
    while at < len(data):
        reader = ThriftReader(view[at : at + limits.header_bytes])
        try:
            head = reader.struct()
            body = view[at + reader.at :][: _number(head, 3)]
            kind, full = _number(head, 1), _number(head, 2)
            if len(body) < _number(head, 3):
                raise ValueError(f"its {_number(head, 3)} bytes reach beyond the column's end")
            if type(head.get(4)) is int and zlib.crc32(body) != head[4] & 0xFFFFFFFF:  # type: ignore[operator]
                raise ValueError("its bytes do not match its checksum")
            unpacked += full
            if kind == _DICTIONARY:
                if at:
                    raise ValueError("a dictionary comes after other pages")
                said = _of_values(head.get(7), 2)
                dictionary = _Page(body, full, _number(said, 1), None, is_packed=True)
            elif kind in (_DATA, _DATA_2):
                said = _of_values(head.get(5 if kind == _DATA else 8), 2 if kind == _DATA else 4)
                count, encoding = _number(said, 1), said[2 if kind == _DATA else 4]
                values += count
                by_dictionary += count if encoding in _BY_DICTIONARY else 0
                if encoding == _DELTA_BYTE_ARRAY:
                    deltas.append(_data_page(body, full, count, said, kind))
            elif kind != _INDEX:
                raise ValueError(f"it is of kind {kind}, which is not known")
        except ValueError as error:
            raise ValueError(f"the page at byte {at}: {error}") from None
        if unpacked > most:
            raise LimitError(f"its pages unpack to over {unpacked} bytes, the limit is {most}")
        at += reader.at + len(body)
    if leaf.physical != "BYTE_ARRAY":
        return PageSummary(values, as_dictionary=False)
    _check_deltas(deltas, codec, leaf.levels, most)
    if dictionary is None or by_dictionary == values:
        return PageSummary(values, as_dictionary=by_dictionary > 0)
    is_large = dictionary.unpacked * by_dictionary > most and _longest(dictionary, codec) * by_dictionary > most
    return PageSummary(values, as_dictionary=is_large)


def filler(nbytes: int) -> bytes:
    """Return the header of a page of `nbytes`, header included, that readers skip."""
    packed = nbytes - FILLER_BYTES << 1
    number = [packed >> 7 * k & 127 | (128 if k < 4 else 0) for k in range(5)]
    return bytes([0x15, _INDEX << 1, 0x15, 0, 0x15, *number, 0])  # kind, unpacked bytes, packed bytes


def _data_page(body: memoryview, unpacked: int, values: int, said: Struct, kind: int) -> _Page:
    if kind == _DATA:
        return _Page(body, unpacked, values, None, is_packed=True)
    levels = _number({5: 0, **said}, 5) + _number({6: 0, **said}, 6)
    if levels > min(len(body), unpacked):
        raise ValueError(f"its levels have {levels} bytes, and all of it {len(body)}")
    return _Page(body, unpacked, values, levels, is_packed=said.get(7) is not False)


def _number(head: Struct, field: int) -> int:
    value = head.get(field, -1)
    if type(value) is not int or value < 0:
        raise ValueError("it does not state its size" if field == 3 else "its head is damaged")
    return value


def _of_values(said: Value | None, encoding: int) -> Struct:
    """Return the part of a header about values. `encoding` is the field of their encoding."""
    if type(said) is not dict:
        raise ValueError("its head is damaged")
    if _number(said, encoding) not in _KNOWN:
        raise ValueError(f"its encoding {said[encoding]!r} is not known")
    return said


def _check_deltas(pages: Sequence[_Page], codec: str, levels: int, most: int) -> None:
    """Raise a LimitError if delta-encoded values take more than `most` bytes."""
    if sum(page.unpacked * page.values for page in pages) <= most:
        return
    taken = 0
    for page in pages:
        data = _unpacked(page, codec)
        if page.level_bytes is None:
            for _ in range(levels):
                data = data[4 + int.from_bytes(data[:4], "little") :]
        taken += int(delta_numbers(data, page.values).sum()) + page.unpacked
        if taken > most:
            raise LimitError(f"its values take {taken} bytes or more once they are decoded, the limit is {most}")


def _longest(dictionary: _Page, codec: str) -> int:
    data, at, longest = _unpacked(dictionary, codec), 0, 0
    for _ in range(dictionary.values):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise ValueError("its dictionary is cut off")
        longest = max(longest, size)
    return longest


def _unpacked(page: _Page, codec: str) -> memoryview:
    body, size = page.body[page.level_bytes or 0 :], page.unpacked - (page.level_bytes or 0)
    if codec == "uncompressed" or not page.is_packed:
        return body
    if codec == "lz4":
        raise ValueError("its lz4 cannot be looked into: write it with lz4_raw or zstd")
    pa = library()
    with arrow_errors():
        return memoryview(pa.Codec(codec).decompress(pa.py_buffer(body), decompressed_size=size)).cast("B")


def delta_numbers(data: memoryview, most: int) -> NDArray[np.int64]:
    """Decode DELTA_BINARY_PACKED. Damage, or more than `most` numbers, raises a ValueError."""
    reader = ThriftReader(data)
    block, parts, count, first = reader.unsigned(), reader.unsigned(), reader.unsigned(), reader.signed()
    if count > most or not parts or not block or block % (parts * 8) or block > 2**16:
        raise ValueError(f"it has {count} lengths of values in blocks of {block}, and {most} values")
    deltas, each, left = [np.array([first], np.int64)], block // parts, count - 1
    while left > 0:
        low = (reader.signed() + 2**63) % 2**64 - 2**63
        for width in reader.take(parts):
            if left <= 0:
                break
            if width > _WIDTH_MOST:
                raise ValueError("its lengths of values are damaged")
            packed = np.frombuffer(reader.take(each * width // 8), np.uint8)
            bits = np.unpackbits(packed, bitorder="little").reshape(each, width)
            numbers = bits.astype(np.int64) @ (np.int64(1) << np.arange(width, dtype=np.int64))
            deltas.append(numbers[:left] + low)
            left -= each
    numbers = np.cumsum(np.concatenate(deltas))[:count]
    if len(numbers) and int(numbers.min()) < 0:
        raise ValueError("a length of a value is less than none")
    return numbers
