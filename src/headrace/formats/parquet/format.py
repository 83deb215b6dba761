"""The Parquet format: row groups are blocks; columns, or some of their pages, are members."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from headrace._util.pickled import packed_once
from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow, TableRows, arrow_errors, kind_of, library
from headrace.formats.format import Block, MemberRange, ShardEntry, keys_of, rows_of_blocks
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import (
    CODECS,
    END_BYTES,
    MAGIC,
    FileEnd,
    FileFacts,
    Footer,
    ParquetLeaf,
    opened_parquet,
    read_footer,
)
from headrace.formats.parquet.pages import FILLER_BYTES, ColumnPages, PageIndex, Run, check_pages, filler, pages_of
from headrace.formats.parquet.where import Asking, Left, asked_of, left_of, page_indexes, pruned, quickly
from headrace.formats.pinned_object import SeekableFile
from headrace.formats.predicates import ALL, NONE, Where, columns_of, kept_rows, known
from headrace.formats.tables import ListedTable, TableFormat, constants_of
from headrace.types import Buffer, Ints


class Parquet(TableFormat):
    """Parquet files. Each row is a sample.

    Args:
        columns: Columns to read. By default all columns whose names do not begin with "__".
        where: Predicate for the rows to keep, in the form of pyarrow's `filters=`: a list of (column, operator, value)
            that must all hold, or a list of alternative lists. Operators are "=", "==", "!=", "<", "<=", ">", ">=",
            "in" and "not in". A missing value only passes "not in". The columns need not be in `columns`. Folders named
            "key=value" are columns, too. Values of folders exclude whole files, statistics in footers exclude row
            groups, and page indexes exclude pages. The predicate is evaluated on all other rows, as by `.filter()`.

    Raises:
        OptionError: `columns` or `where` is invalid.

    Examples:
        >>> data = hr.stream("s3://bucket/{00..99}.parquet", format=hr.Parquet(columns=["text", "label"]))
        >>> some = hr.Parquet(where=[("lang", "in", ["en", "de"]), ("score", ">", 0.5)])
    """

    name = "parquet"
    suffixes = (".parquet", ".parq", ".pq")

    def sniff(self, name: str, head: bytes) -> float:
        return 1.0 if head.startswith(MAGIC) else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:
        return 1.0 if tail.endswith(MAGIC) else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        with self.errors_named(shard.url):
            if self.is_left_out(shard.url):
                return ShardIndex(Rows.empty(), None, -1, None)
            end = await FileEnd.of(reads, shard)
            data = await end.footer(limits)
            footer, asked = await quickly(partial(self._read, data, shard, end.shard.size, limits), len(data))
            indexes = dict[int, PageIndex]()
            left = await pruned(end, footer, asked, limits, indexes)
            features = footer.file.features
        kinds = [(column.name, kind_of(column.type, features.get(column.name))) for column in footer.columns]
        kinds += [(name, "of the path") for name, _ in footer.file.constants]
        rows, opened_bytes = _rows(footer, left, indexes)
        return ShardIndex(
            rows,
            None,
            end.shard.size,
            end.shard.etag,
            None,
            opened_bytes,
            tuple(sorted(kinds)),
            kept={_FOOTER: footer, **indexes},
        )

    async def single(
        self, reads: Reads, url: str, shard: ShardIndex, row: int, wanted: Sequence[frozenset[str]] | None
    ) -> Rows | None:
        rows = shard.rows
        if rows.block is None or rows.row is None or rows.about is None:
            return None
        facts: GroupFacts = rows.about[rows.block[row]]
        footer: Footer = shard.kept[_FOOTER]
        group = footer.groups[facts.number]
        have = {column.name for column in footer.columns} | {name for name, _ in footer.file.constants}
        if wanted is not None and any(one.isdisjoint(have) for one in wanted):
            return None  # the general path reports the available fields
        names = have if wanted is None else frozenset[str]().union(*wanted)
        columns = [column for column in footer.columns if column.name in names]
        chunks = [group.chunks[leaf.number] for column in columns for leaf in column.leaves]
        version = Version(shard.size, shard.etag)
        known = await page_indexes(
            [chunk for chunk in chunks if chunk.start not in shard.kept],
            group.rows,
            lambda start, stop: reads.read(url, start, stop, version=version),
        )
        shard.kept.update(known)
        number = int(facts.numbers[rows.row[row]])
        runs = ((number, number + 1),)
        only = facts._replace(runs=runs, columns=pages_of(columns, group, shard.kept, runs))
        members = [member for member in only.members if member[2] in names]
        return rows_of_blocks(rows.keys[row : row + 1], [1], [members], [only])

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        facts: GroupFacts = block.about
        given = facts.bodies(block.members, bodies)
        constants = {name: value for name, value in facts.file.constants if name in given and self.is_shown(name)}
        asked, parts = columns_of(facts.where), [part for part in facts.columns if part.column in given]
        columns = decoded(facts, [part for part in parts if part.column in asked], given, block.limits)
        kept = None if facts.where == ALL else kept_rows(facts.where, library().table(columns))
        if kept is not None and not kept.any():
            return [None] * facts.total
        rest = [part for part in parts if part.column not in asked and self.is_shown(part.column)]
        columns |= decoded(facts, rest, given, block.limits)
        shown = {part.column: columns[part.column] for part in parts if self.is_shown(part.column)}
        if not shown:
            return [constants if kept is None or kept[k] else None for k in range(facts.total)]
        return TableRows(library().table(shown), facts.file.features, constants, kept)

    def _read(self, data: bytes, shard: ShardEntry, size: int, limits: Limits) -> tuple[Footer, list[Asking]]:
        """Parse the footer `data`. Return it with the remaining predicate of each row group."""
        constants = constants_of(shard.url)

        def chosen(names: Sequence[str]) -> list[str]:
            self.check_columns(names, constants)
            return [name for name in names if self.is_read(name)]

        more = {name: value for name, value in constants.items() if self.is_read(name)}
        footer = read_footer(data, size - len(data) - END_BYTES, chosen, more, limits)
        said: ListedTable | None = shard.about
        if said is not None:
            said.check(sum(group.rows for group in footer.groups), size)
        asked = asked_of(known(self.where, constants), footer.columns)
        return footer, [left_of(asked, group) for group in footer.groups]


PARQUET = Parquet()

_FOOTER = -1
"""Key of the footer in `ShardIndex.kept`. The other keys are starts of chunks and map to their page indexes."""


def _rows(footer: Footer, left: Sequence[Left], indexes: Mapping[int, PageIndex]) -> tuple[Rows, int]:
    """Return the table of remaining samples, and the approximate decoded bytes of all groups."""
    found, keys, first, opened_bytes = [], [np.zeros(0, np.int64)], 0, 0
    for number, (group, (asked, runs)) in enumerate(zip(footer.groups, left, strict=True)):
        if group.rows and asked.where != NONE:
            pages = pages_of(footer.columns, group, indexes, runs)
            facts = GroupFacts(footer.file, number, group.raw, runs, pages, asked.where)
            found.append(facts)
            keys.append(first + facts.numbers)
            opened_bytes += sum(chunk.unpacked for chunk in group.chunks.values()) * facts.total // group.rows
        first += group.rows
    members, counts = [facts.members for facts in found], [facts.total for facts in found]
    return rows_of_blocks(keys_of(np.concatenate(keys)), counts, members, found), opened_bytes


_FILLER_MOST = 2**30
_TAIL_BYTES = 64 * 1024
_TAIL_AT = 2**62  # beyond the columns of any file


@packed_once(tuple)
class GroupFacts(NamedTuple):
    """Metadata that a worker needs to decode a row group.

    Attributes:
        raw: The group's footer entry, with the columns that are read.
        runs: The rows that are read.
        where: The remaining predicate.
    """

    file: FileFacts
    number: int
    raw: bytes
    runs: tuple[Run, ...]
    columns: tuple[ColumnPages, ...]
    where: Where = ALL

    @property
    def total(self) -> int:
        return sum(stop - first for first, stop in self.runs)

    @property
    def numbers(self) -> Ints:
        """Numbers in the group of the rows that are read."""
        return np.concatenate([np.arange(first, stop) for first, stop in self.runs])

    @property
    def members(self) -> list[MemberRange]:
        """The byte ranges to read, in order.

        The first bytes of the file are read with the column that follows them, so that checking them needs no request.
        """
        pieces = [(start, start + size, part.column) for part in self.columns for start, size in part.pieces]
        places = [(0 if start == len(MAGIC) else start, stop, name) for start, stop, name in pieces]
        begin = min((start for start, _, _ in places), default=0)
        places += [(begin, begin, name) for name, _ in self.file.constants]
        return sorted((start, stop - start, name) for start, stop, name in places)

    def bodies(self, names: Sequence[str], bodies: Sequence[bytes]) -> Mapping[str, Sequence[bytes]]:
        """Return the pieces of each column, in file order. Checks the magic (ValueError)."""
        given: dict[str, list[bytes]] = {}
        for name, body in zip(names, bodies, strict=True):
            given.setdefault(name, []).append(body)
        first = next((name for start, size, name in self.members if not start and size), None)
        if first in given:
            head, given[first][0] = given[first][0][: len(MAGIC)], given[first][0][len(MAGIC) :]
            if head != MAGIC:
                raise ValueError(f"the file begins with {head!r}, and not as Parquet does")
        return given


def decoded(
    facts: GroupFacts, parts: Sequence[ColumnPages], bodies: Mapping[str, Sequence[bytes]], limits: Limits
) -> dict[str, Arrow]:
    """Decode the rows `facts.runs` of some columns. `bodies` are their pieces, in file order."""
    if not parts:
        return {}
    chunks, dictionaries, together = dict[int, Buffer](), list[str](), dict[tuple[Run, ...], list[ColumnPages]]()
    for part in parts:
        own = dict(zip(part.pieces, bodies[part.column], strict=True))
        if [size for _, size in own] != list(map(len, own.values())):
            raise ValueError(f"column {part.column!r:.200} has other bytes than its pages have")
        for one in part.leaves:
            data = b"".join(own[piece] for piece in one.pieces)
            try:
                pages = check_pages(data, one.leaf, CODECS[one.codec], limits)
                if one.values not in (-1, pages.values):
                    raise ValueError(f"its pages have {pages.values} values, and the footer has {one.values}")
                chunks[one.start] = _padded(data, one.size)
            except LimitError as error:
                raise LimitError(f"column {part.column!r:.200}: {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"column {part.column!r:.200}: {error}") from None
            if pages.as_dictionary:
                dictionaries.append(one.leaf.path)
        together.setdefault(part.runs, []).append(part)
    columns: dict[str, Arrow] = {}
    footer = facts.file.footer(facts.raw)
    file = opened_parquet(ChunkFile(chunks, footer), pre_buffer=False, read_dictionary=dictionaries)
    for runs, some in together.items():
        leaves = [one.leaf for part in some for one in part.leaves]
        table = _read(file, leaves, runs)
        if any(leaf.physical == "INT96" for leaf in leaves):
            coarse = _read(
                opened_parquet(ChunkFile(chunks, footer), pre_buffer=False, coerce_int96_timestamp_unit="us"),
                leaves,
                runs,
            )
            for at, part in enumerate(some):
                if any(one.leaf.physical == "INT96" for one in part.leaves):
                    column = _without_wrap(table.column(at), coarse.column(at))
                    table = table.set_column(at, part.column, column)
        chosen = _of_runs(table, runs, facts.runs)
        columns.update(zip(chosen.column_names, chosen.columns, strict=True))
    return columns


class ChunkFile(SeekableFile):
    """A file of some column chunks, by offset, and a footer. All other reads raise a ValueError."""

    def __init__(self, chunks: Mapping[int, Buffer], footer: bytes) -> None:
        self._chunks, self._tail = chunks, bytes(_TAIL_BYTES) + footer  # pyarrow reads so many bytes to find the footer
        super().__init__(_TAIL_AT + len(self._tail))

    def read(self, size: int = -1) -> Buffer:
        at, self._at = self._at, self._at + size
        if at >= _TAIL_AT:
            return self._tail[at - _TAIL_AT :][:size]
        chunk = self._chunks.get(at, b"")
        if len(chunk) != size:
            raise ValueError(f"pyarrow asks for {size} bytes at {at}, which are no column chunk that was read")
        return chunk


def _padded(data: bytes, size: int) -> Buffer:
    """Return pages as a chunk of `size` bytes. Readers skip the zeros that replace other pages."""
    missing = size - len(data)
    if not missing:
        return data
    if missing < FILLER_BYTES:
        raise ValueError(f"its pages omit {missing} bytes, which is less than a page has")
    whole, at = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), len(data)  # zeros, not yet backed by memory
    whole[:at] = data
    while at < size:
        nbytes = size - at if size - at <= _FILLER_MOST else _FILLER_MOST - FILLER_BYTES
        head = filler(nbytes)
        whole[at : at + len(head)] = head
        at += nbytes
    return memoryview(whole)


def _read(file: Arrow, leaves: Sequence[ParquetLeaf], runs: Sequence[Run]) -> Arrow:
    rows = sum(stop - first for first, stop in runs)
    with arrow_errors():
        table = file.reader.read_row_group(0, column_indices=[leaf.position for leaf in leaves], use_threads=False)
    if any(len(column) != rows for column in table.columns):
        raise ValueError(
            f"its columns have {[len(column) for column in table.columns][:9]} rows, and should have {rows}"
        )
    return table


def _of_runs(table: Arrow, have: Sequence[Run], wanted: Sequence[Run]) -> Arrow:
    if have == wanted:
        return table
    parts, at, k = [], 0, 0
    for first, stop in wanted:
        while have[k][1] < stop:
            at += have[k][1] - have[k][0]
            k += 1
        parts.append(table.slice(at + first - have[k][0], stop - first))
    return parts[0] if len(parts) == 1 else library().concat_tables(parts)


def _without_wrap(fine: Arrow, coarse: Arrow) -> Arrow:
    """Return INT96 timestamps in nanoseconds if all fit into int64, else in microseconds.

    pyarrow silently wraps nanoseconds outside of 1677-2262. Spark writes such timestamps, with microseconds.
    """
    pa = library()
    try:
        coarse.cast(fine.type)
    except pa.ArrowInvalid:
        if not coarse.cast(fine.type, safe=False).equals(fine):  # wraps in the same way if no nanoseconds are lost
            raise ValueError(
                "an INT96 column has timestamps outside of 1677-2262, and others with nanoseconds: no unit holds both"
            ) from None
        return coarse
    return fine
