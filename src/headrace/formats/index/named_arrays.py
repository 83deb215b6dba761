"""A checked and compressed container of named integer arrays, the base of index files.

    u32 CRC-32 of all that follows
    u32 length of the body once it is unpacked, in bytes
    the body as a zlib stream:
        u32 length of the JSON
        JSON: an object; its "arrays" maps each array's name to [dtype, count]
        the arrays, one after the other, in the order of "arrays"

All numbers are little-endian. A dtype is "u1", "u2", "u4" or "u8", always the smallest that holds the array. Damaged or
hostile data raises an error before memory is allocated for its claims.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, LimitError
from headrace.formats.json_values import as_list, as_number, as_text
from headrace.types import Buffer, Ints

T = TypeVar("T")

MOST = 2**53
"""Maximum of all offsets, sizes and counts."""

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_DTYPES = {f"u{size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
# Compression ratios of indexes are 2 to 10. A higher claim than this is a decompression bomb.
_RATIO_MOST = 50
_FREE_BYTES = 2**20
_BODY_MOST = 2**32 - 1
_FAR_BYTES = 2**16


def damage(what: str, why: str) -> FormatError:
    return FormatError.at(what, f"is damaged: {why}")


def smallest(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Convert `values` to the smallest unsigned type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if low < 0:
        raise ValueError(f"{low} is negative: it is no offset, size or count")
    return values.astype(_DTYPES[np.min_scalar_type(high).str[1:]])


def pack_arrays(facts: Mapping[str, object], arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Pack non-negative integer `arrays` and small JSON `facts` as bytes."""
    small = {name: smallest(array) for name, array in arrays.items()}
    said = {"arrays": {name: [array.dtype.str[1:], len(array)] for name, array in small.items()}, **facts}
    text = json.dumps(said, separators=(",", ":")).encode()
    length = _LENGTH.size + len(text) + sum(array.nbytes for array in small.values())
    if length > _BODY_MOST:
        raise LimitError(f"the arrays of an index have {length} bytes, over the limit of {_BODY_MOST}: cut the shard")
    body = b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in small.values())])
    packed = _compressed(body, 6)
    if length > _most(len(packed)):  # the reader would refuse it as a bomb
        packed = _compressed(body, 0)
    checked = _LENGTH.pack(length) + packed
    return _LENGTH.pack(zlib.crc32(checked)) + checked


def _compressed(body: bytes, level: int) -> bytes:
    # In long columns of numbers, distant matches cost more bits than close ones: 6.0 bytes a line instead of 6.9.
    stream = zlib.compressobj(level, wbits=9 if len(body) > _FAR_BYTES else 15)
    return stream.compress(body) + stream.flush()


def _most(packed: int) -> int:
    return max(_FREE_BYTES, _RATIO_MOST * packed)


def unpack_arrays(data: Buffer, what: str) -> tuple[dict[str, object], dict[str, NDArray[np.generic]]]:
    """Unpack the result of `pack_arrays` to facts and arrays (read-only views)."""
    body = _body(memoryview(data).cast("B"), what)
    try:
        (length,) = _LENGTH.unpack_from(body)
        facts = json.loads(body[4 : 4 + length])
        said = facts.pop("arrays").items()
    except (struct.error, ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise damage(what, "it does not state which arrays it has") from None
    arrays, at = {}, 4 + length
    for name, shape in said:
        entries = as_list(shape) or []
        dtype, count = (as_text(entries[0]), as_number(entries[1])) if len(entries) == 2 else (None, None)
        if dtype is None or dtype not in _DTYPES or count is None or count < 0:
            raise damage(what, f"its array {name!r} has the shape {str(shape)[:80]}")
        stop = at + count * _DTYPES[dtype].itemsize
        if stop > len(body):
            raise damage(what, f"its array {name!r} would end at byte {stop} of {len(body)}")
        arrays[name] = np.frombuffer(body, _DTYPES[dtype], count, at)
        at = stop
    if at != len(body):
        raise damage(what, f"its arrays end at byte {at} of {len(body)}")
    return facts, arrays


def _body(view: memoryview, what: str) -> bytes:
    if len(view) < _HEAD.size:
        raise damage(what, f"it has {len(view)} bytes, fewer than its head")
    check, length = _HEAD.unpack_from(view)
    if zlib.crc32(view[4:]) != check:
        raise damage(what, "its CRC-32 is another one")
    if length > _most(len(view) - _HEAD.size):
        raise LimitError.at(
            what, f": {len(view)} bytes would unpack to {length}; the limit is {_RATIO_MOST} times as many"
        )
    unpack = zlib.decompressobj()
    try:
        body = unpack.decompress(view[_HEAD.size :], length + 1)
    except zlib.error as error:
        raise damage(what, f"it does not unpack ({error})") from None
    if len(body) != length or not unpack.eof or unpack.unused_data:
        raise damage(what, f"it does not unpack to the {length} bytes that it claims")
    return body


class Arrays:
    def __init__(self, data: Buffer, what: str) -> None:
        self.what = what
        self.facts, self.arrays = unpack_arrays(data, what)

    def has(self, name: str) -> bool:
        return name in self.arrays

    def ints(self, name: str, count: int | None = None, *, most: int = MOST) -> Ints:
        """Return the array `name`: `count` numbers up to `most`, with a sum far below 2**63."""
        array = self.arrays.get(name)
        if array is None:
            raise damage(self.what, f"it has no array {name!r}")
        if count is not None and len(array) != count:
            raise damage(self.what, f"its array {name!r} has {len(array)} entries, not {count}")
        if len(array) and (int(array.max()) > most or float(array.sum(dtype=np.float64)) > 2.0**60):
            raise damage(self.what, f"its array {name!r} has numbers that are too large")
        return array.astype(np.int64)

    def texts(self, name: str, lengths: str, count: int | None = None) -> tuple[bytes, Ints]:
        """Return the concatenated texts in the array `name`, and their ends after a 0."""
        ends = np.zeros(len(self.ints(lengths, count)) + 1, np.int64)
        np.cumsum(self.ints(lengths, count), out=ends[1:])
        text = self.arrays.get(name, np.zeros(0, np.uint16))
        if text.dtype != np.uint8 or len(text) != ends[-1]:
            raise damage(self.what, f"its texts {name!r} are not {ends[-1]} bytes long")
        return text.tobytes(), ends

    def fact(self, name: str, wanted: Callable[[object], T | None]) -> T:
        """Return a value of the JSON, converted by `wanted`: see `json_values`."""
        said = self.facts.get(name)
        value = wanted(said)
        if value is None:
            raise damage(self.what, f"its {name!r} is {str(said)[:80]!r}")
        return value

    def fact_if_any(self, name: str, wanted: Callable[[object], T | None]) -> T | None:
        """Return a value as `fact` does, or None if the JSON has null or no value."""
        return None if self.facts.get(name) is None else self.fact(name, wanted)
