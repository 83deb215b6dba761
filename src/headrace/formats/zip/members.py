"""The bytes of a member of a zip archive, of where it begins to where the next one does.

A header, the bytes, and sometimes behind them what the header does not say yet: checksum and sizes.
"""

from __future__ import annotations

import struct
import zlib

from headrace.formats.limits import Limits
from headrace.formats.zip.directory import DEFLATED, STORED

HEAD = struct.Struct("<4s5H3I2H")
EXTRA_MOST = 0xFFFF
_LATER = 1 << 3  # the flag that checksum and sizes follow the bytes
_MAGIC = b"PK\7\x08"
_ALL_32 = 0xFFFFFFFF


def body_of(data: bytes, field: str, limits: Limits) -> bytes:
    """What a member holds, checked.

    Args:
        data: from its header on; more may follow.
        field: its name's end.

    Raises:
        ValueError: it is damaged, or not the one that the directory told of, or unpacks to more than may be.
    """
    if len(data) < HEAD.size or data[:4] != b"PK\3\4":
        raise ValueError("there is no member where the directory says one")
    _, _, flags, method, _, _, crc, packed, size, name_length, extra_length = HEAD.unpack_from(data)
    begin = HEAD.size + name_length + extra_length
    name, extra = data[HEAD.size : HEAD.size + name_length], data[begin - extra_length : begin]
    if not name.decode("utf-8", "surrogateescape").lower().endswith(field) and name.isascii():
        raise ValueError(f"the member there is called {name[:80]!r}")
    if begin > len(data) or method not in (STORED, DEFLATED) or flags & 1:
        raise ValueError("its header is damaged")
    if _ALL_32 in (packed, size) and not flags & _LATER:
        packed, size = _wide(extra, packed, size)
    rest = data[begin:]
    if method == DEFLATED:
        body, used = _inflated(rest, limits)
    elif flags & _LATER:
        return _stored_before(rest)
    else:
        body, used = rest[:packed], packed
    checks = [_checks(rest[used:], wide) for wide in (False, True)] if flags & _LATER else [(crc, packed, size)]
    if (zlib.crc32(body), used, len(body)) not in checks:
        raise ValueError("its bytes are not those that its checksum and its sizes tell of")
    return body


def _wide(extra: bytes, packed: int, size: int) -> tuple[int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and length >= 16 and at + 20 <= len(extra):
            size, packed = struct.unpack_from("<2Q", extra, at + 4)
            break
        at += 4 + length
    return packed, size


def _inflated(data: bytes, limits: Limits) -> tuple[bytes, int]:
    """(what a deflated stream holds, how many bytes it has)."""
    most = min(limits.member_bytes, max(limits.unpacked_free_bytes, limits.unpacked_ratio * len(data)))
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        body = unpack.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"it does not unpack ({error})") from None
    if not unpack.eof and len(body) == most:
        raise ValueError(f"it unpacks to more than {most} bytes, the limit")
    if not unpack.eof:
        raise ValueError("it is cut off")
    return body, len(data) - len(unpack.unused_data)


def _checks(data: bytes, wide: bool) -> tuple[int, int, int] | None:
    """Checksum, packed size and size, which follow a member's bytes; None where that is not so."""
    at = 4 if data.startswith(_MAGIC) else 0
    layout = struct.Struct("<I2Q" if wide else "<3I")
    if at + layout.size > len(data):
        return None
    crc, packed, size = layout.unpack_from(data, at)
    return crc, packed, size


def _stored_before(data: bytes) -> bytes:
    """The stored bytes that `data` begins with, whose length is said behind them, at its end."""
    for behind in (16, 24, 12, 20):
        count = len(data) - behind
        if count >= 0 and _checks(data[count:], behind in (24, 20)) == (zlib.crc32(data[:count]), count, count):
            return data[:count]
    raise ValueError("its bytes are not those that the checksum and the sizes behind them tell of")
