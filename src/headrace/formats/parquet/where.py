"""Compares predicates with bounds of row groups and pages, to skip those without kept rows.

A bound of uncertain meaning is ignored: the rows are read, and the predicate is evaluated on each.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
import numpy as np

from headrace.formats.arrow_values import library
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import ColumnChunk, FileEnd, Footer, Group, ParquetColumn, Value
from headrace.formats.parquet.pages import SMALL_BYTES, PageBounds, PageIndex, Run, page_bounds, page_index
from headrace.formats.predicates import NONE, Term, Where, as_float, check_kinds, microseconds_of

_UNIT_US = {"ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}  # a unit in microseconds
_NOT = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "in": "not in", "not in": "in"}

Reads = Callable[[bytes], Any]
"""Parses the bytes of a bound into a comparable value. May raise, or return None."""


class Comparison(NamedTuple):
    """How the bounds of a column are compared. `bound` parses a bound; None: they are ignored.

    `has_nan` is True if rows may have values outside of the bounds.
    """

    bound: Reads | None = None
    of_value: Callable[[Any], Any] = lambda value: value
    has_nan: bool = False


class Question(NamedTuple):
    """A term of a predicate for the bounds of a leaf. Its values ascend."""

    op: str
    leaf: int
    column: Comparison
    values: Sequence[Any]


class Asking(NamedTuple):
    """A predicate, or its remaining alternatives, and the questions of each term."""

    where: Where
    questions: Sequence[Sequence[Question]]

    def only(self, kept: Sequence[bool]) -> Asking:
        return Asking(tuple(compress(self.where, kept)), list(compress(self.questions, kept)))


def asked_of(where: Where, columns: Sequence[ParquetColumn]) -> Asking:
    """Return `where` with the questions of each term. Incomparable columns raise an OptionError."""
    by_name = {column.name: column for column in columns}
    check_kinds(where, {name: column.type for name, column in by_name.items()})
    ways = {term.column: _comparison(by_name[term.column]) for some in where for term in some}

    def question(term: Term) -> Question:
        way = ways[term.column]
        values = sorted(map(way.of_value, term.values))
        return Question(term.op, by_name[term.column].leaves[0].number, way, values)

    return Asking(where, [list(map(question, some)) for some in where])


def left_of(asked: Asking, group: Group) -> Asking:
    """Return the predicate that remains after a group's statistics. `NONE` if no row is kept."""
    if not group.rows:
        return Asking(NONE, ())
    return asked.only([all(_may_hold_in_group(one, group) for one in these) for these in asked.questions])


def is_decided(asked: Asking, group: Group) -> bool:
    """True if a group's statistics show that all of its rows are kept."""

    def must_hold(one: Question) -> bool:
        chunk = group.chunks[one.leaf]
        can_tell = chunk.statistics[2] == 0 and not one.column.has_nan
        return can_tell and not _may_hold_in_group(one._replace(op=_NOT[one.op]), group)

    return any(all(map(must_hold, these)) for these in asked.questions)


def pages_left(asked: Question, bounds: PageBounds) -> list[bool]:
    """Return a mask of the pages that may have a row for which the term holds."""
    return [_may_hold(asked, *said) for said in zip(*bounds, strict=True)]


def _may_hold_in_group(asked: Question, group: Group) -> bool:
    chunk = group.chunks[asked.leaf]
    return _may_hold(asked, *chunk.statistics, chunk.statistics[2] == chunk.values)


def _may_hold(asked: Question, low: Any, high: Any, missing: int | None, are_missing: bool) -> bool:
    op, column, values = asked.op, asked.column, asked.values
    if are_missing:
        return op == "not in"
    low, high = _bound(column, low), _bound(column, high)
    if low is None or high is None or low > high:
        return True
    value, least = values[0], bisect.bisect_left(values, low)  # the first value that is not below the bounds
    is_one = low == high and not column.has_nan and type(low) is not bytes  # bounds of bytes may be truncated
    match op:
        case "==" | "in":
            return least < len(values) and bool(values[least] <= high)
        case "<":
            return bool(low < value)
        case "<=":
            return bool(low <= value)
        case ">":
            return bool(high > value)
        case ">=":
            return bool(high >= value)
        case "!=":
            return not (is_one and low == value)
        case _:
            return not (is_one and missing == 0 and least < len(values) and low == values[least])


def _bound(column: Comparison, said: Value | None) -> Any:
    if column.bound is None or type(said) is not bytes:
        return None
    try:
        return column.bound(said)
    except (struct.error, ValueError):
        return None


