"""Decodes the leaves of LitData's items by the names of their serializers."""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from headrace.formats.limits import Limits
from headrace.formats.mds.encodings import image_array, raw_image
from headrace.formats.plain import decode_json, decode_text

Decode = Callable[[bytes], object]

# by LitData's number of the dtype
_TORCH = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)
_DIMENSIONS_MOST = 64
_NONE = re.compile(rb"\x80[\x02-\x05]N\.")
_FILES = ("bytes", "jpeg", "image", "file", "audio", "video", "nifti", "mesh", "pdf", "tifffile", "tiff", "png")


def leaf_decoder(name: str, where: str, limits: Limits, *, is_unpickled: bool) -> Decode:
    """Return the decoder for a serializer, or raise a ValueError. `where`: the leaf's path."""
    kind, _, more = name.partition(":")
    plain: dict[str, Decode] = {
        **dict.fromkeys(_FILES, bytes),
        "str": decode_text,
        "text": decode_text,
        "int": partial(_one, struct.Struct("<q")),
        "float": partial(_one, struct.Struct("<d")),
        "bool": _bool,
        "none": _none,
        "json": nested_value,
        "pil": partial(raw_image, limits),
        "jpeg_array": image_array,
        "tensor": partial(_with_shape, ">", _tensor),
        "numpy": partial(_with_shape, "<", _array),
        "pickle": pickle.loads if is_unpickled else partial(_pickle, where),
    }
    if kind in plain:
        return plain[kind]
    if kind == "no_header_tensor" and more.isdigit():
        return partial(_vector, partial(_tensor, _named(_TORCH, int(more[:9]))), _named(_TORCH, int(more[:9])))
    if kind == "no_header_numpy" and more.isdigit():
        return partial(_vector, partial(_array, _named(_NUMPY, int(more[:9]))), _named(_NUMPY, int(more[:9])))
    raise ValueError(f"leaf {where!r} is written by the serializer {name[:80]!r}, which is not known")


def _one(layout: struct.Struct, data: bytes) -> object:
    if len(data) != layout.size:
        raise ValueError(f"it has {len(data)} bytes")
    return layout.unpack(data)[0]


def _bool(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError(f"it is {data[:9]!r}")
    return data == b"\1"


def _none(data: bytes) -> None:
    if data:
        raise ValueError(f"it has {len(data)} bytes")


def _pickle(where: str, data: bytes) -> None:
    """Accept a pickled None, which LitData writes, and refuse all else."""
    if not _NONE.fullmatch(data):
        raise ValueError(
            f"it is pickled: reading it would run code from the data. If you trust their author, give "
            f"format=LitData(unpickle=({where!r},)), of headrace.formats.litdata.format"
        )


def _named(names: tuple[str, ...], number: int) -> str:
    if number >= len(names):
        raise ValueError(f"its dtype has the number {number}, which is not known")
    return names[number]


def _with_shape(order: str, make: Callable[[str, tuple[int, ...], bytes], object], data: bytes) -> object:
    """Decode a tensor or array that follows the number of its dtype, its rank and its shape."""
    dtype, rank = struct.unpack_from(f"{order}2I", data) if len(data) >= 8 else (0, _DIMENSIONS_MOST)
    at = 8 + 4 * rank
    if rank >= _DIMENSIONS_MOST or at > len(data):
        raise ValueError("its shape is cut off")
    return make(
        _named(_TORCH if order == ">" else _NUMPY, dtype), struct.unpack_from(f"{order}{rank}I", data, 8), data[at:]
    )


def _vector(make: Callable[[tuple[int], bytes], object], dtype: str, data: bytes) -> object:
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if len(data) % size:
        raise ValueError(f"it has {len(data)} bytes, which are no whole number of {dtype}")
    return make((len(data) // size,), data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    from headrace.formats.tensors import tensor_of

    return tensor_of(dtype, shape, data)


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> object:
    kind = np.dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"its shape {list(shape)} does not take the {len(data)} bytes that follow")
    return np.frombuffer(data, kind).reshape(shape).copy()


_U32, _I64, _F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_TAGS_END = 0x20  # larger bytes are characters that JSON begins with
_DEPTH_MOST = 100
_OF_RECORDS = 0x10


def nested_value(data: bytes) -> object:
    if not data or data[0] > _TAGS_END:
        return decode_json(data)
    cursor = _Cursor(data)
    value = cursor.value(0)
    if cursor.at != len(data):
        raise ValueError(f"{len(data) - cursor.at} bytes follow its value")
    return value


class _Cursor:
    """Reads consecutive values. Counts are checked against the remaining bytes before use.

    u8 tag, then: 0 JSON (u32 bytes), 1 strings (u32 count; each u32 bytes), 2 i64, 3 f64, 4 bools (u32 count), 5 a dict
    (u32 count; of each a key, u32 bytes, and a value), 6 records (u32 count, u32 keys, keys; then the values of each,
    whose tags are 16 none, 17 string, 18 i64, 19 f64, 20 bool), 7 string, 8 i64, 9 f64, 10 bool, 11 none.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self._readers: dict[int, Callable[[], object]] = {
            0: lambda: decode_json(self._take(self._count())),
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
        """Read a number of elements of at least `least` bytes each."""
        (count,) = _U32.unpack(self._take(4))
        if count * least > len(self._data) - self.at:
            raise ValueError(f"it claims {count} values, and {len(self._data) - self.at} bytes are left")
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
            raise ValueError(f"it claims {count} records of {len(keys)} values, and too few bytes are left")
        return [{key: self._tagged(self._take(1)[0], self._of_records) for key in keys} for _ in range(count)]
