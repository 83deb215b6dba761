"""Checks of the pages of column chunks.

Page headers are checked for damage and memory use before pyarrow decodes the pages. A few bytes of a page can represent
any number of long values: by a dictionary, or because each value states how many bytes of the previous one it begins
with (DELTA_BYTE_ARRAY).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LimitError
from headrace.formats.arrow_values import arrow_errors, library
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import ParquetLeaf, Struct, ThriftReader, Value

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
