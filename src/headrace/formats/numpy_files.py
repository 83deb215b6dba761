"""Decodes .npy and .npz files in memory. Pickles are never loaded."""

from __future__ import annotations

import io
import math
import zipfile

import numpy as np
from numpy.typing import NDArray

from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer

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
            raise ValueError(f"the header tells of {size} bytes of array, {len(data) - len(head)} follow")
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
        raise ValueError(
            f"its header does not describe an array ({str(error)[:200] or type(error).__name__})"
        ) from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    if dtype.itemsize == 0 and math.prod(shape) > 0:
        raise ValueError(f"its header tells of {shape} elements of no bytes")  # any number of them
    return head, shape, dtype, by_column


def decode_npz(data: Buffer, limits: Limits = DEFAULTS) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in an .npz file by name.

    Raises:
        ValueError, zipfile.BadZipFile: The file is damaged, contains other members, or its decompressed size exceeds
            both `limits.unpacked_free_bytes` and `limits.unpacked_ratio` times its size.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    decode = NpyDecoder()
    if bytes(data[:4]) not in _ZIP_BEGINS:  # zipfile only checks the end
        raise ValueError("it does not begin as a zip archive")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if size > max(limits.unpacked_free_bytes, limits.unpacked_ratio * len(data)):
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
