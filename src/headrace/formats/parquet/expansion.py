"""Text and bytes that take more memory than their pages say: repeated by a dictionary, or by what values begin with.

A page of some bytes can stand for any number of long values. What they will take is computed before they are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import LimitError
from headrace.formats.arrow_values import library
from headrace.formats.parquet.schema import ParquetColumn
from headrace.formats.parquet.thrift import ThriftReader

DELTA_BYTE_ARRAY = 7
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_OPTIONAL, _REPEATED = 1, 2
_VARINT_BYTES = 10
_WIDTH_MOST = 64


class RepeatingPage(NamedTuple):
    """A page whose values may be longer than it is.

    Attributes:
        body: as it lies in the file.
        unpacked: bytes of it when it is unpacked.
        values: how many it has.
        levels: bytes of levels before the values, which are not packed; None: they are packed with them, and say their
            length themselves.
        is_packed: whether it is compressed at all.
    """

    body: memoryview
    unpacked: int
    values: int
    levels: int | None
    is_packed: bool


def check_beginnings(pages: Sequence[RepeatingPage], codec: int, levels: int, most: int) -> None:
    """See that values which say how many bytes of the one before they begin with do not take more than `most` bytes.

    Args:
        levels: how many kinds of levels come before the values.

    Raises:
        LimitError: they take more.
        ValueError: a page is damaged, or cannot be unpacked here.
    """
    if sum(page.unpacked * page.values for page in pages) <= most:
        return
    taken = 0
    for page in pages:
        body = _values_of(page, codec, levels)
        taken += int(_delta_numbers(body, page.values).sum()) + page.unpacked
        if taken > most:
            raise LimitError(f"its values take {taken} bytes or more once they are decoded, the limit is {most}")


def longest_value(page: RepeatingPage, codec: int) -> int:
    """The bytes of the longest value of a dictionary of text or bytes.

    Raises:
        ValueError: it is damaged, or cannot be unpacked here.
    """
    data, at, longest = _unpacked(page.body, page.unpacked, codec if page.is_packed else 0), 0, 0
    for _ in range(page.values):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise ValueError("its dictionary is cut off")
        longest = max(longest, size)
    return longest


@lru_cache(maxsize=256)
def levels_of(column: ParquetColumn) -> tuple[int, ...]:
    """For each leaf of a column how many kinds of levels (of what is missing, of what is repeated) its pages have."""
    elements = [ThriftReader(one).struct() for one in column.elements]
    found, at = list[int](), 0

    def go(is_missing: bool, is_repeated: bool) -> None:
        nonlocal at
        one = elements[at]
        at += 1
        is_missing = is_missing or one.get(3) in (_OPTIONAL, _REPEATED)
        is_repeated = is_repeated or one.get(3) == _REPEATED
        children = one.get(5)
        if not children or type(children) is not int:
            found.append(is_missing + is_repeated)
            return
        for _ in range(children):
            go(is_missing, is_repeated)

    go(False, False)
    return tuple(found)


def _values_of(page: RepeatingPage, codec: int, levels: int) -> memoryview:
    """What of a page are values."""
    if page.levels is not None:
        packed, unpacked = page.body[page.levels :], page.unpacked - page.levels
        return _unpacked(packed, unpacked, codec if page.is_packed else 0)
    data, at = _unpacked(page.body, page.unpacked, codec), 0
    for _ in range(levels):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    return data[at:]


def _unpacked(body: memoryview, size: int, codec: int) -> memoryview:
    name = _CODECS.get(codec, "")
    if name is None:
        return body
    if not name:
        raise ValueError(
            "it is compressed by a codec that its lengths cannot be looked up in: write it by lz4_raw or zstd"
        )
    pa = library()
    try:
        return memoryview(pa.Codec(name).decompress(pa.py_buffer(body), decompressed_size=size)).cast("B")
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from None


def _delta_numbers(data: memoryview, most: int) -> NDArray[np.int64]:
    """Numbers, each written as its difference from the one before, in blocks; `most` of them at most.

    Raises:
        ValueError: they are damaged.
    """
    block, at = _unsigned(data, 0)
    parts, at = _unsigned(data, at)
    count, at = _unsigned(data, at)
    first, at = _signed(data, at)
    if count > most or not parts or not block or block % (parts * 8) or block > 2**16:
        raise ValueError(f"it has {count} lengths of values in blocks of {block}, and {most} values")
    deltas, each = [np.array([first], np.int64)], block // parts
    left = count - 1
    while left > 0:
        low, at = _signed(data, at)
        widths, at = data[at : at + parts], at + parts
        if len(widths) < parts:
            raise ValueError("its lengths of values are cut off")
        for width in widths:
            if left <= 0:
                break
            nbytes = each * width // 8
            if width > _WIDTH_MOST or at + nbytes > len(data):
                raise ValueError("its lengths of values are cut off")
            bits = np.unpackbits(np.frombuffer(data[at : at + nbytes], np.uint8), bitorder="little").reshape(
                each, width
            )
            numbers = bits.astype(np.int64) @ (np.int64(1) << np.arange(width, dtype=np.int64))
            deltas.append(numbers[:left] + low)
            at, left = at + nbytes, left - each
    numbers = np.cumsum(np.concatenate(deltas))[:count]
    if len(numbers) and int(numbers.min()) < 0:
        raise ValueError("a length of a value is less than none")
    return numbers


def _unsigned(data: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for k in range(_VARINT_BYTES):
        if at + k >= len(data):
            raise ValueError("its lengths of values are cut off")
        number |= (data[at + k] & 127) << 7 * k
        if data[at + k] < 128:
            return number, at + k + 1
    raise ValueError("a number has more than 10 bytes")


def _signed(data: memoryview, at: int) -> tuple[int, int]:
    number, at = _unsigned(data, at)
    number = number >> 1 ^ -(number & 1)
    return (number + 2**63) % 2**64 - 2**63, at
