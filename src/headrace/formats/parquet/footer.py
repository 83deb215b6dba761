"""The footer of a Parquet file: its columns, and the locations of those of each row group.

pyarrow parses the schema. Row groups are parsed here, as pyarrow's metadata accessors abort the process on damaged
footers.
"""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from headrace._util.pickled import packed_once
from headrace._util.reads import Reads
from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow, arrow_errors, check_names, features_of, leaf_count, library
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.tables import check_table
from headrace.types import Buffer

Value = bool | int | float | bytes | list["Value"] | dict[int, "Value"]
Struct = dict[int, Value]

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

_STRUCT_DEPTH_MOST = 32
_DOUBLE = struct.Struct("<d")
_VARINT_BYTES_MOST = 10


class ThriftReader:
    """Reads structs from untrusted bytes. Damage raises a ValueError. `at`: Position of the next byte."""

    def __init__(self, data: Buffer) -> None:
        self._data, self.at = data, 0

    def struct(self) -> Struct:
        found = self.value(STRUCT)
        assert isinstance(found, dict)
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Iterate over (number, kind) of a struct's fields. The caller reads each value."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.value(I64)  # type: ignore[assignment]
            yield number, head & 15

    def value(self, kind: int) -> Value:
        try:
            return self._value(kind, 0)
        except IndexError:
            raise ValueError("it is cut off") from None

    def list_head(self) -> tuple[int, int]:
        """Read the head of a list: (kind of the elements, their number)."""
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self.unsigned()
        if count > len(self._data) - self.at:  # each element takes at least a byte
            raise ValueError(f"a list of {count} does not fit into {len(self._data) - self.at} bytes")
        return head & 15, count

    def unsigned(self) -> int:
        """Read an unsigned varint."""
        data, at, number, shift = self._data, self.at, 0, 0
        try:
            byte = data[at]
            while byte >= 128:
                number |= (byte & 127) << shift
                shift, at = shift + 7, at + 1
                if shift >= 7 * _VARINT_BYTES_MOST:
                    raise ValueError("a number has more than 10 bytes")
                byte = data[at]
        except IndexError:
            raise ValueError("it is cut off") from None
        self.at = at + 1
        return number | byte << shift

    def signed(self) -> int:
        """Read a zigzag-encoded varint."""
        number = self.unsigned()
        number = number >> 1 ^ -(number & 1)
        if not -(2**63) <= number < 2**63:
            raise ValueError("a number has more than 64 bits")
        return number

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("it is cut off")
        self.at += 1
        return self._data[self.at - 1]

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("it is cut off")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def _value(self, kind: int, depth: int) -> Value:
        if depth > _STRUCT_DEPTH_MOST:
            raise ValueError(f"structs are nested more than {_STRUCT_DEPTH_MOST} times")
        if kind == STRUCT:
            return self._struct(depth)
        if kind == BINARY:
            return self.take(self.unsigned())
        if kind in (I16, I32, I64):
            return self.signed()
        if kind in (LIST, SET):
            inner, count = self.list_head()
            if inner in (TRUE, FALSE):
                return [byte == TRUE for byte in self.take(count)]
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == DOUBLE:
            return float(_DOUBLE.unpack(self.take(8))[0])
        if kind == BYTE:
            return self._byte()
        raise ValueError(f"a field is of kind {kind}, which is not known")

    def _struct(self, depth: int) -> Struct:
        data, number, fields = self._data, 0, Struct()
        while head := data[self.at]:
            self.at += 1
            kind, step = head & 15, head >> 4
            number = number + step if step else self.signed()
            if kind in (I16, I32, I64):  # most fields
                fields[number] = self.signed()
            else:
                fields[number] = self._value(kind, depth + 1)
        self.at += 1
        return fields


MAGIC = b"PAR1"

CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
_DEPTH_MOST = 64
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_VALUE_BYTES = (1, 4, 8, 12, 4, 8, 4)


class ColumnChunk(NamedTuple):
    """The values of one leaf in one row group.

    Attributes:
        codec: Index in `CODECS`.
        values: Number of values, with missing ones.
        start, size: Location of the pages.
        unpacked: Decompressed bytes of the pages.
    """

    codec: int
    values: int
    start: int
    size: int
    unpacked: int


