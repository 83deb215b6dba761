"""Parquet as a format: groups of rows are blocks, columns, or some of their pages, their members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.arrow_predicates import kept_rows
from headrace.formats.arrow_values import TableRows
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import ColumnBytes, decoded
from headrace.formats.parquet.facts import Facts, Member
from headrace.formats.parquet.footer import END_BYTES, MAGIC, Footer, by_column, read_footer
from headrace.formats.parquet.narrowing import Left, Narrowing, page_indexes, quickly
from headrace.formats.parquet.reading import FileEnd
from headrace.formats.parquet.schema import ParquetColumn, Schema
from headrace.formats.parquet.some_rows import SomeRows, opened
from headrace.formats.parquet.where import Asking, asked_of, left_of
from headrace.formats.predicates import ALL, NONE, known
from headrace.formats.tables import ListedTable, TableFormat, constants_of
from headrace.protocols import Reads, Version
from headrace.rows import Rows


class Parquet(TableFormat):
    """Files of Parquet; their samples are rows.

    Args:
        columns: those that are read; by default all whose names do not begin with "__".
        where: which rows are kept, as pyarrow's `filters=` says it: a list of (column, operator, value), all of which
            must hold, or a list of such lists, one of which must. Operators are "=", "==", "!=", "<", "<=", ">", ">=",
            "in" and "not in"; a missing value is kept by "not in" alone. Columns need not be among `columns`; folders
            named "key=value" are columns, too. What folders say leaves out files unread, what statistics in footers
            say groups of rows, what page indexes say pages of these; the other rows are asked themselves, as by
            `.filter()`.

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
            end = await FileEnd.of(reads, shard)
            data = await end.footer(limits)
            footer, asked = await quickly(partial(self._read, data, shard, end.size, limits), len(data))
            narrowing = Narrowing(end, footer, asked, limits)
            left = await narrowing.run()
        except LimitError as error:
            raise LimitError(f"{masked(url)}: {error.args[0]}", url=url) from None
        except OptionError as error:
            raise FormatError(f"{masked(url)}: {error}", url=url) from None
        except ValueError as error:
            raise FormatError(f"{masked(url)} is damaged, or not read here: {error}", url=url) from None
        rows, opened_bytes = _rows(footer, left)
        kinds = [(column.name, column.kind) for column in footer.schema.columns]
        kinds += [(name, "of the path") for name, _ in footer.schema.constants]
        return ShardIndex(
            rows, None, end.size, end.etag, None, opened_bytes, tuple(sorted(kinds)), kept=narrowing.indexes
        )

    async def single(
        self, reads: Reads, url: str, shard: ShardIndex, row: int, wanted: Sequence[frozenset[str]] | None
    ) -> Rows | None:
        rows = shard.rows
        if rows.block is None or rows.row is None or rows.about is None:
            return None
        facts: Facts = rows.about[rows.block[row]]
        schema = facts.schema
        have = {column.name for column in schema.columns} | {name for name, _ in schema.constants}
        if wanted is not None and any(one.isdisjoint(have) for one in wanted):
            return None  # it will be said what it has
        names = have if wanted is None else frozenset[str]().union(*wanted)
        some = [one for one in by_column(schema.columns, facts.chunks) if one[0].name in names]
        version = Version(shard.size, shard.etag)
        known = await page_indexes(
            [chunk for _, own in some for chunk in own if chunk.start not in shard.kept],
            facts.rows,
            lambda start, stop: reads.read(url, start, stop, version=version),
        )
        shard.kept.update(known)
        number = facts.number(int(rows.row[row]))
        pages = SomeRows.of(some, shard.kept, ((number, number + 1),), facts.rows)
        only = Facts(schema, facts.rows, (), facts.where, pages)
        members = [member for member in only.members if member[2] in names]
        return _table(rows.keys[row : row + 1], [only], [members])

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        facts: Facts = block.about
        given = facts.bodies(block.members, bodies)
        constants = {name: value for name, value in facts.schema.constants if name in given and self.is_shown(name)}
        if facts.some is not None:
            return opened(facts.schema, facts.where, facts.some, given, block.limits, constants, self.is_shown)
        found = []
        for column, chunks in by_column(facts.schema.columns, facts.chunks):
            if column.name in given:
                [body], start = given[column.name], min(chunk.start for chunk in chunks)
                parts = [(chunk, body[chunk.start - start :][: chunk.size]) for chunk in chunks]
                found.append(ColumnBytes(column, parts))
        if not found:
            return [constants] * facts.rows
        table = decoded(facts.schema, facts.rows, found, block.limits)
        kept = None if facts.where == ALL else kept_rows(facts.where, table)
        table = table.select([name for name in table.column_names if self.is_shown(name)])
        return TableRows(table, facts.schema.features, constants, kept)

    def _read(self, data: bytes, shard: ShardEntry, size: int, limits: Limits) -> tuple[Footer, list[Asking]]:
        """What the footer `data` says, and what is left to ask of each group of rows."""
        constants = constants_of(shard.url)
        footer = read_footer(data, size - len(data) - END_BYTES, partial(self._chosen, constants), limits)
        said: ListedTable | None = shard.about
        if said is not None:
            said.check(sum(group.rows for group in footer.groups), size)
        own = {column.name for column in footer.schema.columns}
        more = tuple((name, value) for name, value in constants.items() if name not in own and self.is_read(name))
        schema = Schema(footer.schema.columns, footer.schema.arrow, footer.schema.writer, more)
        asked = asked_of(known(self.where, constants), schema.columns)
        return Footer(schema, footer.groups), [left_of(asked, group) for group in footer.groups]

    def _chosen(self, constants: Mapping[str, object], columns: Sequence[ParquetColumn]) -> list[ParquetColumn]:
        self.check_columns({column.name for column in columns}, constants)
        return [column for column in columns if self.is_read(column.name)]


