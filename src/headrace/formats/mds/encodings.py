"""Decodes columns of MDS samples by their encodings. Pickles are never loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from headrace.errors import reason_of
from headrace.formats.json_values import as_count, as_list, as_text, as_texts
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.plain import decode_json, decode_text

_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
# codes of dtypes in arrays
_DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"),
        strict=True,
    )
)
_DIMENSIONS_MOST = 64
_DIGITS_MOST = 4300
_U32 = struct.Struct("<I")
_PIL = struct.Struct("<III")
_IMAGE_LISTS = ("list[jpeg]", "list[png]", "list[pil]")
_MODE_MOST = 16
_COLUMNS_MOST = 1000


class MdsColumn(NamedTuple):
    """A column of a sample. `size` is in bytes. None: variable."""

    name: str
    encoding: str
    size: int | None
    decode: Callable[[bytes], object]


@lru_cache(maxsize=64)
def columns_of(text: str, limits: Limits = DEFAULTS) -> tuple[MdsColumn, ...]:
    """Parse columns from a JSON of [[name, encoding, size], …], as written by `described`."""
    return tuple(_column(name, encoding, size, limits) for name, encoding, size in json.loads(text))


def described(names: object, encodings: object, sizes: object) -> str:
    """Return the columns of a shard as JSON for `columns_of`. Raises a ValueError if invalid."""
    lists = [one for one in map(as_list, (names, encodings, sizes)) if one is not None]
    if len(lists) < 3 or len({len(one) for one in lists}) > 1 or len(lists[0]) > _COLUMNS_MOST:
        raise ValueError("its columns' names, encodings and sizes are not lists of one length")
    texts = as_texts(names)
    if texts is None or len(set(texts)) < len(texts):
        raise ValueError("its columns' names are none")
    text = json.dumps(list(zip(*lists, strict=True)), separators=(",", ":"))
    columns_of(text)
    return text


def _column(name: str, encoding: object, size: object, limits: Limits) -> MdsColumn:
    if name.startswith("__"):
        raise ValueError(f"column {name!r} begins with '__'; such names are taken")
    nbytes = as_count(size, limits.member_bytes)
    if size is not None and nbytes is None:
        raise ValueError(f"column {name!r} has values of {str(size)[:40]} bytes")
    kind = as_text(encoding)
    decode = None if kind is None else _decoder(kind, limits)
    if encoding == "pkl":
        raise ValueError(f"column {name!r} is pickled: reading it would run code from the data, and that is not done")
    if kind is None or decode is None:
        raise ValueError(f"column {name!r} has the encoding {str(encoding)[:80]!r}, which is not known")
    return MdsColumn(name, kind, nbytes or None, decode)  # a size of 0 means variable


def sizes_of(columns: tuple[MdsColumn, ...], data: bytes) -> list[int]:
    """Return the bytes of each column of a sample, and last those of the sizes before them."""
    head = 4 * sum(column.size is None for column in columns)
    if len(data) < head:
        raise ValueError(f"it has {len(data)} bytes, and the sizes of its columns take {head}")
    said = iter(struct.unpack_from(f"<{head // 4}I", data))
    sizes = [next(said) if column.size is None else column.size for column in columns]
    if head + sum(sizes) != len(data):
        raise ValueError(f"its columns have {sum(sizes)} bytes, and {len(data) - head} follow their sizes")
    return [*sizes, head]


def sample_of(columns: tuple[MdsColumn, ...], data: bytes) -> dict[str, object]:
    """Decode the sample `data`. A ValueError names the damaged column."""
    *sizes, at = sizes_of(columns, data)
    sample = {}
    for column, size in zip(columns, sizes, strict=True):
        try:
            sample[column.name] = column.decode(data[at : at + size])
        except Exception as error:
            what = f"column {column.name!r} does not decode as {column.encoding}"
            raise ValueError(f"{what}: {reason_of(error)}") from error
        at += size
    return sample


def _decoder(encoding: str, limits: Limits) -> Callable[[bytes], object] | None:
    name, _, more = encoding.partition(":")
    if name in ("bytes", "jpeg", "png"):
        return bytes  # images are decoded by `.decode()`
    if encoding in _SCALARS:
        return partial(_scalar, _SCALARS[encoding])
    if name == "ndarray":
        return _array_decoder(more)
    if encoding in _IMAGE_LISTS:
        return partial(_list, partial(raw_image, limits) if "pil" in encoding else bytes)
    plain: dict[str, Callable[[bytes], object]] = {
        "str": decode_text,
        "int": lambda data: int(_scalar(_SCALARS["int64"], data)),
        "str_int": lambda data: int(_short(data)),
        "str_float": lambda data: float(_short(data)),
        "str_decimal": lambda data: Decimal(_short(data)),
        "json": decode_json,
        "pil": partial(raw_image, limits),
        "jpeg_array": image_array,
        "jpegarray": image_array,
    }
    return plain.get(encoding)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"it has {len(data)} bytes")
    return np.frombuffer(data, dtype)[0]


def _short(data: bytes) -> str:
    if len(data) > _DIGITS_MOST:
        raise ValueError(f"it has {len(data)} digits, over the limit of {_DIGITS_MOST}")
    return str(data, "ascii")


def _array_decoder(more: str) -> Callable[[bytes], object] | None:
    """Return the decoder of `ndarray:dtype:shape`, both optional. None if invalid."""
    dtype, _, said = more.partition(":")
    if dtype and dtype not in _SCALARS:
        return None
    sizes = said.split(",") if said else []
    if not all(size.isascii() and size.isdigit() and 0 < int(size[:18]) < 2**53 for size in sizes):
        return None
    return partial(_array, _SCALARS[dtype] if dtype else None, tuple(map(int, sizes)) if sizes else None)


def _array(dtype: np.dtype[np.generic] | None, shape: tuple[int, ...] | None, data: bytes) -> object:
    at = 0
    if dtype is None:
        if not data or data[0] not in _DTYPES:
            raise ValueError(f"its dtype is {data[:1]!r}")
        dtype, at = _SCALARS[_DTYPES[data[0]]], 1
    if shape is None:
        count, width = (data[at] >> 2, 1 << (data[at] & 3)) if at < len(data) else (_DIMENSIONS_MOST, 1)
        end = at + 1 + count * width
        if count >= _DIMENSIONS_MOST or end > len(data):
            raise ValueError("its shape is cut off")
        shape = tuple(np.frombuffer(data, f"<u{width}", count, at + 1).tolist())
        at = end
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data) - at:
        raise ValueError(f"its shape {list(shape)} takes {nbytes} bytes, and {len(data) - at} follow")
    return np.frombuffer(data, dtype, offset=at).reshape(shape).copy()


def raw_image(limits: Limits, data: bytes) -> object:
    from PIL import Image

    if len(data) < _PIL.size:
        raise ValueError("it is cut off")
    width, height, length = _PIL.unpack_from(data)
    if width * height > limits.pixels or length > _MODE_MOST:
        raise ValueError(f"it claims {width} x {height} pixels and a mode of {length} letters, over the limit")
    end = _PIL.size + length
    return Image.frombytes(str(data[_PIL.size : end], "ascii"), (width, height), data[end:])


def _list(decode: Callable[[bytes], object], data: bytes) -> list[object]:
    """Decode a list: an unused word, the number of values, their sizes, and the values."""
    return [decode(one) for one in image_array(data[4:])] if len(data) >= 8 else _cut_off()


def image_array(data: bytes) -> list[bytes]:
    (count,) = _U32.unpack_from(data) if len(data) >= 4 else _cut_off()
    if 4 + 4 * count > len(data):
        raise ValueError(f"it claims {count} values, and has {len(data)} bytes")
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    at = 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise ValueError(f"its values have {sum(sizes)} bytes, and {len(data) - at} follow")
    values = []
    for size in sizes:
        values.append(data[at : at + size])
        at += size
    return values


def _cut_off() -> NoReturn:
    raise ValueError("it is cut off")