class Statistics(NamedTuple):
    """The bounds of the values of a leaf in one row group, and the number of missing ones. None: unknown."""

    low: Value | None
    high: Value | None
    missing: Value | None


class ParquetLeaf(NamedTuple):
    """A primitive column. A column without structs and lists is one leaf.

    Attributes:
        number: Index among all leaves of the file.
        position: Index among the leaves that are read.
        levels: Number of kinds of levels before the values of a page: for missing and for repeated values.
        is_flat: True if each row has exactly one value.
        value_bytes: Size of a value. For text and bytes: the minimum, 4.
    """

    number: int
    position: int
    path: str
    physical: str
    levels: int
    is_flat: bool
    value_bytes: int


class ParquetColumn(NamedTuple):
    name: str
    type: Arrow
    leaves: tuple[ParquetLeaf, ...]


class Group(NamedTuple):
    """A row group: the leaves that are read, by position, and a footer entry of these alone."""

    rows: int
    chunks: Sequence[ColumnChunk]
    statistics: Sequence[Statistics]
    raw: bytes


@packed_once(attrgetter("head", "tail", "columns", "features_json", "constants"))
@dataclass(frozen=True, eq=False)
class FileFacts:
    """Metadata shared by all row groups of a file: parts of a footer of the read columns.

    Attributes:
        columns: (name, leaves) of the columns that are read.
        constants: (name, value) of fields that are equal in all rows.
    """

    head: bytes
    tail: bytes
    columns: tuple[tuple[str, tuple[ParquetLeaf, ...]], ...] = ()
    features_json: bytes = b""
    constants: tuple[tuple[str, object], ...] = ()

    def footer(self, *groups: bytes) -> bytes:
        """Return a footer with these row groups only: one, or none."""
        field = bytes([LIST, 4 << 1, len(groups) << 4 | STRUCT])  # field 4: a list of structs
        footer = b"".join([self.head, field, *groups, self.tail])
        return footer + len(footer).to_bytes(4, "little") + MAGIC

    @property
    def features(self) -> Mapping[str, object]:
        return features_of(self.features_json)


@dataclass(frozen=True, slots=True)
class Footer:
    file: FileFacts
    columns: tuple[ParquetColumn, ...]
    groups: tuple[Group, ...]


def read_footer(
    data: bytes,
    end: int,
    chosen: Callable[[Sequence[str]], Sequence[str]],
    constants: Mapping[str, object],
    limits: Limits,
) -> Footer:
    """Parse the footer `data`, which begins at byte `end` of its file.

    Args:
        chosen: Returns the columns to read, from the names of all columns.
        constants: Fields that are equal in all rows. Columns of the same name override them.
    """
    parts = _split(data)
    opened = opened_footer(FileFacts(parts.head, parts.tail).footer())
    columns, total = _columns(opened, len(parts.elements), chosen)
    leaves = [leaf for column in columns for leaf in column.leaves]
    check_table(len(leaves), 0, end, limits)
    groups = tuple(
        _group(one, f"group {k}", leaves, total, parts.ordered, end, limits) for k, one in enumerate(parts.groups)
    )
    rows = sum(group.rows for group in groups)
    if rows != parts.rows:
        raise ValueError(f"it claims {parts.rows} rows, and its groups have {rows}")
    check_table(len(leaves), rows, end, limits)
    last = 0
    for start, size in sorted((one.start, one.size) for group in groups for one in group.chunks if one.size):
        if start < last:
            raise ValueError(f"two columns have the bytes at {start}")
        last = start + size
    own = {column.name for column in columns}
    more = tuple((name, value) for name, value in constants.items() if name not in own)
    return Footer(_facts(opened, parts.elements, columns, more), columns, groups)


class _ListedGroup(NamedTuple):
    said: Struct
    chunks: Sequence[tuple[Struct, bytes]]


class _Parts(NamedTuple):
    """The parts of a footer. Bounds of `ordered` leaves follow the order of their type."""

    head: bytes
    tail: bytes
    elements: Sequence[Sequence[bytes]]
    groups: Sequence[_ListedGroup]
    rows: int
    ordered: frozenset[int]


