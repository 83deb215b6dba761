"""The Arrow format: batches of rows are blocks, columns are members."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.arrow.layout import CONTINUATION, MAGIC, Layout, MessageHead, head_of, read_layout
from headrace.formats.arrow_predicates import check_kinds, kept_rows
from headrace.formats.arrow_values import Arrow as ArrowData
from headrace.formats.arrow_values import TableRows, arrow_errors, features_of, kind_of, library
from headrace.formats.format import Block, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.predicates import ALL, Where, known
from headrace.formats.tables import TableFormat, check_table, constants_of

_PLAIN_BUFFER = -1  # length of an uncompressed buffer in a compressed batch
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ArrowSchema:
    """The schema message of a file, numbers of the columns to read, and constant fields."""

    message: bytes
    read: tuple[int, ...]
    constants: tuple[tuple[str, object], ...] = ()

    @property
    def names(self) -> list[str]:
        names = schema_of(self.message).names
        return [names[number] for number in self.read]

    @property
    def features(self) -> Mapping[str, object]:
        return features_of((schema_of(self.message).metadata or {}).get(b"huggingface", b""))


class ColumnBuffers(NamedTuple):
    """A column's part [start, stop) of a batch's body, and its buffers from the batch's head."""

    start: int
    stop: int
    buffers: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def schema_of(message: bytes) -> ArrowData:
    """Parse the schema in a message. Raises a ValueError if damaged, or for duplicate names."""
    pa = library()
    with arrow_errors("its schema is damaged"):
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        names = schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"it has two columns {next(name for name in names if names.count(name) > 1)!r:.200}")
    return schema


def buffers_by_column(schema: ArrowSchema, head: MessageHead) -> list[ColumnBuffers]:
    """Return the buffers of each column of a batch. A mismatch with the schema is a ValueError."""
    counts = _counts(schema.message, head.variadic)
    arrays, buffers = (sum(some) for some in zip((0, 0), *counts, strict=True))
    if (arrays, buffers) != (head.nodes, len(head.buffers)):
        raise ValueError(
            f"a batch has {head.nodes} arrays of {len(head.buffers)} buffers, and by the schema {arrays} of {buffers}"
        )
    found, first, end = list[ColumnBuffers](), 0, 0
    for _, count in counts:
        own = head.buffers[first : first + count]
        filled = [one for one in own if one[1]]
        start, end = (filled[0][0], sum(filled[-1])) if filled else (end, end)
        found.append(ColumnBuffers(start, end, own))
        first += count
    return found


@functools.lru_cache(maxsize=256)
def _counts(message: bytes, variadic: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (number of arrays, of buffers) of each column. `variadic` adds buffers of views."""
    pa, more, found = library(), iter(variadic), []
    for field in schema_of(message):
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type)], ["x"])
        head = head_of(empty.serialize().to_pybytes())
        found.append((head.nodes, len(head.buffers) + sum(max(0, next(more, 0)) for _ in head.variadic)))
    return found


def decoded(
    schema: ArrowSchema, head: bytes, dictionaries: Sequence[bytes], bodies: Mapping[int, bytes], limits: Limits
) -> ArrowData:
    """Decode some columns of a batch.

    pyarrow gets a stream of this batch alone, with zeros in place of other columns.

    Args:
        head: The bytes of the batch before its body.
        bodies: The bytes of each column, by its number.
    """
    pa, said = library(), head_of(head)
    places = buffers_by_column(schema, said)
    if said.is_packed:
        _check_unpacked({number: places[number] for number in bodies}, bodies, limits)
    before = b"".join([schema.message, *dictionaries, head])
    whole = np.zeros(len(before) + said.body, np.uint8)  # pages that are not written take no memory
    whole[: len(before)] = np.frombuffer(before, np.uint8)
    for number, body in bodies.items():
        at = len(before) + places[number].start
        whole[at : at + len(body)] = np.frombuffer(body, np.uint8)
    options = pa.ipc.IpcReadOptions(included_fields=sorted(bodies), use_threads=False)
    with arrow_errors():
        with pa.ipc.open_stream(pa.py_buffer(whole), options=options) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)
    names = [schema_of(schema.message).names[number] for number in sorted(bodies)]
    if batch.num_rows != said.rows or batch.schema.names != names:
        raise ValueError(f"it has {batch.num_rows} rows of {batch.schema.names!r:.200}, and its head has {said.rows}")
    return batch


def _check_unpacked(places: Mapping[int, ColumnBuffers], bodies: Mapping[int, bytes], limits: Limits) -> None:
    unpacked, packed = 0, sum(map(len, bodies.values()))
    most = limits.unpacked(packed)
    for number, place in places.items():
        for start, size in place.buffers:
            if not size:
                continue
            if size < _LENGTH_BYTES:
                raise ValueError(f"a compressed buffer has {size} bytes")
            at = start - place.start
            length = int.from_bytes(bodies[number][at : at + _LENGTH_BYTES], "little", signed=True)
            unpacked += size if length == _PLAIN_BUFFER else length
            if length < _PLAIN_BUFFER or unpacked > most:
                raise LimitError(f"its columns unpack to {unpacked} bytes or more, the limit is {most}")


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

    def sniff(self, name: str, head: bytes) -> float:
        if head.startswith(MAGIC):
            return 1.0
        return 0.9 if head.startswith(CONTINUATION) and head[8:12] == b"\x10\0\0\0" else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:
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
        total = sum(one.said.rows for one in layout.batches)
        check_table(len(read), total, layout.size, limits)
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
    total = int(counts.sum())
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
            what = f"column {names[number]!r:.200} of batch {k}"
            check_bytes(what, place.stop - place.start, limits.member_bytes)
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
