"""A decoder as a package of somebody else would have it: vectors of float16 with their length before them."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

MAGIC = b"HALF"


def encode(vector: NDArray[np.float16]) -> bytes:
    return MAGIC + struct.pack("<I", len(vector)) + vector.astype("<f2").tobytes()


def decode(data: bytes) -> NDArray[np.float16]:
    if data[:4] != MAGIC or len(data) < 8:
        raise ValueError("these are no half floats")
    (count,) = struct.unpack_from("<I", data, 4)
    if len(data) != 8 + 2 * count:
        raise ValueError(f"{count} half floats take {2 * count} bytes, and {len(data) - 8} follow")
    return np.frombuffer(data, "<f2", offset=8).copy()
