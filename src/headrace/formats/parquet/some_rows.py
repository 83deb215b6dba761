"""One row of a group, by the pages that hold it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.formats.arrow_predicates import kept_rows
from headrace.formats.arrow_values import Arrow, TableRows, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import ColumnBytes, decoded
from headrace.formats.parquet.footer import ColumnChunk
from headrace.formats.parquet.pages import PageIndex, page_index, span
from headrace.formats.parquet.schema import ParquetColumn, Schema
from headrace.formats.predicates import ALL, Where, columns_of
from headrace.rows import Rows

SMALL_BYTES = 32 * 1024
"""What has no more bytes is read whole: to learn where its pages are would cost as much."""

Piece = tuple[int, int]
"""Where bytes begin in the file, and how many they are."""


class ColumnPages(NamedTuple):
    """The pages of a column that hold a row.

    Attributes:
        row: the row's number in them.
        rows: how many rows they have.
        leaves: for each leaf what is known of it, and its pieces.
    """

    column: str
    row: int
    rows: int
    leaves: tuple[tuple[ColumnChunk, tuple[Piece, ...]], ...]


class OneRow(NamedTuple):
    """What a worker must know to make one sample.

    Attributes:
        where: what must hold for it.
    """

    schema: Schema
    parts: tuple[ColumnPages, ...]
    constants: tuple[tuple[str, object], ...]
    where: Where = ALL


def part_of(
    column: ParquetColumn, chunks: Sequence[ColumnChunk], indexes: Sequence[PageIndex], row: int, rows: int
) -> ColumnPages:
    """The pages of a column that hold a row; all of them, where there is no index.

    Args:
        indexes: of each of its leaves; none: there is none.
        rows: of the group.
    """
    if not indexes:
        whole = tuple((chunk, ((chunk.start, chunk.size),)) for chunk in chunks)
        return ColumnPages(column.name, row, rows, whole)
    first, stop, pages = span(indexes, row, rows)
    leaves = []
    for chunk, index, (a, b) in zip(chunks, indexes, pages, strict=True):
        start, end = index.starts[a], index.stops[b - 1]
        dictionary = ((chunk.start, index.starts[0] - chunk.start),) if index.starts[0] > chunk.start and a else ()
        start = start if a else chunk.start
        leaves.append((chunk._replace(values=-1), (*dictionary, (start, end - start))))
    return ColumnPages(column.name, row - first, stop - first, tuple(leaves))


async def page_indexes(
    chunks: Sequence[ColumnChunk], rows: int, read: Callable[[int, int], asyncio.Future[bytes]]
) -> Mapping[int, PageIndex]:
    """The indexes of the pages of chunks, by where these begin, as far as there are any that are whole."""
    wanted = [chunk for chunk in chunks if chunk.page_index[1] and chunk.size > SMALL_BYTES]
    bodies = await asyncio.gather(*(read(at, at + size) for at, size in (chunk.page_index for chunk in wanted)))
    found = {}
    for chunk, body in zip(wanted, bodies, strict=True):
        try:
            found[chunk.start] = page_index(body, chunk, rows)
        except ValueError:
            continue  # the pages are read all the same, without it
    return found


def table_of(key: bytes, one: OneRow) -> Rows:
    """The table of one sample."""
    pieces = sorted({piece for part in one.parts for _, pieces in part.leaves for piece in pieces})
    none = np.zeros(1, np.int64)
    return Rows(
        np.array([key]),
        np.array([0, len(pieces)]),
        np.arange(len(pieces), dtype=np.int32),
        np.array([start for start, _ in pieces], np.int64),
        np.array([size for _, size in pieces], np.int64),
        tuple(f"{start}" for start, _ in pieces),
        block=none,
        row=none,
        about=(one,),
    )


def opened(
    one: OneRow, bodies: Mapping[str, bytes], limits: Limits, is_shown: Callable[[str], bool]
) -> dict[str, object] | None:
    """The sample; None where it is left out.

    Args:
        is_shown: whether a column is a field of samples.

    Raises:
        ValueError, LimitError: its pages are damaged.
    """
    asked = {
        part.column: _table(one, part, bodies, limits) for part in one.parts if part.column in columns_of(one.where)
    }
    if asked and not kept_rows(one.where, library().table({name: table.column(0) for name, table in asked.items()}))[0]:
        return None
    sample = {name: value for name, value in one.constants if is_shown(name)}
    for part in one.parts:
        if is_shown(part.column):
            table = asked[part.column] if part.column in asked else _table(one, part, bodies, limits)
            sample |= TableRows(table, one.schema.features, {})[0] or {}
    return sample


def _table(one: OneRow, part: ColumnPages, bodies: Mapping[str, bytes], limits: Limits) -> Arrow:
    """A column, with the row alone."""
    column = next(column for column in one.schema.columns if column.name == part.column)
    leaves = [(chunk, b"".join(bodies[f"{start}"] for start, _ in pieces)) for chunk, pieces in part.leaves]
    return decoded(one.schema, part.rows, [ColumnBytes(column, leaves)], limits).slice(part.row, 1)
