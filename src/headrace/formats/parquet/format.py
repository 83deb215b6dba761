"""Parquet as a format: groups of rows are blocks, columns their members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.arrow_predicates import kept_rows
from headrace.formats.arrow_values import TableRows
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import ColumnBytes, decoded
from headrace.formats.parquet.footer import ENCRYPTED, END_BYTES, MAGIC, ColumnChunk, Footer, read_footer
from headrace.formats.parquet.pages import PageIndex
from headrace.formats.parquet.schema import ParquetColumn, Schema
from headrace.formats.parquet.single import OneRow, opened, page_indexes, part_of, table_of
from headrace.formats.parquet.where import left_of, questions
from headrace.formats.predicates import ALL, NONE, Where, known
from headrace.formats.tables import ListedTable, TableFormat, constants_of
from headrace.protocols import Reads, Span, Version
from headrace.rows import Rows

TAIL_BYTES = 64 * 1024
_QUICK_BYTES = 16 * 1024  # of a footer, which is read in some milliseconds


class Facts(NamedTuple):
    """What a worker must know of a group of rows.

    Attributes:
        chunks: of all leaves of the schema's columns, in order.
        where: what must hold for rows that are kept.
    """

    schema: Schema
    rows: int
    chunks: tuple[ColumnChunk, ...]
    where: Where = ALL


class Parquet(TableFormat):
    """Files of Parquet; their samples are rows.

    Args:
        columns: those that are read; by default all whose names do not begin with "__".
        where: which rows are kept, as pyarrow's `filters=` says it: a list of (column, operator, value), all of which
            must hold, or a list of such lists, one of which must. Operators are "=", "==", "!=", "<", "<=", ">", ">=",
            "in" and "not in"; a missing value is kept by "not in" alone. Columns need not be among `columns`; folders
            named "key=value" are columns, too. What folders say leaves out files unread, what statistics in footers
            say groups of rows; the other rows are asked themselves, as by `.filter()`.

    Raises:
        OptionError: `columns`, or `where`, is no such list.

    Examples:
        >>> import headrace as hr
        >>> data = hr.stream("s3://bucket/{00..99}.parquet", format=hr.Parquet(columns=["text", "label"]))
        >>> some = hr.Parquet(where=[("lang", "in", ["en", "de"]), ("score", ">", 0.5)])
    """

    name = "parquet"
    suffixes = (".parquet", ".parq", ".pq")

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 1.0 if head.startswith(MAGIC) else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:  # noqa: ARG002
        return 1.0 if tail.endswith(MAGIC) else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        url = shard.url
        try:
            if self.is_left_out(url):
                return ShardIndex(Rows.empty(), None, -1, None)
            tail, span = await _end(reads, shard)
            size = span.size
            is_short = size < len(MAGIC) + END_BYTES
            if is_short or (len(tail) == size and tail[: len(MAGIC)] not in (MAGIC, ENCRYPTED)):
                raise ValueError(f"it has {size} bytes, which do not begin as Parquet does")
            length = int.from_bytes(tail[-END_BYTES:-4], "little")
            if tail[-4:] == ENCRYPTED:
                raise ValueError("its footer is encrypted, and headrace has no keys: decrypt it first")
            if tail[-4:] != MAGIC:
                raise ValueError("it does not end as Parquet does: it is cut off, or was not written to its end")
            if length + END_BYTES + len(MAGIC) > size:
                raise ValueError(f"its footer would have {length} bytes, and all of it has {size}")
            if length > limits.unpacked_free_bytes:
                raise LimitError(f"its footer has {length} bytes, over the limit of {limits.unpacked_free_bytes}")
            missing = length + END_BYTES - len(tail)
            if missing > 0:
                tail = await _before(reads, url, size - len(tail), missing, span.etag) + tail
            data = tail[-END_BYTES - length : -END_BYTES]
            read = partial(self._index, data, shard, size, limits)
            rows, opened, columns = read() if length <= _QUICK_BYTES else await anyio.to_thread.run_sync(read)
        except LimitError as error:
            raise LimitError(f"{masked(url)}: {error.args[0]}", url=url) from None
        except ValueError as error:
            raise FormatError(f"{masked(url)} is damaged, or not read here: {error}", url=url) from None
        return ShardIndex(rows, None, size, span.etag, opened_bytes=opened, columns=columns)

    async def single(
        self, reads: Reads, url: str, shard: ShardIndex, row: int, wanted: Sequence[frozenset[str]] | None
    ) -> Rows | None:
        rows = shard.rows
        if rows.block is None or rows.row is None or rows.about is None:
            return None
        facts: Facts = rows.about[rows.block[row]]
        names = None if wanted is None else frozenset[str]().union(*wanted)
        some = [one for one in _columns(facts.schema, facts.chunks) if names is None or one[0].name in names]
        version = Version(shard.size, shard.etag)
        chunks = [chunk for _, chunks, _, _ in some for chunk in chunks]
        known = await page_indexes(
            [chunk for chunk in chunks if chunk.start not in shard.kept],
            facts.rows,
            lambda start, stop: asyncio.ensure_future(reads.read(url, start, stop, version=version)),
        )
        shard.kept.update(known)
        number = int(rows.row[row])
        parts = []
        for column, own, _, _ in some:
            indexes: list[PageIndex] = [shard.kept[chunk.start] for chunk in own if chunk.start in shard.kept]
            parts.append(part_of(column, own, indexes if len(indexes) == len(own) else [], number, facts.rows))
        constants = [(name, value) for name, value in facts.schema.constants if names is None or name in names]
        have = {part.column for part in parts} | {name for name, _ in constants}
        if wanted is not None and any(one.isdisjoint(have) for one in wanted):
            return None  # it will be said what it has
        return table_of(bytes(rows.keys[row]), OneRow(facts.schema, tuple(parts), tuple(constants), facts.where))

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        given = dict(zip(block.members, bodies, strict=True))
        if type(block.about) is OneRow:
            return [opened(block.about, given, block.limits, self.is_shown)]
        facts: Facts = block.about
        constants = {name: value for name, value in facts.schema.constants if name in given and self.is_shown(name)}
        found = [
            ColumnBytes(column, [(chunk, given[column.name][chunk.start - start :][: chunk.size]) for chunk in chunks])
            for column, chunks, start, _ in _columns(facts.schema, facts.chunks)
            if column.name in given
        ]
        if not found:
            return [constants] * facts.rows
        table = decoded(facts.schema, facts.rows, found, block.limits)
        kept = None if facts.where == ALL else kept_rows(facts.where, table)
        table = table.select([name for name in table.column_names if self.is_shown(name)])
        return TableRows(table, facts.schema.features, constants, kept)

    def _index(
        self, data: bytes, shard: ShardEntry, size: int, limits: Limits
    ) -> tuple[Rows, int, tuple[tuple[str, str], ...]]:
        """(the table of samples, the bytes of all when opened, the columns) that the footer `data` tells."""
        constants = constants_of(shard.url)
        footer = read_footer(data, size - len(data) - END_BYTES, partial(self._chosen, constants), limits)
        said: ListedTable | None = shard.about
        if said is not None:
            said.check(sum(group.rows for group in footer.groups), size)
        own = {column.name for column in footer.schema.columns}
        more = tuple((name, value) for name, value in constants.items() if name not in own and self.is_read(name))
        schema = Schema(footer.schema.columns, footer.schema.arrow, footer.schema.writer, more)
        kinds = [(column.name, column.kind) for column in schema.columns] + [(name, "of the path") for name, _ in more]
        where = known(self.where, constants)
        asked = questions(where, schema.columns)
        left = [left_of(where, asked, group) if group.rows else NONE for group in footer.groups]
        opened = sum(
            chunk.unpacked for group, one in zip(footer.groups, left, strict=True) if one for chunk in group.chunks
        )
        return _rows(Footer(schema, footer.groups), left), opened, tuple(sorted(kinds))

    def _chosen(self, constants: Mapping[str, object], columns: Sequence[ParquetColumn]) -> list[ParquetColumn]:
        self.check_columns({column.name for column in columns}, constants)
        return [column for column in columns if self.is_read(column.name)]


PARQUET = Parquet()


async def _end(reads: Reads, shard: ShardEntry) -> tuple[bytes, Span]:
    """The last bytes of a file, of which its footer is a part, or all."""
    listed = None if shard.version is None else shard.version.size
    start = -TAIL_BYTES if listed is None else max(0, listed - TAIL_BYTES)
    room = memoryview(bytearray(TAIL_BYTES if listed is None else max(1, listed - start)))
    span = await reads.read_into(shard.url, start, room)
    if listed not in (None, span.size):  # whoever has listed it will be told
        room = memoryview(bytearray(TAIL_BYTES))
        span = await reads.read_into(shard.url, -TAIL_BYTES, room, etag=span.etag)
    if span.stop < span.size:
        raise ValueError(f"it ends at byte {span.stop} of {span.size}")
    return bytes(room[: span.stop - span.start]), span


async def _before(reads: Reads, url: str, stop: int, count: int, etag: str | None) -> bytes:
    """So many bytes before a place."""
    part = memoryview(bytearray(count))
    span = await reads.read_into(url, stop - count, part, etag=etag)
    if span.stop < stop:
        raise ValueError(f"it ends at byte {span.stop}, and was longer")
    return bytes(part)


def _columns(
    schema: Schema, chunks: Sequence[ColumnChunk]
) -> Iterable[tuple[ParquetColumn, Sequence[ColumnChunk], int, int]]:
    """(column, its chunks, where they begin, where they end) of a group."""
    first = 0
    for column in schema.columns:
        some = chunks[first : first + len(column.leaves)]
        first += len(column.leaves)
        yield column, some, min(chunk.start for chunk in some), max(chunk.start + chunk.size for chunk in some)


def _rows(footer: Footer, left: Sequence[Where]) -> Rows:
    """The table of samples of all groups that have any.

    Args:
        left: what is left to ask of the rows of each group; those of which none is kept are left out.
    """
    schema = footer.schema
    names = [column.name for column in schema.columns] + [name for name, _ in schema.constants]
    number = {name: k for k, name in enumerate(names)}
    placed = []
    for group in footer.groups:
        members = [
            (start, stop - start, number[column.name])
            for column, _, start, stop in (_columns(schema, group.chunks) if group.rows else ())
        ]
        begin = min((start for start, _, _ in members), default=len(MAGIC))
        members += [(begin, 0, number[name]) for name, _ in schema.constants if group.rows]
        placed.append(sorted(members))
    order = sorted((k for k, group in enumerate(footer.groups) if left[k]), key=lambda k: placed[k][:1])
    block_of = {k: block for block, k in enumerate(order)}
    table = np.array([member for k in order for member in placed[k]], np.int64).reshape(-1, 3)
    starts = np.cumsum([0, *(len(placed[k]) for k in order)])
    counts = np.array([group.rows for group in footer.groups], np.int64)
    total = int(counts.sum())
    block = np.repeat(np.array([block_of.get(k, -1) for k in range(len(counts))], np.int64), counts)
    kept, row = np.flatnonzero(block >= 0), np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return Rows(
        kept.astype(f"S{len(str(max(total - 1, 0)))}"),
        starts,
        table[:, 2].astype(np.int32),
        table[:, 0].copy(),
        table[:, 1].copy(),
        tuple(names),
        block=block[kept],
        row=row[kept],
        about=tuple(Facts(schema, footer.groups[k].rows, footer.groups[k].chunks, left[k]) for k in order),
    )
