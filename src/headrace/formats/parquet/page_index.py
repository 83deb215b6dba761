"""The indexes of a column's pages: where they lie, which rows they have, and what is the lowest value of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from headrace.formats.parquet.footer import ColumnChunk
from headrace.formats.parquet.thrift import Struct, ThriftReader, Value

Run = tuple[int, int]
"""Some rows of a group: the first, and the one behind the last."""


class PageIndex(NamedTuple):
    """Where the pages of a column lie, in the file, and the first row of each."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rows: tuple[int, ...]


class PageBounds(NamedTuple):
    """What is known of the values of each page.

    Attributes:
        lows, highs: no value is lower, or higher; None: that is not known. Of text and bytes they may be cut off.
        missing: how many values are missing; None: that is not known.
        are_missing: whether all are.
    """

    lows: tuple[bytes | None, ...]
    highs: tuple[bytes | None, ...]
    missing: tuple[int | None, ...]
    are_missing: tuple[bool, ...]


def page_index(data: bytes, chunk: ColumnChunk, rows: int) -> PageIndex:
    """What the index of a column's pages says.

    Raises:
        ValueError: it is damaged.
    """
    pages = ThriftReader(data).struct().get(1)
    if type(pages) is not list or not pages:
        raise ValueError("it has no pages")
    starts, stops, first = [], [], []
    for page in pages:
        if type(page) is not dict:
            raise ValueError("a page is none")
        starts.append(_number(page, 1))
        stops.append(starts[-1] + _number(page, 2))
        first.append(_number(page, 3))
    if first[0] or any(b <= a for a, b in pairwise([*first, rows])):
        raise ValueError("its rows do not ascend")
    places = [chunk.start, *(edge for pair in zip(starts, stops, strict=True) for edge in pair)]
    if any(b < a for a, b in pairwise([*places, chunk.start + chunk.size])):
        raise ValueError("its pages do not lie in their column")
    return PageIndex(tuple(starts), tuple(stops), tuple(first))


def page_bounds(data: bytes, chunk: ColumnChunk, index: PageIndex) -> PageBounds:
    """What the index of the values of a column's pages says.

    Args:
        index: of its pages.

    Raises:
        ValueError: it is damaged.
    """
    said, count = ThriftReader(data).struct(), len(index.rows)
    empty, lows, highs, missing = (_list(said, field, count) for field in (1, 2, 3, 5))
    if None in (empty, lows, highs):
        raise ValueError("it does not say what the bounds of its pages are")
    known = [n for n in missing or () if type(n) is int and n >= 0]
    if missing is not None and (len(known) < count or chunk.statistics[2] not in (None, sum(known))):
        raise ValueError("its pages miss other values than the column does")
    return PageBounds(
        tuple(low if type(low) is bytes else None for low in lows or ()),
        tuple(
            high if type(high) is bytes and high else None for high in highs or ()
        ),  # no bytes may stand for no bound
        tuple(known) if known else (None,) * count,
        tuple(one is True for one in empty or ()),
    )


def _list(said: Struct, field: int, count: int) -> list[Value] | None:
    """What is said of so many pages; None: nothing is."""
    found = said.get(field)
    if found is not None and (type(found) is not list or len(found) != count):
        raise ValueError(f"it does not speak of {count} pages")
    return found


def covering(indexes: Sequence[PageIndex], runs: Sequence[Run], rows: int) -> tuple[tuple[Run, ...], list[list[Run]]]:
    """The pages that hold some rows, of several leaves of one column, so that those of each have the same rows.

    Args:
        rows: of the group.

    Returns:
        The rows of these pages, and for each leaf its pages: the first, and the one behind the last, of each stretch.
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
    """The same in ascending order, where those that touch are one."""
    found: list[Run] = []
    for first, stop in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)


def _number(page: Struct, field: int) -> int:
    value = page.get(field, -1)
    if type(value) is not int or value < 0:
        raise ValueError("a page does not say where it lies")
    return value
