"""The Arrow format: batches of rows are blocks, columns are members.

A file is read by its footer, a stream by one message after the other. pyarrow parses a head only together with its
body, so it cannot provide the ranges to fetch: the heads of messages, which are FlatBuffers, are parsed here.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import numpy as np

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow as ArrowData
from headrace.formats.arrow_values import TableRows, arrow_errors, check_names, features_of, kind_of, library
from headrace.formats.format import Block, MemberRange, ShardEntry, keys_of, rows_of_blocks
from headrace.formats.index import ShardIndex
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.tables import ALL, TableFormat, Where, check_kinds, check_table, constants_of, kept_rows, known

SCHEMA, DICTIONARY, BATCH = 1, 2, 3

PREFIX_BYTES = 8
CONTINUATION = b"\xff\xff\xff\xff"
_BLOCK = "<qi4xq"
_CODECS = 2  # LZ4 and ZSTD
_FORMATS = {1: "<b", 2: "<h", 4: "<i", 8: "<q"}


class MessageHead(NamedTuple):
    """The head of a message.

    Attributes:
        body: Size of the body.
        nodes: Number of arrays, with nested ones.
        buffers: (offset in the body, size) of each buffer.
        variadic: Number of additional buffers of each column of views.
        dictionary: Number of the dictionary.
        is_delta: True if the message extends the previous dictionary of its number.
    """

    kind: int
    body: int
    rows: int = 0
    nodes: int = 0
    buffers: tuple[tuple[int, int], ...] = ()
    is_packed: bool = False
    variadic: tuple[int, ...] = ()
    dictionary: int = 0
    is_delta: bool = False


class MessagePlace(NamedTuple):
    """The offset of a message in a file, and the sizes of its head and body."""

    start: int
    head: int
    body: int


class _Table:
    """A FlatBuffers table at offset `at` of untrusted bytes. Damage raises a ValueError."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - _number(data, at, "<i")
        self._size = _number(data, self._vtable, "<H")

    def number(self, field: int, nbytes: int) -> int:
        """Return a signed number. 0 if it is absent."""
        place = self._place(field)
        return 0 if place is None else _number(self._data, place, _FORMATS[nbytes])

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._data, place + _number(self._data, place, "<I"))

    def structs(self, field: int, layout: str) -> Iterator[tuple[int, ...]]:
        place = self._place(field)
        if place is None:
            return iter(())
        start = place + _number(self._data, place, "<I")
        count, start, size = _number(self._data, start, "<I"), start + 4, struct.calcsize(layout)
        if start + count * size > len(self._data):
            raise ValueError(f"a list of {count} does not fit into {len(self._data)} bytes")
        return struct.iter_unpack(layout, self._data[start : start + count * size])

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return None
        offset = _number(self._data, self._vtable + entry, "<H")
        return self._at + offset if offset else None


def _number(data: bytes, at: int, layout: str) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(layout):
        raise ValueError("its head is damaged")
    return int(struct.unpack_from(layout, data, at)[0])


def head_bytes(prefix: bytes) -> int:
    """Return the size of a message before its body, from its first 8 bytes. 0: end of stream."""
    if len(prefix) < PREFIX_BYTES:
        raise ValueError("it is cut off in the head of a message")
    if prefix[:4] != CONTINUATION:
        raise ValueError("a message does not begin as those do that Arrow has written since 0.15")
    length = int.from_bytes(prefix[4:PREFIX_BYTES], "little", signed=True)
    if length < 0:
        raise ValueError(f"the head of a message would have {length} bytes")
    return length + PREFIX_BYTES if length else 0


def head_of(data: bytes) -> MessageHead:
    """Parse the head of a message, the bytes before the body. Damage raises a ValueError."""
    body = data[PREFIX_BYTES:]
    message = _Table(body, _number(body, 0, "<I"))
    kind, size, header = message.number(1, 1), message.number(3, 8), message.table(2)
    if header is None or size < 0:
        raise ValueError("the head of a message is damaged")
    batch = header.table(1) if kind == DICTIONARY else header
    if batch is None:
        raise ValueError("a dictionary has no values")
    if kind not in (DICTIONARY, BATCH):
        return MessageHead(kind, size)
    rows, packed = batch.number(0, 8), batch.table(3)
    if rows < 0 or (packed is not None and not 0 <= packed.number(0, 1) < _CODECS):
        raise ValueError(f"a batch has {rows} rows, or an unknown compression")
    buffers, end = [], 0
    for start, length in batch.structs(2, "<qq"):
        if length < 0 or start < (end if length else 0) or start + length > size:
            raise ValueError(f"a buffer has {length} bytes at {start} of {size}, and the one before ends at {end}")
        end = start + length if length else end
        buffers.append((start, length))
    nodes, variadic = sum(1 for _ in batch.structs(1, "<qq")), tuple(count for (count,) in batch.structs(4, "<q"))
    head = MessageHead(kind, size, rows, nodes, tuple(buffers), packed is not None, variadic)
    if kind == DICTIONARY:
        return head._replace(dictionary=header.number(0, 8), is_delta=bool(header.number(2, 1)))
    return head


