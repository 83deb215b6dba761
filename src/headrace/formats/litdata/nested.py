"""Leaves that hold lists and dicts: JSON, or values with a tag before each.

u8 tag, then: 0 JSON (u32 bytes), 1 strings (u32 count; each u32 bytes), 2 i64, 3 f64, 4 bools (u32 count), 5 a dict
(u32 count; of each a key, u32 bytes, and a value), 6 records (u32 count, u32 keys, keys; then the values of each, whose
tags are 16 none, 17 string, 18 i64, 19 f64, 20 bool), 7 string, 8 i64, 9 f64, 10 bool, 11 none. Little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np

_U32, _I64, _F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_TAGS_END = 0x20  # what is above is a letter that JSON begins with
_DEPTH_MOST = 100
_OF_RECORDS = 0x10


def nested_value(data: bytes) -> object:
    """The value of such a leaf.

    Raises:
        ValueError: it is damaged.
    """
    if not data or data[0] > _TAGS_END:
        return _json(data)
    cursor = _Cursor(data)
    value = cursor.value(0)
    if cursor.at != len(data):
        raise ValueError(f"{len(data) - cursor.at} bytes follow its value")
    return value


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class _Cursor:
    """Reads values one behind the other; counts are compared with the bytes that are left before they are used."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self._readers: dict[int, Callable[[], object]] = {
            0: lambda: _json(self._take(self._count())),
            1: lambda: [self._text() for _ in range(self._count(4))],
            2: lambda: self._numbers("<i8"),
            3: lambda: self._numbers("<f8"),
            4: lambda: self._numbers("?"),
            6: self._records,
            7: self._text,
            8: lambda: self._one(_I64),
            9: lambda: self._one(_F64),
            10: lambda: self._take(1) != b"\0",
            11: lambda: None,
        }
        self._of_records = {_OF_RECORDS + k: self._readers[tag] for k, tag in enumerate((11, 7, 8, 9, 10))}

    def value(self, depth: int) -> object:
        tag = self._take(1)[0]
        if tag == 5 and depth < _DEPTH_MOST:
            return {self._text(): self.value(depth + 1) for _ in range(self._count(5))}
        return self._tagged(tag, self._readers)

    def _tagged(self, tag: int, readers: dict[int, Callable[[], object]]) -> object:
        if tag not in readers:
            raise ValueError(f"it has a value of the kind {tag}, or too deep a one")
        return readers[tag]()

    def _take(self, size: int) -> bytes:
        part = self._data[self.at : self.at + size]
        if len(part) < size:
            raise ValueError("it is cut off in a value")
        self.at += size
        return part

    def _count(self, least: int = 0) -> int:
        """A number of things, each of which takes `least` bytes."""
        (count,) = _U32.unpack(self._take(4))
        if count * least > len(self._data) - self.at:
            raise ValueError(f"it says {count} values, and {len(self._data) - self.at} bytes are left")
        return int(count)

    def _text(self) -> str:
        return str(self._take(self._count()), "utf-8")

    def _one(self, layout: struct.Struct) -> object:
        return layout.unpack(self._take(layout.size))[0]

    def _numbers(self, dtype: str) -> object:
        kind = np.dtype(dtype)
        data = self._take(self._count(kind.itemsize) * kind.itemsize)
        return (np.frombuffer(data, np.uint8) != 0 if dtype == "?" else np.frombuffer(data, kind)).tolist()

    def _records(self) -> object:
        count = self._count()
        keys = [self._text() for _ in range(self._count(4))]
        if not keys or count * len(keys) > len(self._data) - self.at:
            raise ValueError(f"it says {count} records of {len(keys)} values, and too few bytes are left")
        return [{key: self._tagged(self._take(1)[0], self._of_records) for key in keys} for _ in range(count)]
