"""The footer of a Parquet file: which columns it has, and where those of each group of rows lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import LimitError
from headrace.formats.json_values import as_object
from headrace.formats.limits import Limits
from headrace.formats.parquet.schema import ParquetColumn, Schema, SchemaLeaf, columns_of
from headrace.formats.parquet.thrift import LIST, Struct, ThriftReader, Value

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
END_BYTES = 8  # the footer's length and the magic

CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
_NOT_READ = ("lzo",)
_BY_TYPE = 1  # an order of values: that of their type
_ROW_BYTES = 32  # that a row takes in the table of samples


class ColumnChunk(NamedTuple):
    """The values of a leaf in one group of rows.

    Attributes:
        kind, codec: as Parquet numbers them.
        values: how many there are, with those that are missing; -1: nobody knows.
        start, size: where its pages lie.
        unpacked: bytes that they say they unpack to.
        page_index: where the index of its pages lies, and its bytes; 0 bytes: there is none.
        bounds_index: the same of what is the lowest value of each page, and the highest, where those can be relied on.
        statistics: (lowest, highest, how many are missing), where they are said.
    """

    kind: int
    codec: int
    values: int
    start: int
    size: int
    unpacked: int
    page_index: tuple[int, int]
    bounds_index: tuple[int, int]
    statistics: tuple[Value | None, Value | None, int | None]


class Group(NamedTuple):
    """A group of rows, with the chunks of all leaves that are read, in the order of the schema."""

    rows: int
    chunks: tuple[ColumnChunk, ...]


def by_column(
    columns: Sequence[ParquetColumn], chunks: Sequence[ColumnChunk]
) -> Iterator[tuple[ParquetColumn, Sequence[ColumnChunk]]]:
    """Each column of a group with its chunks."""
    first = 0
    for column in columns:
        yield column, chunks[first : first + len(column.leaves)]
        first += len(column.leaves)


@dataclass(frozen=True, slots=True)
class Footer:
    """What a footer says of the columns that are read."""

    schema: Schema
    groups: tuple[Group, ...]


def read_footer(
    data: bytes, end: int, chosen: Callable[[Sequence[ParquetColumn]], Sequence[ParquetColumn]], limits: Limits
) -> Footer:
    """What the footer `data` says, which begins at byte `end` of its file.

    Args:
        chosen: which of the columns are read.

    Raises:
        ValueError: it is damaged, or its columns are such as are not read here.
        LimitError: it asks for more than may be held.
    """
    reader, groups = ThriftReader(data), list[Struct]()
    elements: list[tuple[bytes, Struct]] = []
    facts: dict[bytes, bytes] = {}
    rows, writer, orders = 0, b"", list[Value]()
    for number, kind in reader.fields():
        if number == 2:
            elements = reader.raw(kind)
        elif number == 4:
            groups = [one for _, one in reader.raw(kind)]
        elif number == 5 and kind == LIST:
            facts = dict(_fact(one) for _, one in reader.raw(kind))
        else:
            value = reader.value(kind)
            rows = value if number == 3 and type(value) is int else rows
            writer = value if number == 6 and type(value) is bytes else writer
            orders = value if number == 7 and type(value) is list else orders
            if number == 8:
                raise ValueError("it is encrypted, and headrace has no keys: decrypt it first")
    columns = columns_of(elements, _said(facts.get(b"huggingface", b"")))
    read = chosen(columns)
    count = sum(len(column.leaves) for column in read)
    if count > limits.fields:
        raise LimitError(
            f"{count} columns would be read, over the limit of {limits.fields}: name those that are needed by "
            "columns=, or give Limits(fields=…)"
        )
    numbers = _leaf_numbers(columns, read)
    total = sum(len(column.leaves) for column in columns)
    ordered = frozenset(k for k, order in enumerate(orders) if type(order) is dict and _BY_TYPE in order)
    found = tuple(_group(one, k, numbers, total, end, limits, ordered) for k, one in enumerate(groups))
    if sum(group.rows for group in found) != rows:
        raise ValueError(f"it says {rows} rows, and its groups have {sum(group.rows for group in found)}")
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * end)
    if rows * _ROW_BYTES > most:
        raise LimitError(f"a table of {rows} rows in {end} bytes would take over {most} bytes, the limit")
    _check_places(found, end)
    return Footer(Schema(tuple(read), facts.get(b"ARROW:schema", b""), writer), found)


def _fact(one: Struct) -> tuple[bytes, bytes]:
    key, value = one.get(1, b""), one.get(2, b"")
    if type(key) is not bytes or type(value) is not bytes:
        raise ValueError("what it says of itself is no text")
    return key, value


def _said(text: bytes) -> Mapping[str, object]:
    """What `datasets` says of columns."""
    try:
        said = as_object(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        return {}
    info = as_object((said or {}).get("info"))
    return as_object((info or {}).get("features")) or {}


def _leaf_numbers(
    columns: Sequence[ParquetColumn], read: Sequence[ParquetColumn]
) -> list[tuple[int, ParquetColumn, SchemaLeaf]]:
    """(number among all leaves, its column, itself) of each leaf that is read."""
    numbers, first = list[tuple[int, ParquetColumn, SchemaLeaf]](), 0
    for column in columns:
        if column in read:
            numbers += [(first + k, column, leaf) for k, leaf in enumerate(column.leaves)]
        first += len(column.leaves)
    return numbers


def _group(
    one: Struct,
    number: int,
    leaves: Sequence[tuple[int, ParquetColumn, SchemaLeaf]],
    total: int,
    end: int,
    limits: Limits,
    ordered: frozenset[int],
) -> Group:
    rows, chunks = _count(one, 3, f"group {number} has {{}} rows"), one.get(1)
    if type(chunks) is not list or len(chunks) != total:
        raise ValueError(f"group {number} does not have the {total} columns of the schema")
    if not rows:
        return Group(0, ())
    found, opened, packed = [], 0, 0
    for k, column, leaf in leaves:
        where = f"column {column.name!r:.200} of group {number}"
        try:
            chunk = _chunk(chunks[k], leaf, end, is_ordered=k in ordered)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        if len(leaf.path) == 1 and chunk.values != rows:
            raise ValueError(f"{where} has {chunk.values} values, and the group {rows} rows")
        if chunk.size > limits.member_bytes:
            raise LimitError(f"{where} has {chunk.size} bytes, over the limit of {limits.member_bytes}")
        opened += chunk.unpacked + chunk.values * leaf.nbytes
        packed += chunk.size
        found.append(chunk)
    packed = max(packed, min(end, _count(one, 6, "group has {} bytes")))
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * packed)
    if opened > most:
        raise LimitError(
            f"group {number}, of {packed} bytes, would take {opened} once opened, over the limit of {most}"
        )
    return Group(rows, tuple(found))


def _chunk(one: Value, leaf: SchemaLeaf, end: int, *, is_ordered: bool) -> ColumnChunk:
    if type(one) is not dict:
        raise ValueError("is none")
    said = one.get(3)
    if 8 in one or 9 in one:
        raise ValueError("is encrypted, and headrace has no keys: decrypt it, or leave it out by columns=")
    if one.get(1):
        raise ValueError("lies in a file of its own, which is not read here")
    if type(said) is not dict:
        raise ValueError("does not say where it lies")
    if said.get(3) != list(leaf.path) or said.get(1) != leaf.kind:
        raise ValueError("is another one than the schema says")
    codec = _count(said, 4, "is compressed by {}")
    if codec >= len(CODECS) or CODECS[codec] in _NOT_READ:
        name = CODECS[codec] if codec < len(CODECS) else f"the codec {codec}"
        raise ValueError(f"is compressed by {name}, which is not read")
    start, dictionary = _count(said, 9, "lies at {}"), _count(said, 11, "has its dictionary at {}")
    if len(MAGIC) <= dictionary < start:
        start = dictionary
    size, values = _count(said, 7, "has {} bytes"), _count(said, 5, "has {} values")
    if start < len(MAGIC) or start + size > end:
        raise ValueError(f"lies from byte {start} to {start + size}, and the columns from 4 to {end}")
    if values and not size:
        raise ValueError(f"has {values} values in no bytes")
    index, bounds = (
        (_count(one, field, "has its page index at {}"), _count(one, field + 1, "has a page index of {} bytes"))
        for field in (4, 6)
    )
    for at, nbytes in (index, bounds):
        if nbytes and at + nbytes > end:
            raise ValueError(f"has its page index at {at}, and the footer begins at {end}")
    unpacked = _count(said, 6, "unpacks to {} bytes")
    statistics = _statistics(said.get(12), is_ordered=is_ordered)
    bounds = bounds if is_ordered else (0, 0)
    return ColumnChunk(leaf.kind, codec, values, start, size, unpacked, index, bounds, statistics)


def _statistics(said: Value | None, *, is_ordered: bool) -> tuple[Value | None, Value | None, int | None]:
    """(lowest, highest, missing), as far as they can be relied on: the older ones go by another order."""
    if type(said) is not dict:
        return None, None, None
    missing = said.get(3)
    low, high = (said.get(6), said.get(5)) if is_ordered else (None, None)
    return low, high, missing if type(missing) is int else None


def _count(one: Struct, field: int, text: str) -> int:
    """A number that is not negative; 0 where it is not there."""
    value = one.get(field, 0)
    if type(value) is not int or value < 0:
        raise ValueError(text.format(value))
    return value


def _check_places(groups: Sequence[Group], end: int) -> None:
    """See that no chunk lies in another one."""
    places = sorted((chunk.start, chunk.start + chunk.size) for group in groups for chunk in group.chunks if chunk.size)
    last = 0
    for start, stop in places:
        if start < last:
            raise ValueError(f"two columns have the bytes at {start}")
        last = stop
    if last > end:
        raise ValueError(f"a column lies up to byte {last}, and the footer begins at {end}")