def _split(data: bytes) -> _Parts:
    reader, tail, groups = ThriftReader(data), -1, list[_ListedGroup]()
    head = rows = before = last = 0
    ordered, elements = frozenset[int](), list[list[bytes]]()
    for number, kind in reader.fields():
        if number <= last:
            raise ValueError("the fields of its footer are not in order")
        if number == 2:
            elements = _elements(reader, data, kind)
        elif number == 3:
            value = reader.value(kind)
            rows = value if type(value) is int else -1
        elif number == 4:
            inner, count = reader.list_head() if kind == LIST else (0, 0)
            if inner != STRUCT:
                raise ValueError("its row groups are damaged")
            head = before
            groups = [_listed(reader, data) for _ in range(count)]
            tail = reader.at
        elif number == 7:
            orders = reader.value(kind)
            if type(orders) is list:  # 1: the order of the type
                ordered = frozenset(k for k, order in enumerate(orders) if type(order) is dict and 1 in order)
        elif number == 8:
            raise ValueError("it is encrypted, and headrace has no keys: decrypt it first")
        else:
            reader.value(kind)
        before, last = reader.at, number
    if tail < 0:
        raise ValueError("its footer has no row groups")
    return _Parts(data[:head], data[tail:], elements, groups, rows, ordered)


def _listed(reader: ThriftReader, data: bytes) -> _ListedGroup:
    said, chunks = Struct(), list[tuple[Struct, bytes]]()
    for number, kind in reader.fields():
        if number != 1:
            said[number] = reader.value(kind)
            continue
        inner, count = reader.list_head() if kind == LIST else (0, 0)
        if inner != STRUCT:
            raise ValueError("a row group has no columns")
        for _ in range(count):
            start, chunk = reader.at, reader.struct()
            chunks.append((chunk, data[start : reader.at]))
    return _ListedGroup(said, chunks)


def _elements(reader: ThriftReader, data: bytes, kind: int) -> list[list[bytes]]:
    """Return the elements of a schema by column. Too much depth raises a ValueError."""
    inner, count = reader.list_head() if kind == LIST else (0, 0)
    if inner != STRUCT:
        raise ValueError("its schema is damaged")
    missing, columns = list[int](), list[list[bytes]]()  # remaining children of each enclosing element
    for number in range(count):
        start, children = reader.at, reader.struct().get(5, 0)
        while missing and not missing[-1]:
            missing.pop()
        if number:
            if not missing or len(missing) > _DEPTH_MOST:
                raise ValueError(f"its schema is no tree, or deeper than {_DEPTH_MOST} levels")
            if len(missing) == 1:
                columns.append([])
            columns[-1].append(data[start : reader.at])
            missing[-1] -= 1
        if type(children) is int and children > 0:
            missing.append(children)
    return columns


def _facts(
    opened: Arrow,
    elements: Sequence[Sequence[bytes]],
    columns: Sequence[ParquetColumn],
    constants: tuple[tuple[str, object], ...],
) -> FileFacts:
    """Build a footer of the columns that are read. Each row group parses it again."""
    schema, said = opened.schema_arrow, opened.metadata.metadata or {}
    kept = [elements[schema.get_field_index(column.name)] for column in columns]
    root = [4 << 4 | BINARY, 0, 1 << 4 | I32]  # no name, and the number of columns
    flat = [bytes([*root, *_varint(len(kept) << 1), 0]), *(one for some in kept for one in some)]
    head = bytes([1 << 4 | I32, 4, 1 << 4 | LIST, 15 << 4 | STRUCT, *_varint(len(flat))])  # version 2, the schema
    tail = b""
    if b"ARROW:schema" in said:
        arrow = library().schema([schema.field(column.name) for column in columns])
        pair = [(1, b"ARROW:schema"), (1, base64.b64encode(arrow.serialize().to_pybytes()))]
        tail = bytes([1 << 4 | LIST, 1 << 4 | STRUCT]) + b"".join(_binary(*one) for one in pair) + b"\0"
    tail += _binary(1 if tail else 2, opened.metadata.created_by.encode()) + b"\0"
    return FileFacts(
        b"".join([head, *flat, bytes([1 << 4 | I64, 0])]),
        tail,
        tuple((column.name, column.leaves) for column in columns),
        said.get(b"huggingface", b""),
        constants,
    )


