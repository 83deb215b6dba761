"""The wire format of protocol buffers, as far as examples need it; no message is described in it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_VARINT_MOST = 10
_FEW = 16
_TAG_MOST = 2**32

Field = tuple[int, bytes | int]
"""The number of a field, and its value: bytes, or of those of a fixed or a variable width a number."""


def fields_of(data: bytes) -> Iterator[Field]:
    """The fields of a message, in their order.

    Raises:
        ValueError: it is none.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if tag >= _TAG_MOST or not number:
            raise ValueError(f"it has a field {number}, which cannot be")
        value: bytes | int
        if kind == _VARINT:
            value, at = _varint(data, at)
        else:
            if kind == _LEN:
                size, at = _varint(data, at)
            elif kind in (_I32, _I64):
                size = 4 if kind == _I32 else 8
            else:
                raise ValueError(f"it has a field of the wire type {kind}, which is not known")
            if size > len(data) - at:
                raise ValueError(f"a field of it has {size} bytes, and {len(data) - at} are left")
            value, at = data[at : at + size], at + size
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number at `at`, where it ends)."""
    value = 0
    for k, byte in enumerate(data[at : at + _VARINT_MOST]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at + k + 1
    raise ValueError("a number in it is cut off, or longer than 64 bits")


def bytes_of(value: bytes | int) -> bytes:
    """A field's value that must be bytes.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, bytes):
        raise ValueError("a field of it is a number, and should be bytes")  # noqa: TRY004 (it is of the data)
    return value


def integers_of(data: bytes) -> NDArray[np.int64]:
    """Numbers of variable width that follow one another.

    Raises:
        ValueError: the last one is cut off, or one is too long.
    """
    if len(data) <= _FEW:
        at, values = 0, []
        while at < len(data):
            value, at = _varint(data, at)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 0x80) + 1
    lengths = np.diff(ends, prepend=0)
    if not len(ends) or ends[-1] != len(data) or int(lengths.max()) > _VARINT_MOST:
        raise ValueError("a number in it is cut off, or longer than 64 bits")
    starts = ends - lengths
    if (digits[starts[lengths == _VARINT_MOST] + _VARINT_MOST - 1] > 1).any():
        raise ValueError("a number in it is longer than 64 bits")
    shifts = (7 * (np.arange(len(digits)) - np.repeat(starts, lengths))).astype(np.uint64)
    parts = (digits & 0x7F).astype(np.uint64) << shifts
    return np.asarray(np.add.reduceat(parts, starts), np.uint64).view(np.int64)


def floats_of(data: bytes) -> NDArray[np.float32]:
    """Numbers of 32 bits that follow one another.

    Raises:
        ValueError: the last one is cut off.
    """
    if len(data) % 4:
        raise ValueError(f"its {len(data)} bytes are no whole number of floats")
    return np.frombuffer(data, "<f4").astype(np.float32)


def varint_bytes(value: int) -> bytes:
    """A number as it would lie among others of variable width."""
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack(f"{len(parts) + 1}B", *parts, value)
