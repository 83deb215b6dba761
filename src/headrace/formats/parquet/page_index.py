"""Page indexes: the pages of a column chunk, their rows, and the bounds of their values.

An absent or damaged index excludes nothing: its column is read completely.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from headrace.formats.parquet.footer import ColumnChunk, Group, ParquetColumn, ParquetLeaf, Place
from headrace.formats.parquet.thrift import Struct, ThriftReader, Value

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