PARQUET = Parquet()


def _rows(footer: Footer, left: Sequence[Left]) -> tuple[Rows, int]:
    """The table of samples of all groups of which some are left, and about the bytes of all when they are opened."""
    found, keys, first, opened_bytes = [], [np.zeros(0, np.int64)], 0, 0
    for group, (asked, some) in zip(footer.groups, left, strict=True):
        if group.rows and asked.where != NONE:
            found.append(Facts(footer.schema, group.rows, group.chunks, asked.where, some))
            keys.append(first + found[-1].numbers)
            opened_bytes += sum(chunk.unpacked for chunk in group.chunks) * found[-1].total // group.rows
        first += group.rows
    members = [facts.members for facts in found]
    order = sorted(range(len(found)), key=lambda k: members[k][:1])
    rows = _table(
        np.concatenate(keys).astype(f"S{len(str(max(first - 1, 0)))}"),
        [found[k] for k in order],
        [members[k] for k in order],
    )
    counts = [facts.total for facts in found]
    block, row = np.repeat(np.argsort(order), counts), [np.arange(count) for count in counts]
    return replace(rows, block=block, row=np.concatenate([np.zeros(0, np.int64), *row])), opened_bytes


def _table(keys: NDArray[np.bytes_], blocks: Sequence[Facts], members: Sequence[Sequence[Member]]) -> Rows:
    """The table of samples of blocks that have these members; all of one block are its first."""
    names = tuple(dict.fromkeys(name for some in members for _, _, name in some))
    number = {name: k for k, name in enumerate(names)}
    table = np.array([(at, size, number[name]) for some in members for at, size, name in some], np.int64).reshape(-1, 3)
    none = np.zeros(len(keys), np.int64)
    return Rows(
        keys,
        np.cumsum([0, *map(len, members)]),
        table[:, 2].astype(np.int32),
        table[:, 0].copy(),
        table[:, 1].copy(),
        names,
        block=none,
        row=none,
        about=tuple(blocks),
    )
