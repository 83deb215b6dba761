"""The Arrow format: batches of rows are blocks, columns are members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.arrow.decoding import ArrowSchema, buffers_by_column, decoded, schema_of
from headrace.formats.arrow.layout import MAGIC, Layout, read_layout
from headrace.formats.arrow.messages import CONTINUATION
from headrace.formats.arrow_predicates import check_kinds, kept_rows
from headrace.formats.arrow_values import TableRows, kind_of
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.predicates import ALL, Where, known
from headrace.formats.tables import TableFormat, constants_of

_ROW_BYTES = 32  # size of a row in the table of samples
_UNPACKED = 3  # approximate compression ratio; only the body has the true one
_QUICK = 64  # batches; indexing these takes some milliseconds


class BatchFacts(NamedTuple):
    """Metadata that a worker needs to decode a batch. `head` are the bytes before its body."""

    schema: ArrowSchema
    rows: int
    head: bytes
    dictionaries: tuple[bytes, ...]
    where: Where = ALL


class Arrow(TableFormat):
    """Arrow IPC files and streams, and Feather version 2. Each row is a sample.

    The batches of a file are found by its footer. A stream, as written by Hugging Face's `datasets`, has no footer: its
    batches are found one after the other, with a small read each.

    Args:
        columns: Columns to read. By default all columns whose names do not begin with "__".
        where: Predicate for the rows to keep, as for `hr.Parquet`. Batches have no statistics: only folders exclude
            files.

    Raises:
        OptionError: `columns` or `where` is invalid.

    Examples:
        >>> data = hr.stream("s3://bucket/{00..99}.arrow", format=hr.Arrow(columns=["text", "label"]))
    """

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        if head.startswith(MAGIC):
            return 1.0
        return 0.9 if head.startswith(CONTINUATION) and head[8:12] == b"\x10\0\0\0" else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:  # noqa: ARG002
        return 1.0 if tail.endswith(MAGIC[:6]) else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        url = shard.url
        with self.errors_named(url):
            if self.is_left_out(url):
                return ShardIndex(Rows.empty(), None, -1, None)
            layout = await read_layout(reads, url, limits)
            read = partial(self._index, layout, url, limits)
            quick = len(layout.batches) <= _QUICK
            rows, opened, columns = read() if quick else await anyio.to_thread.run_sync(read)
        return ShardIndex(rows, None, layout.size, layout.etag, opened_bytes=opened, columns=columns)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        facts: BatchFacts = block.about
        given = dict(zip(block.members, bodies, strict=True))
        constants = {name: value for name, value in facts.schema.constants if name in given and self.is_shown(name)}
        numbers = dict(zip(facts.schema.names, facts.schema.read, strict=True))
        found = {numbers[name]: body for name, body in given.items() if name in numbers}
        if not found:
            return [constants] * facts.rows
        table = decoded(facts.schema, facts.head, facts.dictionaries, found, block.limits)
        kept = None if facts.where == ALL else kept_rows(facts.where, table)
        table = table.select([name for name in table.schema.names if self.is_shown(name)])
        return TableRows(table, facts.schema.features, constants, kept)

    def _index(self, layout: Layout, url: str, limits: Limits) -> tuple[Rows, int, tuple[tuple[str, str], ...]]:
        """Return (table of samples, approximate decoded bytes of all, columns) of a file."""
        constants = constants_of(url)
        fields = list(schema_of(layout.schema))
        own = [field.name for field in fields]
        self.check_columns(own, constants)
        read = tuple(number for number, name in enumerate(own) if self.is_read(name))
        if len(read) > limits.fields:
            raise LimitError(
                f"{len(read)} columns would be read, over the limit of {limits.fields}: name those that are needed by "
                "columns=, or give Limits(fields=…)"
            )
        more = tuple((name, value) for name, value in constants.items() if name not in own and self.is_read(name))
        schema = ArrowSchema(layout.schema, read, more)
        features = schema.features
        where = known(self.where, constants)
        check_kinds(where, {field.name: field.type for field in fields})
        kinds = [(fields[k].name, kind_of(fields[k].type, features.get(fields[k].name))) for k in read]
        rows = _rows(layout, schema, where, limits)
        is_packed = any(one.said.is_packed for one in layout.batches)
        opened = int(rows.size.sum()) * _UNPACKED if is_packed else 0
        return rows, opened, tuple(sorted([*kinds, *((name, "of the path") for name, _ in more)]))


ARROW = Arrow()


def _rows(layout: Layout, schema: ArrowSchema, where: Where, limits: Limits) -> Rows:
    """Return the table of all samples. Raises a ValueError for overlaps, a LimitError for sizes."""
    counts = np.array([one.said.rows for one in layout.batches], np.int64)
    total, most = (
        sum(one.said.rows for one in layout.batches),
        max(limits.unpacked_free_bytes, limits.unpacked_ratio * layout.size),
    )
    if total * _ROW_BYTES > most:
        raise LimitError(f"a table of {total} rows in {layout.size} bytes would take over {most} bytes, the limit")
    names = [*schema.names, *(name for name, _ in schema.constants)]
    order = sorted((k for k, count in enumerate(counts) if count), key=lambda k: layout.batches[k].body)
    table, starts, end = list[tuple[int, int, int]](), [0], 0
    for k in order:
        one = layout.batches[k]
        if one.body < end:
            raise ValueError(f"two batches have the bytes at {one.body}")
        places = buffers_by_column(schema, one.said)
        table += [(one.body, 0, len(schema.read) + c) for c in range(len(schema.constants))]
        for number, column in enumerate(schema.read):
            place = places[column]
            if place.stop - place.start > limits.member_bytes:
                raise LimitError(
                    f"column {names[number]!r:.200} of batch {k} has {place.stop - place.start} bytes, over the limit "
                    f"of {limits.member_bytes}"
                )
            table.append((one.body + place.start, place.stop - place.start, number))
        starts.append(len(table))
        end = one.body + one.said.body
    members = np.array(table, np.int64).reshape(-1, 3)
    block_of = {k: block for block, k in enumerate(order)}
    return Rows(
        np.arange(total).astype(f"S{len(str(max(total - 1, 0)))}"),
        np.array(starts, np.int64),
        members[:, 2].astype(np.int32),
        members[:, 0].copy(),
        members[:, 1].copy(),
        tuple(names),
        block=np.repeat(np.array([block_of.get(k, 0) for k in range(len(counts))], np.int64), counts),
        row=np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts),
        about=tuple(
            BatchFacts(schema, one.said.rows, one.head, one.dictionaries, where)
            for one in (layout.batches[k] for k in order)
        ),
    )
