"""Decodes numbers, text, JSON and pickles, and gzip around them."""

from __future__ import annotations

import gzip
import io
import json
import pickle

from headrace.formats.limits import DEFAULTS, Limits
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
    try:
        import msgpack
    except ImportError:
        raise ValueError("it needs msgpack, which is not installed; try: pip install 'headrace[msgpack]'") from None
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except msgpack.exceptions.StackError:
        raise ValueError("it is nested too deep") from None


def decode_pickle(data: Buffer) -> object:
    """Load a pickle. This executes code from `data`."""
    value: object = pickle.load(file := io.BytesIO(data))
    if file.tell() != len(data):
        raise ValueError(f"its {len(data)} bytes go on behind its end at {file.tell()}")
    return value


def gunzipped(data: Buffer, limits: Limits = DEFAULTS) -> bytes:
    """Decompress one or several gzip members, and verify their CRCs.

    Raises:
        ValueError: The data are damaged, or the output exceeds both `limits.unpacked_free_bytes` and
            `limits.unpacked_ratio` times the input. May also be an error of zlib or gzip.
    """
    if data[:2] != b"\x1f\x8b":
        raise ValueError("it does not begin as gzip data")
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * len(data))
    room = most
    parts = []
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while part := file.read(_PIECE_BYTES):
            room -= len(part)
            if room < 0:
                raise ValueError(f"{len(data)} bytes unpack to more than {most}, which is the limit")
            parts.append(part)
    return b"".join(parts)
