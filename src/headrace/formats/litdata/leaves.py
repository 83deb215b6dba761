"""Leaves of LitData's items: from their bytes to values, as the names of their serializers say."""

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
from headrace.formats.litdata.nested import nested_value
from headrace.formats.mds.encodings import image_array, raw_image
from headrace.formats.plain import decode_text

Decode = Callable[[bytes], object]

# the order of these numbers is that of the layout
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
    """What decodes the leaves that a serializer of this name has written.

    Args:
        where: what the leaf is called, for errors.
        is_unpickled: whether pickles of it are read.

    Raises:
        ValueError: such leaves are not read here.
    """
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
    """None, which LitData pickles; all else is refused."""
    if not _NONE.fullmatch(data):
        raise ValueError(
            f"it is pickled: to read it would run what the data say. If you trust who wrote them, give "
            f"format=LitData(unpickle=({where!r},)), of headrace.formats.litdata.format"
        )


def _named(names: tuple[str, ...], number: int) -> str:
    if number >= len(names):
        raise ValueError(f"its dtype has the number {number}, which is not known")
    return names[number]


def _with_shape(order: str, make: Callable[[str, tuple[int, ...], bytes], object], data: bytes) -> object:
    """A tensor or array behind the number of its dtype, its rank and its dimensions."""
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