def _binary(step: int, value: bytes) -> bytes:
    return bytes([step << 4 | BINARY, *_varint(len(value))]) + value


def _varint(number: int) -> list[int]:
    out = []
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return [*out, number]


def opened_footer(end: bytes) -> Arrow:
    """Open a footer without data in pyarrow. Damage raises a ValueError."""
    data = MAGIC + end
    most = len(data)  # a list that claims more elements than there are bytes allocates nothing
    limits = {"thrift_string_size_limit": most, "thrift_container_size_limit": most}
    return opened_parquet(library().BufferReader(data), **limits)


def opened_parquet(file: Arrow, **options: object) -> Arrow:
    with arrow_errors("its footer is damaged"):
        import pyarrow.parquet as pq

        return pq.ParquetFile(file, **options)


def _columns(
    opened: Arrow, count: int, chosen: Callable[[Sequence[str]], Sequence[str]]
) -> tuple[tuple[ParquetColumn, ...], int]:
    with arrow_errors("its schema is damaged"):
        schema, leaves = opened.schema_arrow, opened.metadata.schema
        names = schema.names
    check_names(names)
    ends = [0, *itertools.accumulate(leaf_count(field.type) for field in schema)]
    total = opened.metadata.num_columns
    if ends[-1] != total or len(schema) != count:
        raise ValueError(f"its schema has {total} columns of values, and {ends[-1]} by the types of Arrow")
    read, columns, position = set(chosen(names)), list[ParquetColumn](), 0
    for field, (start, stop) in zip(schema, itertools.pairwise(ends), strict=True):
        if field.name in read:
            own = tuple(_leaf(leaves.column(k), k, position + k - start) for k in range(start, stop))
            columns.append(ParquetColumn(field.name, field.type, own))
            position += len(own)
    return tuple(columns), total


def _leaf(said: Arrow, number: int, position: int) -> ParquetLeaf:
    if said.physical_type not in _TYPES:
        raise ValueError(f"column {said.path!r:.200} is of a type that is not known")
    kind = _TYPES.index(said.physical_type)
    value_bytes = max(0, said.length) if kind == len(_VALUE_BYTES) else _VALUE_BYTES[kind]
    levels = (said.max_definition_level > 0) + (said.max_repetition_level > 0)
    return ParquetLeaf(
        number, position, said.path, said.physical_type, levels, said.max_repetition_level == 0, value_bytes
    )


def _group(
    listed: _ListedGroup,
    name: str,
    leaves: Sequence[ParquetLeaf],
    total: int,
    ordered: frozenset[int],
    end: int,
    limits: Limits,
) -> Group:
    rows = _count(listed.said, 3, f"{name} has {{}} rows")
    if len(listed.chunks) != total:
        raise ValueError(f"{name} does not have the {total} columns of the schema")
    if not rows:
        return Group(0, (), (), b"")
    chunks, statistics, opened, packed = list[ColumnChunk](), list[Statistics](), 0, 0
    for leaf in leaves:
        where = f"column {leaf.path!r:.200} of {name}"
        try:
            chunk, bounds = _chunk(listed.chunks[leaf.number][0], leaf, end)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if leaf.is_flat and chunk.values != rows:
            raise ValueError(f"{where} has {chunk.values} values, and the group {rows} rows")
        check_bytes(where, chunk.size, limits.member_bytes)
        opened += chunk.unpacked + chunk.values * leaf.value_bytes
        packed += chunk.size
        chunks.append(chunk)
        if leaf.number not in ordered:  # older statistics follow another order
            bounds = bounds._replace(low=None, high=None)
        statistics.append(bounds)
    packed = max(packed, min(end, _count(listed.said, 6, "group has {} bytes")))
    most = limits.unpacked(packed)
    if opened > most:
        raise LimitError(f"{name}, of {packed} bytes, would take {opened} once opened, over the limit of {most}")
    head = bytes([1 << 4 | LIST, 15 << 4 | STRUCT, *_varint(len(leaves))])
    tail = bytes([1 << 4 | I64, 0, 1 << 4 | I64, *_varint(rows << 1), 0])
    return Group(
        rows, tuple(chunks), statistics, b"".join([head, *(listed.chunks[leaf.number][1] for leaf in leaves), tail])
    )


