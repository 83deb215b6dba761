"""Decodes numbers, text, JSON, pickles, and .npy and .npz files, and gzip around them."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import zipfile

import numpy as np
from numpy.typing import NDArray

from headrace.errors import reason_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.optional import needed
from headrace.types import Buffer

_DIGITS_MOST = 4300  # Python's default: the time grows with the square
_PIECE_BYTES = 2**20


def decode_text(data: Buffer) -> str:
    return str(data, "utf-8")


def decode_int(data: Buffer) -> int:
    """Decode a decimal integer: ASCII digits, optional sign and surrounding white space.

    Python's int() accepts more: "1_000", and digits of every script.
    """
    text = bytes(data).strip()
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit():
        raise ValueError(f"{bytes(data[:40])!r} is no whole number in decimal digits")
    if len(digits) > _DIGITS_MOST:
        raise ValueError(f"it has {len(digits)} digits, over the limit of {_DIGITS_MOST}")
    return int(text)


def decode_json(data: Buffer) -> object:
    """Decode JSON as Python's json: NaN is a number, the last of equal names wins."""
    try:
        return json.loads(bytes(data))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def decode_msgpack(data: Buffer) -> object:
    """Decode MessagePack. The library refuses sizes beyond the data."""
    msgpack = needed("msgpack", "msgpack", kind=ValueError)
    try:
        value: object = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except msgpack.exceptions.StackError:
        raise ValueError("it is nested too deep") from None
    return value


def decode_pickle(data: Buffer) -> object:
    """Load a pickle. This executes code from `data`."""
    value: object = pickle.load(file := io.BytesIO(data))
    if file.tell() != len(data):
        raise ValueError(f"its {len(data)} bytes continue after its end at {file.tell()}")
    return value


def gunzipped(data: Buffer, limits: Limits = DEFAULTS) -> bytes:
    """Decompress one or several gzip members, and verify their CRCs."""
    if data[:2] != b"\x1f\x8b":
        raise ValueError("it does not begin as gzip data")
    most = limits.unpacked(len(data))
    room = most
    parts = []
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while part := file.read(_PIECE_BYTES):
            room -= len(part)
            if room < 0:
                raise ValueError(f"{len(data)} bytes unpack to more than {most}, which is the limit")
            parts.append(part)
    return b"".join(parts)


_MAGIC = b"\x93NUMPY"
_ZIP_BEGINS = (b"PK\3\4", b"PK\5\6")
_HEADER_MOST = 10_000


class NpyDecoder:
    """Decodes an .npy file to an array that owns its memory. Object arrays are refused.

    Files of one data set mostly have equal headers, so the last parsed header is cached: 1 us instead of 20.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, tuple[int, ...], np.dtype[np.generic], bool] | None = None

    def __call__(self, data: Buffer) -> NDArray[np.generic]:
        if self._last is None or data[: len(self._last[0])] != self._last[0]:
            self._last = npy_header(data)
        head, shape, dtype, by_column = self._last
        size = math.prod(shape) * dtype.itemsize
        if len(data) != len(head) + size:
            raise ValueError(f"the header describes {size} bytes of array, {len(data) - len(head)} follow")
        array: NDArray[np.generic] = np.ndarray(shape, dtype, data, len(head), order="F" if by_column else "C")
        return array.copy("K")


def npy_header(data: Buffer) -> tuple[bytes, tuple[int, ...], np.dtype[np.generic], bool]:
    """Parse an .npy header: (bytes, shape, dtype, is column-major). Raises a ValueError."""
    version = bytes(data[6:8]) if len(data) >= 12 and bytes(data[:6]) == _MAGIC else None
    if version not in (b"\1\0", b"\2\0"):
        raise ValueError("it does not begin as an .npy file of version 1 or 2")
    major = version[0]
    start = 10 if major == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _HEADER_MOST:
        raise ValueError(f"its header has {length} bytes, over the limit of {_HEADER_MOST}")
    head = bytes(data[: start + length])
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    try:
        shape, by_column, dtype = read(io.BytesIO(head[8:]), max_header_size=_HEADER_MOST)
    except Exception as error:  # of any type: the header is a Python expression
        raise ValueError(f"its header does not describe an array ({reason_of(error)})") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    if dtype.itemsize == 0 and math.prod(shape) > 0:
        raise ValueError(f"its header describes {shape} elements of no bytes")  # any number of them
    return head, shape, dtype, by_column


def decode_npz(data: Buffer, limits: Limits = DEFAULTS) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in an .npz file by name."""
    arrays: dict[str, NDArray[np.generic]] = {}
    decode = NpyDecoder()
    if bytes(data[:4]) not in _ZIP_BEGINS:  # zipfile only checks the end
        raise ValueError("it does not begin as a zip archive")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if size > limits.unpacked(len(data)):
            raise ValueError(
                f"{len(data)} bytes would unpack to {size}, over the limit of {limits.unpacked_ratio} times as many"
            )
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise ValueError(f"its member {name!r} is no array")
            if name in arrays:
                raise ValueError(f"it has two arrays named {name!r}")
            arrays[name] = decode(_unpacked(archive, member))
    return arrays


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    # a member may be longer than stated: only for these kinds, and only with `read(size)`, is the output bounded
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its member {member.filename!r} is packed in a way that numpy does not use")
    with archive.open(member) as file:
        data = file.read(member.file_size)
    if len(data) != member.file_size:
        raise ValueError(f"its member {member.filename!r} has {len(data)} bytes and should have {member.file_size}")
    return data