def _comparison(column: ParquetColumn) -> Comparison:
    """Return how the bounds of a column are compared. `check_kinds` has accepted its type."""
    types, kind, physical = library().types, column.type, column.leaves[0].physical
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    if types.is_boolean(kind):
        return Comparison({b"\0": False, b"\1": True}.get)
    if types.is_float32(kind) or types.is_float64(kind):
        reads = struct.Struct("<f" if physical == "FLOAT" else "<d")
        return Comparison(lambda data: _no_nan(reads.unpack(data)[0]), as_float, has_nan=True)
    if types.is_string(kind) or types.is_large_string(kind):
        return Comparison(bytes, lambda text: text.encode("utf-8", "surrogatepass"))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Comparison(bytes)
    if physical not in ("INT32", "INT64") or types.is_decimal(kind) or len(column.leaves) != 1:
        return Comparison()
    integer = struct.Struct("<" + ("i" if physical == "INT32" else "q"))
    if types.is_unsigned_integer(kind):
        integer = struct.Struct(integer.format.upper())
    if types.is_timestamp(kind):
        times, parts = _UNIT_US.get(kind.unit, (0, 1))
        if not times:
            return Comparison()
        return Comparison(lambda data: integer.unpack(data)[0] * times, lambda time: microseconds_of(time) * parts)
    if types.is_date32(kind):
        return Comparison(lambda data: integer.unpack(data)[0], lambda day: day.toordinal() - _EPOCH)
    return Comparison(lambda data: integer.unpack(data)[0])


_EPOCH = 719163  # 1970-01-01


def _no_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


T = TypeVar("T")

_QUICK_BYTES = 16 * 1024  # of Thrift; parsing these takes some milliseconds


class Left(NamedTuple):
    """The remaining predicate of a row group, and the rows to read."""

    asked: Asking
    runs: tuple[Run, ...]


async def pruned(
    end: FileEnd, footer: Footer, asked: Sequence[Asking], limits: Limits, indexes: dict[int, PageIndex]
) -> list[Left]:
    """Return the remaining rows of each group.

    Args:
        asked: The predicate of each group, after its statistics were used.
        indexes: Receives the page indexes that were read, by the start of their chunk.
    """
    left = [Left(one, ((0, group.rows),)) for one, group in zip(asked, footer.groups, strict=True)]
    open_groups = [k for k, group in enumerate(footer.groups) if group.rows and not is_decided(asked[k], group)]
    with_bounds = {
        k: [
            chunk for leaf in leaves if (chunk := footer.groups[k].chunks[leaf]).page_index[1] and chunk.bounds_index[1]
        ]
        for k in open_groups
        if (leaves := {one.leaf for these in asked[k].questions for one in these})
    }
    places = [
        place for chunks in with_bounds.values() for one in chunks for place in (one.page_index, one.bounds_index)
    ]
    places += [
        chunk.page_index
        for k, chunks in with_bounds.items()
        if chunks
        for chunk in footer.groups[k].chunks.values()
        if _has_index(chunk)
    ]
    nbytes = sum(size for _, size in places)
    if not 0 < nbytes <= limits.unpacked_free_bytes:
        return left
    await end.read(places)

    def prune() -> None:
        for k, chunks in with_bounds.items():
            left[k] = _pruned(end, footer, k, chunks, asked[k], indexes)

    await quickly(prune, nbytes)
    return left


async def page_indexes(
    chunks: Sequence[ColumnChunk], rows: int, read: Callable[[int, int], Awaitable[bytes]]
) -> dict[int, PageIndex]:
    """Return the undamaged page indexes of chunks, by the start of the chunk."""
    wanted = [chunk for chunk in chunks if _has_index(chunk)]
    bodies = await asyncio.gather(*(read(at, at + size) for at, size in (chunk.page_index for chunk in wanted)))
    found = {}
    for chunk, body in zip(wanted, bodies, strict=True):
        with suppress(ValueError):
            found[chunk.start] = page_index(body, chunk, rows)
    return found


async def quickly(compute: Callable[[], T], nbytes: int) -> T:
    """Call `compute`, in a thread if `nbytes` of Thrift take long to parse."""
    return compute() if nbytes <= _QUICK_BYTES else await anyio.to_thread.run_sync(compute)


def _has_index(chunk: ColumnChunk) -> bool:
    return chunk.page_index[1] > 0 and chunk.size > SMALL_BYTES


def _pruned(
    end: FileEnd,
    footer: Footer,
    number: int,
    asked_chunks: Sequence[ColumnChunk],
    asked: Asking,
    indexes: dict[int, PageIndex],
) -> Left:
    group, bounds = footer.groups[number], {}
    for chunk in asked_chunks:
        with suppress(ValueError):
            index = page_index(end.at(*chunk.page_index), chunk, group.rows)
            bounds[chunk.start] = page_bounds(end.at(*chunk.bounds_index), chunk, index)
            indexes[chunk.start] = index
    masks = []
    for these in asked.questions:
        mask = np.ones(group.rows, np.bool_)
        for one in these:
            start = group.chunks[one.leaf].start
            if start in bounds:
                mask &= np.repeat(pages_left(one, bounds[start]), np.diff([*indexes[start].rows, group.rows]))
        masks.append(mask)
    kept = np.logical_or.reduce(masks)
    if kept.all():
        return Left(asked, ((0, group.rows),))
    for chunk in group.chunks.values():
        if _has_index(chunk) and chunk.start not in indexes:
            with suppress(ValueError):
                indexes[chunk.start] = page_index(end.at(*chunk.page_index), chunk, group.rows)
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
    return Left(asked.only([bool(mask.any()) for mask in masks]), tuple(zip(edges[::2], edges[1::2], strict=True)))