def blocks_of(footer: bytes) -> tuple[list[MessagePlace], list[MessagePlace]]:
    """Return (dictionaries, batches) from a file's footer. Damage raises a ValueError."""
    table = _Table(footer, _number(footer, 0, "<I"))
    dictionaries, batches = ([MessagePlace(*one) for one in table.structs(field, _BLOCK)] for field in (2, 3))
    return dictionaries, batches


MAGIC = b"ARROW1"
_BEGIN_BYTES = 8  # the magic and its padding
_END_BYTES = 10  # the footer's length and the magic
_OLD = b"FEA1"
_CHUNK_BYTES = 64 * 1024
_GAP_BYTES = 16 * 1024  # heads at most so far apart are read together
_RUN_BYTES = 2**20
_HELD = 3
_DICTIONARY_BYTES = 16 * 2**20


class Placed(NamedTuple):
    """A batch of rows.

    Attributes:
        head: The bytes before the body.
        body: Offset of the body in the file.
        dictionaries: Messages of the dictionaries that its columns need.
    """

    head: bytes
    said: MessageHead
    body: int
    dictionaries: tuple[bytes, ...]


class Layout(NamedTuple):
    """The schema message and the batches of a file or stream."""

    schema: bytes
    batches: tuple[Placed, ...]
    size: int
    etag: str | None


async def read_layout(reads: Reads, url: str, limits: Limits) -> Layout:
    """Locate the batches of the object at `url`."""
    part = _Part(reads, url, limits)
    begin = await part.get(0, PREFIX_BYTES)
    if begin[: len(_OLD)] == _OLD:
        raise ValueError(
            "it is Feather of version 1: pyarrow.feather.read_table reads it, write_feather writes version 2"
        )
    if begin[: len(MAGIC)] == MAGIC:
        return await _file(part)
    if begin[:4] == CONTINUATION:
        return await _stream(part)
    raise ValueError(f"it has {part.shard.size} bytes, which do not begin as Arrow's files and streams do")


async def _file(part: _Part) -> Layout:
    end = await part.get(max(0, part.shard.size - _CHUNK_BYTES), part.shard.size)
    if end[-len(MAGIC) :] != MAGIC or part.shard.size < _BEGIN_BYTES + _END_BYTES:
        raise ValueError("it does not end as Arrow's files do: it is cut off, or was not written to its end")
    length = int.from_bytes(end[-_END_BYTES : -len(MAGIC)], "little", signed=True)
    start = part.shard.size - _END_BYTES - length
    if length < 0 or start < _BEGIN_BYTES:
        raise ValueError(f"its footer would have {length} bytes, and all of it has {part.shard.size}")
    check_bytes("its footer", length, part.limits.unpacked_free_bytes)
    dictionaries, batches = blocks_of(await part.get(start, part.shard.size - _END_BYTES))
    for one in (*dictionaries, *batches):
        if one.start < _BEGIN_BYTES or one.head <= PREFIX_BYTES or one.body < 0 or sum(one) > start:
            raise ValueError(f"a message would be at byte {one.start} to {sum(one)}, and the footer begins at {start}")
    starts = [one.start for one in batches]
    if len(set(starts)) < len(starts):
        raise ValueError(f"two batches would be at byte {next(one for one in starts if starts.count(one) > 1)}")
    known = _Dictionaries()
    for one in dictionaries:
        known.add(await part.get(one.start, sum(one)), part)
    heads = await _heads(part, batches)
    schema = (await _message(part, _BEGIN_BYTES, SCHEMA))[0]
    placed = [
        Placed(head, part.head_of(head, BATCH), one.start + one.head, known.messages)
        for head, one in zip(heads, batches, strict=True)
    ]
    for batch, block in zip(placed, batches, strict=True):
        if batch.said.body != block.body:
            raise ValueError(f"a batch has {batch.said.body} bytes, and the footer has {block.body}")
    return Layout(schema, tuple(placed), part.shard.size, part.shard.etag)


async def _stream(part: _Part) -> Layout:
    schema, _ = await _message(part, 0, SCHEMA)
    at, batches, known = len(schema), list[Placed](), _Dictionaries()
    while at < part.shard.size:
        message, said = await _message(part, at)
        if not message:
            break
        at += len(message)
        if at + said.body > part.shard.size:
            raise ValueError(f"it is cut off: a message ends at byte {at + said.body} of {part.shard.size}")
        if said.kind == DICTIONARY:
            known.add(message + await part.get(at, at + said.body), part)
        elif said.kind == BATCH:
            batches.append(Placed(message, said, at, known.messages))
        else:
            raise ValueError(f"the message that ends at byte {at} is neither a batch nor a dictionary")
        at += said.body
    return Layout(schema, tuple(batches), part.shard.size, part.shard.etag)


