"""Some rows of a group, by the pages that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.formats.arrow_predicates import kept_rows
from headrace.formats.arrow_values import Arrow, TableRows, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import ColumnBytes, decoded
from headrace.formats.parquet.footer import ColumnChunk
from headrace.formats.parquet.page_index import PageIndex, Run, covering
from headrace.formats.parquet.schema import ParquetColumn, Schema
from headrace.formats.predicates import ALL, Where, columns_of

SMALL_BYTES = 32 * 1024
"""What has no more bytes is read whole: to learn where its pages are would cost as much."""

Piece = tuple[int, int]
"""Where bytes begin in the file, and how many they are."""


class ColumnPages(NamedTuple):
    """The pages of a column that hold some rows.

    Attributes:
        column: its name.
        runs: the rows that they have.
        leaves: for each leaf what is known of it, and its pieces.
    """

    column: str
    runs: tuple[Run, ...]
    leaves: tuple[tuple[ColumnChunk, tuple[Piece, ...]], ...]

    @property
    def pieces(self) -> list[Piece]:
        """Those of all leaves, in the order of the file."""
        return sorted(piece for _, pieces in self.leaves for piece in pieces)


class SomeRows(NamedTuple):
    """Some rows of a group, ascending, and the pages of its columns that hold them."""

    runs: tuple[Run, ...]
    parts: tuple[ColumnPages, ...]

    @staticmethod
    def of(
        columns: Iterable[tuple[ParquetColumn, Sequence[ColumnChunk]]],
        indexes: Mapping[int, PageIndex],
        runs: tuple[Run, ...],
        rows: int,
    ) -> SomeRows:
        """The rows `runs` of some columns of a group that has so many rows.

        Args:
            columns: with their chunks.
            indexes: of chunks, by where these begin.
        """
        return SomeRows(runs, tuple(_part_of(column, own, indexes, runs, rows) for column, own in columns))

    @property
    def total(self) -> int:
        """How many rows they are."""
        return _count(self.runs)

    def number(self, row: int) -> int:
        """The number in the group of one of them."""
        for first, stop in self.runs:
            if row < stop - first:
                return first + row
            row -= stop - first
        raise IndexError("there are fewer rows")


def _part_of(
    column: ParquetColumn,
    chunks: Sequence[ColumnChunk],
    indexes: Mapping[int, PageIndex],
    runs: Sequence[Run],
    rows: int,
) -> ColumnPages:
    """The pages of a column that hold some rows; all of them, where not all its leaves have an index.

    Args:
        indexes: of leaves, by where these begin.
        rows: of the group.
    """
    own = [indexes[chunk.start] for chunk in chunks if chunk.start in indexes]
    if len(own) < len(chunks):
        whole = tuple((chunk, ((chunk.start, chunk.size),)) for chunk in chunks)
        return ColumnPages(column.name, ((0, rows),), whole)
    found, pages = covering(own, runs, rows)
    leaves = []
    for chunk, index, stretches in zip(chunks, own, pages, strict=True):
        first = index.starts[0]
        pieces = [(chunk.start, first - chunk.start)] if first > chunk.start else []  # the dictionary
        for a, b in stretches:
            start, stop = index.starts[a], index.stops[b - 1]
            if pieces and sum(pieces[-1]) == start:
                start = pieces.pop()[0]
            pieces.append((start, stop - start))
        values = _count(found) if len(column.elements) == 1 else -1
        leaves.append((chunk._replace(values=values), tuple(pieces)))
    return ColumnPages(column.name, found, tuple(leaves))


def opened(
    schema: Schema,
    where: Where,
    some: SomeRows,
    bodies: Mapping[str, Sequence[bytes]],
    limits: Limits,
    constants: Mapping[str, object],
    is_shown: Callable[[str], bool],
) -> Sequence[Mapping[str, object] | None]:
    """The samples; None in the places of those that are left out. Columns that are asked are decoded first.

    Args:
        where: what must hold for those that are kept.
        bodies: of each column its pieces, in the order of the file; those that are not wanted are not there.
        constants: fields that are the same in all rows.
        is_shown: whether a column is a field of samples.

    Raises:
        ValueError, LimitError: their pages are damaged.
    """
    asked = columns_of(where)
    given = [part for part in some.parts if part.column in bodies]
    columns = _decoded(schema, some.runs, [part for part in given if part.column in asked], bodies, limits)
    kept = None if where == ALL else kept_rows(where, library().table(columns))
    if kept is not None and not kept.any():
        return [None] * some.total
    rest = [part for part in given if part.column not in asked and is_shown(part.column)]
    columns |= _decoded(schema, some.runs, rest, bodies, limits)
    shown = [part.column for part in given if is_shown(part.column)]
    if not shown:
        return [constants if kept is None or kept[k] else None for k in range(some.total)]
    return TableRows(library().table({name: columns[name] for name in shown}), schema.features, constants, kept)


def _decoded(
    schema: Schema,
    runs: Sequence[Run],
    parts: Sequence[ColumnPages],
    bodies: Mapping[str, Sequence[bytes]],
    limits: Limits,
) -> dict[str, Arrow]:
    """The rows `runs` of columns; those whose pages have the same rows are decoded together."""
    by_name = {column.name: column for column in schema.columns}
    together: dict[tuple[tuple[Run, ...], str], list[ColumnBytes]] = {}
    for part in parts:
        column, pieces = by_name[part.column], part.pieces
        own = bodies[part.column]
        if [size for _, size in pieces] != list(map(len, own)):
            raise ValueError(f"column {part.column!r:.200} has other bytes than its pages have")
        body_of = dict(zip(pieces, own, strict=True))
        leaves = [(chunk, b"".join(body_of[piece] for piece in some)) for chunk, some in part.leaves]
        alone = "" if len(column.elements) == 1 else part.column
        together.setdefault((part.runs, alone), []).append(ColumnBytes(column, leaves))
    columns: dict[str, Arrow] = {}
    for (own_runs, alone), some in together.items():
        table = decoded(schema, _count(own_runs), some, limits, is_counted=bool(alone))
        chosen = _of_runs(table, own_runs, runs)
        columns.update(zip(chosen.column_names, chosen.columns, strict=True))
    return columns


def _of_runs(table: Arrow, have: Sequence[Run], wanted: Sequence[Run]) -> Arrow:
    """The rows `wanted` of a table that has the rows `have`."""
    parts, at, k = [], 0, 0
    for first, stop in wanted:
        while have[k][1] < stop:
            at += have[k][1] - have[k][0]
            k += 1
        parts.append(table.slice(at + first - have[k][0], stop - first))
    return parts[0] if len(parts) == 1 else library().concat_tables(parts)


def _count(runs: Sequence[Run]) -> int:
    return sum(stop - first for first, stop in runs)
