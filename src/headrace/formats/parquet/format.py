"""The Parquet format: row groups are blocks; columns, or some of their pages, are members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.formats.arrow_predicates import kept_rows
from headrace.formats.arrow_values import TableRows, kind_of, library
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.parquet.decoding import GroupFacts, Member, decoded
from headrace.formats.parquet.file_end import END_BYTES, FileEnd
from headrace.formats.parquet.footer import MAGIC, Footer, read_footer
from headrace.formats.parquet.page_index import PageIndex, pages_of
from headrace.formats.parquet.page_pruning import Left, page_indexes, pruned, quickly
from headrace.formats.parquet.where import Asking, asked_of, left_of
from headrace.formats.predicates import ALL, NONE, columns_of, known
from headrace.formats.tables import ListedTable, TableFormat, constants_of


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

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 1.0 if head.startswith(MAGIC) else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:  # noqa: ARG002
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
        return _table(rows.keys[row : row + 1], [only], [members])

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


def _table(keys: NDArray[np.bytes_], blocks: Sequence[GroupFacts], members: Sequence[Sequence[Member]]) -> Rows:
    """Return a table with `members` per block. Each sample is row 0 of block 0."""
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