def _chunk(one: Struct, leaf: ParquetLeaf, end: int) -> tuple[ColumnChunk, Statistics]:
    said = one.get(3)
    if 8 in one or 9 in one:
        raise ValueError("is encrypted, and headrace has no keys: decrypt it, or leave it out by columns=")
    if one.get(1):
        raise ValueError("is in a file of its own, which is not read here")
    if type(said) is not dict:
        raise ValueError("does not state its place")
    path = said.get(3)
    names = [part for part in path if type(part) is bytes] if type(path) is list else []
    if b".".join(names).decode("utf-8", "replace") != leaf.path or said.get(1) != _TYPES.index(leaf.physical):
        raise ValueError("differs from the schema")
    codec = _count(said, 4, "is compressed by {}")
    if codec >= len(CODECS) or CODECS[codec] == "lzo":
        name = CODECS[codec] if codec < len(CODECS) else f"the codec {codec}"
        raise ValueError(f"is compressed by {name}, which is not read")
    start, dictionary = _count(said, 9, "is at {}"), _count(said, 11, "has its dictionary at {}")
    if len(MAGIC) <= dictionary < start:
        start = dictionary
    size, values = _count(said, 7, "has {} bytes"), _count(said, 5, "has {} values")
    if start < len(MAGIC) or start + size > end:
        raise ValueError(f"is from byte {start} to {start + size}, and the columns from 4 to {end}")
    if values and not size:
        raise ValueError(f"has {values} values in no bytes")
    statistics = said.get(12)
    bounds = Statistics(*map(statistics.get, (6, 5, 3)) if type(statistics) is dict else (None, None, None))
    return ColumnChunk(codec, values, start, size, _count(said, 6, "unpacks to {} bytes")), bounds


def _count(one: Struct, field: int, text: str) -> int:
    """Return a number of at least 0. An absent field counts as 0."""
    value = one.get(field, 0)
    if type(value) is not int or value < 0:
        raise ValueError(text.format(value))
    return value


END_BYTES = 8  # the footer's length and the magic
TAIL_BYTES = 64 * 1024
_ENCRYPTED = b"PARE"


async def read_end(reads: Reads, entry: ShardEntry, limits: Limits) -> tuple[PinnedObject, bytes]:
    """Read the footer of a file. One read suffices if its length is listed and the footer is short."""
    shard = PinnedObject(reads, entry.url)
    listed = None if entry.version is None else entry.version.size
    start = -TAIL_BYTES if listed is None else max(0, listed - TAIL_BYTES)
    tail = await shard.read(start, TAIL_BYTES if listed is None else max(1, listed - start))
    size = shard.size
    if listed not in (None, size):  # a later check raises the error
        tail = await shard.read(-TAIL_BYTES, TAIL_BYTES)
    is_short = size < len(MAGIC) + END_BYTES
    if is_short or (len(tail) == size and tail[: len(MAGIC)] not in (MAGIC, _ENCRYPTED)):
        raise ValueError(f"it has {size} bytes, which do not begin as Parquet does")
    length = int.from_bytes(tail[-END_BYTES:-4], "little")
    if tail[-4:] == _ENCRYPTED:
        raise ValueError("its footer is encrypted, and headrace has no keys: decrypt it first")
    if tail[-4:] != MAGIC:
        raise ValueError("it does not end as Parquet does: it is cut off, or was not written to its end")
    if length + END_BYTES + len(MAGIC) > size:
        raise ValueError(f"its footer would have {length} bytes, and all of it has {size}")
    check_bytes("its footer", length, limits.unpacked_free_bytes)
    missing = length + END_BYTES - len(tail)
    if missing > 0:
        tail = memoryview(bytes(await shard.read(size - len(tail) - missing, missing)) + tail)
    return shard, bytes(tail[-length - END_BYTES : -END_BYTES])
