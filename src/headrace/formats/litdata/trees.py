"""Decodes the leaves of LitData's items, and builds samples by the tree that torch's pytree has written."""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from headrace.formats.decoders import decode_json, decode_text
from headrace.formats.json_values import as_list, as_object, as_text, as_texts
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mds import MdsColumn, image_array, raw_image, values_of
from headrace.types import Buffer

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
    kind = name.partition(":")[0]
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
    if (dtype := vector_dtype(name)) is not None:
        return partial(_vector, partial(_tensor if kind == "no_header_tensor" else _array, dtype), dtype)
    raise ValueError(f"leaf {where!r} is written by the serializer {name[:80]!r}, which is not known")


def vector_dtype(name: str) -> str | None:
    """Return the dtype of vectors without a header. None for other serializers. Raises a ValueError if unknown."""
    kind, _, more = name.partition(":")
    names = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}.get(kind)
    return _named(names, int(more[:9])) if names is not None and more.isdigit() else None


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
    from headrace.formats.safetensors import tensor_of

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


Build = Callable[[Iterator[object]], object]

_VERSION = 1
_DEPTH_MOST = 100
_DICTS = ("builtins.dict", "collections.OrderedDict")
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {"builtins.list": list, "builtins.tuple": tuple}
ALONE = "value"


class Tree(NamedTuple):
    """The leaves of items, and a builder of samples from their values."""

    leaves: tuple[MdsColumn, ...]
    build: Build

    def sample(self, data: bytes) -> dict[str, object]:
        """Decode an item to a sample. A ValueError names the damaged leaf."""
        sample = self.build(iter(values_of(self.leaves, data, "leaf")))
        assert isinstance(sample, dict)
        return sample

    def end_at(self, data: Buffer, at: int) -> int:
        begin = at + 4 * len(self.leaves)
        end = begin
        if begin <= len(data):
            end += sum(struct.unpack_from(f"<{len(self.leaves)}I", data, at))
        if end > len(data) or begin > len(data):
            raise ValueError("an item is cut off")
        return end


@lru_cache(maxsize=64)
def tree_of(formats: str, spec: str, unpickle: tuple[str, ...] = (), limits: Limits = DEFAULTS) -> Tree:
    """Return the tree of leaves. `formats` is JSON. Raises a ValueError if not supported."""
    names = as_texts(json.loads(formats))
    said = as_list(decode_json(spec.encode()))
    if names is None or said is None or len(said) != 2 or said[0] != _VERSION:
        raise ValueError("its data_format and data_spec are none that are known")
    if len(names) > limits.fields:
        raise ValueError(f"its items have {len(names)} leaves, over the limit of {limits.fields}")
    paths: list[str] = []
    build = _sample_builder(said[1], paths)
    if len(paths) != len(names):
        raise ValueError(f"its data_spec has {len(paths)} leaves, and its data_format {len(names)}")
    leaves = [
        MdsColumn(path, name, None, leaf_decoder(name, path, limits, is_unpickled=path.partition("/")[0] in unpickle))
        for path, name in zip(paths, names, strict=True)
    ]
    return Tree(tuple(leaves), build)


def _sample_builder(spec: object, paths: list[str]) -> Build:
    """Build a dict of any item: sequences by number, a single leaf under the name `ALONE`."""
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if kind is None and children == []:
        paths.append(ALONE)
        return lambda leaves: {ALONE: next(leaves)}
    keys = list(map(str, range(len(children or ())))) if kind in _SEQUENCES else [str(key) for key in _keys(said)]
    if len(set(keys)) < len(keys):
        raise ValueError("its items have two fields of one name")
    for key in keys:
        if key.startswith("__"):
            raise ValueError(f"its items have a field {key[:80]!r}; names that begin with '__' are taken")
    parts = [_builder(child, key, paths, 1) for key, child in zip(keys, children or (), strict=True)]
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _builder(spec: object, path: str, paths: list[str], depth: int) -> Build:
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if children is None or depth > _DEPTH_MOST:
        raise ValueError("its data_spec is no tree")
    if kind is None:
        if children:
            raise ValueError("its data_spec has a leaf with children")
        paths.append(path)
        return next
    make = _SEQUENCES.get(as_text(kind) or "")
    keys = list(range(len(children))) if make is not None else _keys(said)
    parts = [_builder(child, f"{path}/{key}", paths, depth + 1) for key, child in zip(keys, children, strict=True)]
    if make is not None:
        return lambda leaves: make([part(leaves) for part in parts])
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _keys(said: dict[str, object]) -> list[object]:
    kind, context = as_text(said.get("type")), as_text(said.get("context"))
    if kind not in _DICTS or context is None:
        raise ValueError(f"its items hold a {str(said.get('type'))[:80]!r}, which is not read")
    keys, children = as_list(decode_json(context.encode())), as_list(said.get("children_spec"))
    is_right = keys is not None and all(type(key) in (str, int, bool, float) for key in keys)
    if keys is None or not is_right or len(keys) != len(children or ()) or len(set(keys)) < len(keys):
        raise ValueError("the keys in its data_spec are none")
    return keys
