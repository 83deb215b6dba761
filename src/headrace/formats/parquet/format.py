"""The Parquet format: row groups are blocks, and the chunks of their columns members.

Predicates are compared with the statistics of row groups, to skip groups without kept rows. A bound of uncertain
meaning is ignored: the rows are read, and the predicate is evaluated on each.
"""

from __future__ import annotations

import bisect
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace._util.pickled import packed_once
from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.arrow_values import Arrow, TableRows, arrow_errors, kind_of, library
from headrace.formats.format import Block, MemberRange, ShardEntry, keys_of, rows_of_blocks
from headrace.formats.index import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import (
    CODECS,
    END_BYTES,
    MAGIC,
    ColumnChunk,
    FileFacts,
    Footer,
    Group,
    ParquetColumn,
    ParquetLeaf,
    Struct,
    ThriftReader,
    Value,
    opened_parquet,
    read_end,
    read_footer,
)
from headrace.formats.pinned_object import SeekableFile
from headrace.formats.tables import (
    ALL,
    NONE,
    ListedTable,
    TableFormat,
    Term,
    Where,
    check_kinds,
    columns_of,
    constants_of,
    kept_rows,
    known,
    number_of,
    stored_type,
)
from headrace.types import Buffer


class Parquet(TableFormat):
    """Parquet files. Each row is a sample.

    Args:
        columns: Columns to read. By default all columns whose names do not begin with "__".
        where: Predicate for the rows to keep, in the form of pyarrow's `filters=`: a list of (column, operator, value)
            that must all hold, or a list of alternative lists. Operators are "=", "==", "!=", "<", "<=", ">", ">=",
            "in" and "not in". A missing value only passes "not in". The columns need not be in `columns`. Folders named
            "key=value" are columns, too. Values of folders exclude whole files, and statistics in footers exclude row
            groups. The predicate is evaluated on all other rows, as by `.filter()`.

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

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        with self.errors_named(shard.url):
            if self.is_left_out(shard.url):
                return ShardIndex(Rows.empty(), None, -1, None)
            end, data = await read_end(reads, shard, limits)
            read = partial(self._read, data, shard, end.size, limits)
            is_quick = len(data) <= _QUICK_BYTES
            footer, where = read() if is_quick else await anyio.to_thread.run_sync(read)
            features = footer.file.features
        kinds = [(column.name, kind_of(column.type, features.get(column.name))) for column in footer.columns]
        kinds += [(name, "of the path") for name, _ in footer.file.constants]
        rows, opened_bytes = _rows(footer, where)
        return ShardIndex(rows, None, end.size, end.etag, None, opened_bytes, tuple(sorted(kinds)))

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        facts: GroupFacts = block.about
        given = facts.bodies(block.members, bodies)
        constants = {name: value for name, value in facts.file.constants if name in given and self.is_shown(name)}
        names, asked = [name for name, _ in facts.file.columns if name in given], columns_of(facts.where)
        columns = decoded(facts, [name for name in names if name in asked], given, block.limits)
        kept = None if facts.where == ALL else kept_rows(facts.where, library().table(columns))
        if kept is not None and not kept.any():
            return [None] * facts.rows
        shown = [name for name in names if self.is_shown(name)]
        columns |= decoded(facts, [name for name in shown if name not in asked], given, block.limits)
        if not shown:
            return [constants if kept is None or kept[k] else None for k in range(facts.rows)]
        return TableRows(library().table({name: columns[name] for name in shown}), facts.file.features, constants, kept)

    def _read(self, data: bytes, shard: ShardEntry, size: int, limits: Limits) -> tuple[Footer, list[Where]]:
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
        return footer, remaining(known(self.where, constants), footer)


PARQUET = Parquet()

_QUICK_BYTES = 16 * 1024  # of a footer; parsing these takes some milliseconds


def _rows(footer: Footer, where: Sequence[Where]) -> tuple[Rows, int]:
    """Return the table of remaining samples, and the approximate decoded bytes of all groups."""
    found, keys, first, opened_bytes = [], [np.zeros(0, np.int64)], 0, 0
    for group, left in zip(footer.groups, where, strict=True):
        if left != NONE:
            found.append(GroupFacts(footer.file, group.rows, group.chunks, group.raw, left))
            keys.append(np.arange(first, first + group.rows))
            opened_bytes += sum(chunk.unpacked for chunk in group.chunks)
        first += group.rows
    members, counts = [facts.members for facts in found], [facts.rows for facts in found]
    return rows_of_blocks(keys_of(np.concatenate(keys)), counts, members, found), opened_bytes


_TAIL_BYTES = 64 * 1024
_TAIL_AT = 2**62  # beyond the columns of any file


@packed_once(tuple)
class GroupFacts(NamedTuple):
    """Metadata that a worker needs to decode a row group.

    Attributes:
        chunks: The chunks of the leaves that are read, by position.
        raw: The group's footer entry, with the columns that are read.
        where: The remaining predicate.
    """

    file: FileFacts
    rows: int
    chunks: Sequence[ColumnChunk]
    raw: bytes
    where: Where = ALL

    @property
    def members(self) -> list[MemberRange]:
        """The byte ranges to read, in order.

        The first bytes of the file are read with the column that follows them, so that checking them needs no request.
        """
        chunks = [(self.chunks[leaf.position], name) for name, leaves in self.file.columns for leaf in leaves]
        places = [(chunk.start, chunk.start + chunk.size, name) for chunk, name in chunks]
        places = [(0 if start == len(MAGIC) else start, stop, name) for start, stop, name in places]
        begin = min((start for start, _, _ in places), default=0)
        places += [(begin, begin, name) for name, _ in self.file.constants]
        return sorted((start, stop - start, name) for start, stop, name in places)

    def bodies(self, names: Sequence[str], bodies: Sequence[bytes]) -> Mapping[str, Sequence[bytes]]:
        """Return the chunks of each column, in file order. Checks the magic (ValueError)."""
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
    facts: GroupFacts, names: Sequence[str], bodies: Mapping[str, Sequence[bytes]], limits: Limits
) -> dict[str, Arrow]:
    """Decode some columns of a row group. `bodies` are their chunks, in file order."""
    if not names:
        return {}
    chunks, dictionaries, read = dict[int, Buffer](), list[str](), dict[str, Sequence[ParquetLeaf]]()
    for name, leaves in facts.file.columns:
        if name not in names:
            continue
        read[name] = leaves
        starts = sorted(facts.chunks[leaf.position].start for leaf in leaves)
        own = dict(zip(starts, bodies[name], strict=True))
        for leaf in leaves:
            chunk = facts.chunks[leaf.position]
            chunks[chunk.start] = data = own[chunk.start]
            try:
                if _check_chunk(data, leaf, chunk, limits):
                    dictionaries.append(leaf.path)
            except LimitError as error:
                raise LimitError(f"column {name!r:.200}: {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"column {name!r:.200}: {error}") from None
    footer = facts.file.footer(facts.raw)
    positions = [leaf.position for leaves in read.values() for leaf in leaves]

    def table_of(**options: object) -> Arrow:
        file = opened_parquet(ChunkFile(chunks, footer), pre_buffer=False, **options)
        with arrow_errors():
            table = file.reader.read_row_group(0, column_indices=positions, use_threads=False)
        if any(len(column) != facts.rows for column in table.columns):
            counts = [len(column) for column in table.columns][:9]
            raise ValueError(f"its columns have {counts} rows, and should have {facts.rows}")
        return table

    table = table_of(read_dictionary=dictionaries)
    columns = dict(zip(read, table.columns, strict=True))
    old = [name for name, leaves in read.items() if any(leaf.physical == "INT96" for leaf in leaves)]
    if old:
        coarse = dict(zip(read, table_of(coerce_int96_timestamp_unit="us").columns, strict=True))
        columns |= {name: _without_wrap(columns[name], coarse[name]) for name in old}
    return columns


def _check_chunk(data: bytes, leaf: ParquetLeaf, chunk: ColumnChunk, limits: Limits) -> bool:
    """Check the pages of a chunk. True if its values are decoded as a dictionary."""
    if len(data) != chunk.size:
        raise ValueError(f"it has {len(data)} bytes, and the footer has {chunk.size}")
    pages = check_pages(data, leaf, CODECS[chunk.codec], limits)
    if pages.values != chunk.values:
        raise ValueError(f"its pages have {pages.values} values, and the footer has {chunk.values}")
    return pages.as_dictionary


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


class Question(NamedTuple):
    """A term of a predicate for the bounds of a leaf.

    Attributes:
        bound: Parses the bytes of a bound. May raise, or return None for an unknown bound.
        values: The values of the term, comparable with bounds, ascending.
    """

    op: str
    position: int
    bound: Callable[[bytes], Any]
    values: Sequence[Any]


def remaining(where: Where, footer: Footer) -> list[Where]:
    """Return the alternatives of `where` that may hold in each row group. Incomparable columns raise an OptionError."""
    by_name = {column.name: column for column in footer.columns}
    check_kinds(where, {name: column.type for name, column in by_name.items()})

    def question(term: Term) -> Question:
        column = by_name[term.column]
        kind = stored_type(column.type)
        if term.kind == "text":
            values = [str(value).encode("utf-8", "surrogatepass") for value in term.values]
        else:
            values = [number_of(value, kind) for value in term.values]
        return Question(term.op, column.leaves[0].position, _bounds(column, kind), sorted(values))

    asked = [list(map(question, some)) for some in where]
    return [
        tuple(compress(where, [all(_may_hold(one, group) for one in these) for these in asked])) if group.rows else NONE
        for group in footer.groups
    ]


def _may_hold(asked: Question, group: Group) -> bool:
    op, values, said = asked.op, asked.values, group.statistics[asked.position]
    if op == "not in":
        return True
    if said.missing == group.chunks[asked.position].values:
        return False
    low, high = _bound(asked, said.low), _bound(asked, said.high)
    if low is None or high is None or low > high:
        return True
    match op:
        case "==" | "in":
            least = bisect.bisect_left(values, low)  # the first value that is not below the bounds
            return least < len(values) and bool(values[least] <= high)
        case "<":
            return bool(low < values[0])
        case "<=":
            return bool(low <= values[0])
        case ">":
            return bool(high > values[0])
        case ">=":
            return bool(high >= values[0])
        case _:
            return True


def _bound(asked: Question, said: Value | None) -> Any:
    try:
        return asked.bound(said) if type(said) is bytes else None
    except (struct.error, ValueError):
        return None


def _bounds(column: ParquetColumn, kind: Arrow) -> Callable[[bytes], Any]:
    """Return a parser of the bounds of a column, whose values are stored as `kind`."""
    types, physical = library().types, column.leaves[0].physical
    if types.is_boolean(kind):
        return {b"\0": False, b"\1": True}.get
    if types.is_floating(kind):
        number = struct.Struct("<f" if physical == "FLOAT" else "<d")
        return lambda data: None if math.isnan(value := number.unpack(data)[0]) else value
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return bytes
    is_scaled = types.is_decimal(kind) or (types.is_timestamp(kind) and kind.unit == "s")  # Parquet has no seconds
    if physical not in ("INT32", "INT64") or is_scaled:
        return lambda data: None  # noqa: ARG005
    whole = struct.Struct("<" + ("i" if physical == "INT32" else "q"))
    if types.is_unsigned_integer(kind):
        whole = struct.Struct(whole.format.upper())
    return lambda data: whole.unpack(data)[0]


# A few bytes of a page can claim any number of long values: checked before pyarrow decodes it.

_DATA, _INDEX, _DICTIONARY, _DATA_2 = range(4)
_BY_DICTIONARY, _DELTA_BYTE_ARRAY = (2, 8), 7  # encodings
_KNOWN = (0, 2, 3, 4, 5, 6, 7, 8, 9)
_WIDTH_MOST = 64


class _Page(NamedTuple):
    """A page. `level_bytes` are uncompressed levels before the values. None: they are in `body`."""

    body: memoryview
    unpacked: int
    values: int
    level_bytes: int | None
    is_packed: bool


class PageSummary(NamedTuple):
    """The number of values of all data pages, and whether to decode them as a dictionary.

    `as_dictionary` is set for text or bytes if all pages use one, or plain values would take too much memory.
    """

    values: int
    as_dictionary: bool


def check_pages(data: bytes, leaf: ParquetLeaf, codec: str, limits: Limits) -> PageSummary:
    """Check the pages of a column chunk and their checksums."""
    view, at, values, unpacked, by_dictionary = memoryview(data), 0, 0, 0, 0
    most = limits.unpacked(len(data))
    dictionary, deltas = None, list[_Page]()
    while at < len(data):
        reader = ThriftReader(view[at : at + limits.header_bytes])
        try:
            head = reader.struct()
            body = view[at + reader.at :][: _number(head, 3)]
            kind, full = _number(head, 1), _number(head, 2)
            if len(body) < _number(head, 3):
                raise ValueError(f"its {_number(head, 3)} bytes reach beyond the column's end")
            if type(head.get(4)) is int and zlib.crc32(body) != head[4] & 0xFFFFFFFF:  # type: ignore[operator]
                raise ValueError("its bytes do not match its checksum")
            unpacked += full
            if kind == _DICTIONARY:
                if at:
                    raise ValueError("a dictionary comes after other pages")
                said = _of_values(head.get(7), 2)
                dictionary = _Page(body, full, _number(said, 1), None, is_packed=True)
            elif kind in (_DATA, _DATA_2):
                said = _of_values(head.get(5 if kind == _DATA else 8), 2 if kind == _DATA else 4)
                count, encoding = _number(said, 1), said[2 if kind == _DATA else 4]
                values += count
                by_dictionary += count if encoding in _BY_DICTIONARY else 0
                if encoding == _DELTA_BYTE_ARRAY:
                    deltas.append(_data_page(body, full, count, said, kind))
            elif kind != _INDEX:
                raise ValueError(f"it is of kind {kind}, which is not known")
        except ValueError as error:
            raise ValueError(f"the page at byte {at}: {error}") from None
        if unpacked > most:
            raise LimitError(f"its pages unpack to over {unpacked} bytes, the limit is {most}")
        at += reader.at + len(body)
    if leaf.physical != "BYTE_ARRAY":
        return PageSummary(values, as_dictionary=False)
    _check_deltas(deltas, codec, leaf.levels, most)
    if dictionary is None or by_dictionary == values:
        return PageSummary(values, as_dictionary=by_dictionary > 0)
    is_large = dictionary.unpacked * by_dictionary > most and _longest(dictionary, codec) * by_dictionary > most
    return PageSummary(values, as_dictionary=is_large)


def _data_page(body: memoryview, unpacked: int, values: int, said: Struct, kind: int) -> _Page:
    if kind == _DATA:
        return _Page(body, unpacked, values, None, is_packed=True)
    levels = _number({5: 0, **said}, 5) + _number({6: 0, **said}, 6)
    if levels > min(len(body), unpacked):
        raise ValueError(f"its levels have {levels} bytes, and all of it {len(body)}")
    return _Page(body, unpacked, values, levels, is_packed=said.get(7) is not False)


def _number(head: Struct, field: int) -> int:
    value = head.get(field, -1)
    if type(value) is not int or value < 0:
        raise ValueError("it does not state its size" if field == 3 else "its head is damaged")
    return value


def _of_values(said: Value | None, encoding: int) -> Struct:
    """Return the part of a header about values. `encoding` is the field of their encoding."""
    if type(said) is not dict:
        raise ValueError("its head is damaged")
    if _number(said, encoding) not in _KNOWN:
        raise ValueError(f"its encoding {said[encoding]!r} is not known")
    return said


def _check_deltas(pages: Sequence[_Page], codec: str, levels: int, most: int) -> None:
    """Raise a LimitError if delta-encoded values take more than `most` bytes."""
    if sum(page.unpacked * page.values for page in pages) <= most:
        return
    taken = 0
    for page in pages:
        data = _unpacked(page, codec)
        if page.level_bytes is None:
            for _ in range(levels):
                data = data[4 + int.from_bytes(data[:4], "little") :]
        taken += int(delta_numbers(data, page.values).sum()) + page.unpacked
        if taken > most:
            raise LimitError(f"its values take {taken} bytes or more once they are decoded, the limit is {most}")


def _longest(dictionary: _Page, codec: str) -> int:
    data, at, longest = _unpacked(dictionary, codec), 0, 0
    for _ in range(dictionary.values):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise ValueError("its dictionary is cut off")
        longest = max(longest, size)
    return longest


def _unpacked(page: _Page, codec: str) -> memoryview:
    body, size = page.body[page.level_bytes or 0 :], page.unpacked - (page.level_bytes or 0)
    if codec == "uncompressed" or not page.is_packed:
        return body
    if codec == "lz4":
        raise ValueError("its lz4 cannot be looked into: write it with lz4_raw or zstd")
    pa = library()
    with arrow_errors():
        return memoryview(pa.Codec(codec).decompress(pa.py_buffer(body), decompressed_size=size)).cast("B")


def delta_numbers(data: memoryview, most: int) -> NDArray[np.int64]:
    """Decode DELTA_BINARY_PACKED. Damage, or more than `most` numbers, raises a ValueError."""
    reader = ThriftReader(data)
    block, parts, count, first = reader.unsigned(), reader.unsigned(), reader.unsigned(), reader.signed()
    if count > most or not parts or not block or block % (parts * 8) or block > 2**16:
        raise ValueError(f"it has {count} lengths of values in blocks of {block}, and {most} values")
    deltas, each, left = [np.array([first], np.int64)], block // parts, count - 1
    while left > 0:
        low = (reader.signed() + 2**63) % 2**64 - 2**63
        for width in reader.take(parts):
            if left <= 0:
                break
            if width > _WIDTH_MOST:
                raise ValueError("its lengths of values are damaged")
            packed = np.frombuffer(reader.take(each * width // 8), np.uint8)
            bits = np.unpackbits(packed, bitorder="little").reshape(each, width)
            numbers = bits.astype(np.int64) @ (np.int64(1) << np.arange(width, dtype=np.int64))
            deltas.append(numbers[:left] + low)
            left -= each
    numbers = np.cumsum(np.concatenate(deltas))[:count]
    if len(numbers) and int(numbers.min()) < 0:
        raise ValueError("a length of a value is less than none")
    return numbers