async def _message(part: _Part, at: int, kind: int | None = None) -> tuple[bytes, MessageHead]:
    """Return (bytes before the body, parsed head) of a message. Empty at a stream's end."""
    length = head_bytes(await part.get(at, min(at + PREFIX_BYTES, part.shard.size)))
    if not length and kind is None:
        return b"", MessageHead(0, 0)
    data = await part.get(at, at + length)
    return data, part.head_of(data, kind)


async def _heads(part: _Part, blocks: Sequence[MessagePlace]) -> list[bytes]:
    order = sorted(range(len(blocks)), key=lambda k: blocks[k].start)
    runs = list[tuple[int, int, list[int]]]()
    for k in order:
        start, stop = blocks[k].start, blocks[k].start + blocks[k].head
        if runs and runs[-1][0] <= start <= runs[-1][1] + _GAP_BYTES and stop - runs[-1][0] <= _RUN_BYTES:
            first, last, some = runs[-1]
            runs[-1] = first, max(last, stop), [*some, k]
        else:
            runs.append((start, stop, [k]))
    bodies = await asyncio.gather(*(part.read(start, stop) for start, stop, _ in runs))
    heads = [b""] * len(blocks)
    for (start, _, some), body in zip(runs, bodies, strict=True):
        for k in some:
            at = blocks[k].start - start
            heads[k] = body[at : at + blocks[k].head]
    return heads


class _Dictionaries:
    def __init__(self) -> None:
        self._known: list[tuple[int, bytes]] = []
        self.messages: tuple[bytes, ...] = ()

    def add(self, message: bytes, part: _Part) -> None:
        """Add a dictionary. It replaces those of its number, or extends them."""
        said = part.head_of(message[: head_bytes(message[:PREFIX_BYTES])], DICTIONARY)
        if not said.is_delta:
            self._known = [one for one in self._known if one[0] != said.dictionary]
        self._known.append((said.dictionary, message))
        self.messages = tuple(message for _, message in self._known)
        most = min(_DICTIONARY_BYTES, part.limits.member_bytes)
        if sum(map(len, self.messages)) > most:
            raise LimitError(
                f"its dictionaries have over {most} bytes, and each batch would be sent with them: write these columns "
                "as plain ones"
            )


class _Part:
    """Parts of one object. The last few are kept."""

    def __init__(self, reads: Reads, url: str, limits: Limits) -> None:
        self.shard, self.limits = PinnedObject(reads, url), limits
        self._held: list[tuple[int, bytes]] = []

    async def get(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop). Reads and keeps more bytes after them."""
        for at, data in self._held:
            if at <= start and stop <= at + len(data):
                return data[start - at : stop - at]
        data = await self.read(start, max(stop, start + _CHUNK_BYTES))
        self._held = [*self._held, (start, data)][-_HELD:]
        return data[: stop - start]

    async def read(self, start: int, stop: int) -> bytes:
        return bytes(await self.shard.read(start, stop - start))

    def head_of(self, data: bytes, kind: int | None = None) -> MessageHead:
        """Parse the head of a message. `data` are its bytes before the body."""
        check_bytes("the head of a message", len(data), self.limits.unpacked_free_bytes)
        if head_bytes(data[:PREFIX_BYTES]) != len(data):
            raise ValueError("the head of a message has another length than its prefix")
        said = head_of(data)
        if kind is not None and said.kind != kind:
            raise ValueError(f"a message is of kind {said.kind}, where one of kind {kind} should be")
        return said


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
    check_names(names)
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
    filled = [(k, one) for k, one in enumerate(layout.batches) if one.said.rows]
    end = 0
    for at, size in sorted((one.body, one.said.body) for _, one in filled):
        if at < end:
            raise ValueError(f"two batches have the bytes at {at}")
        end = at + size
    names, members = schema.names, list[list[MemberRange]]()
    for k, one in filled:
        places, own = buffers_by_column(schema, one.said), [(one.body, 0, name) for name, _ in schema.constants]
        for name, column in zip(names, schema.read, strict=True):
            start, stop, _ = places[column]
            check_bytes(f"column {name!r:.200} of batch {k}", stop - start, limits.member_bytes)
            own.append((one.body + start, stop - start, name))
        members.append(own)
    counts = [one.said.rows for _, one in filled]
    facts = [BatchFacts(schema, one.said.rows, one.head, one.dictionaries, where) for _, one in filled]
    return rows_of_blocks(keys_of(np.arange(sum(counts))), counts, members, facts)
