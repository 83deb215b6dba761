"""TFRecord files and the examples in them, made here from the layout."""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import google_crc32c
import numpy as np


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)


def record(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + masked(length) + body + masked(body)


def varint(value: int) -> bytes:
    value %= 2**64
    parts = bytearray()
    while value > 127:
        parts.append(value % 128 + 128)
        value //= 128
    return bytes([*parts, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(value: Any, *, packed: bool = True) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes | list):
        values = [value] if isinstance(value, bytes) else value
        return field(1, b"".join(field(1, one) for one in values))
    if value.dtype == np.float32:
        loose = b"".join(varint(1 << 3 | 5) + one.tobytes() for one in value)
        return field(2, field(1, value.tobytes()) if packed else loose)
    numbers = [varint(int(one)) for one in value]
    return field(3, field(1, b"".join(numbers)) if packed else b"".join(varint(1 << 3) + one for one in numbers))


def features(sample: Mapping[str, Any], *, packed: bool = True) -> bytes:
    entries = (field(1, name.encode()) + field(2, feature(value, packed=packed)) for name, value in sample.items())
    return b"".join(field(1, entry) for entry in entries)


def example(sample: Mapping[str, Any], *, packed: bool = True) -> bytes:
    return field(1, features(sample, packed=packed))


def sequence_example(context: Mapping[str, Any], lists: Mapping[str, list[Any]]) -> bytes:
    entries = (
        field(1, name.encode()) + field(2, b"".join(field(1, feature(value)) for value in values))
        for name, values in lists.items()
    )
    return example(context) + field(2, b"".join(field(1, entry) for entry in entries))


def file_of(samples: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(record(example(sample)) for sample in samples)
