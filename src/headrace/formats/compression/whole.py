"""Something compressed that is in memory, unpacked at once."""

from __future__ import annotations

from headrace.errors import LimitError, masked
from headrace.formats.compression.decompressor import Decompressor
from headrace.formats.limits import Limits

_FIRST_ROOM = 4096


def unpacked_to(nbytes: int, kind: str, data: bytes, url: str, limits: Limits) -> bytearray:
    """What `data` unpacks to, which is to be `nbytes`; whoever asks has compared them with the limits.

    Raises:
        FormatError: it is damaged.
        ValueError: it unpacks to more or less.
    """
    out = bytearray(nbytes)
    decompressor = Decompressor(kind, url, limits)
    decompressor.feed(data)
    got = decompressor.read_into(memoryview(out))
    if got < nbytes:
        decompressor.finish()  # says of what is cut off where it ends
        raise ValueError(f"it unpacks to {got} bytes, and its catalogue says {nbytes}")
    if decompressor.read_into(memoryview(bytearray(1))):
        raise ValueError(f"it unpacks to more than the {nbytes} bytes that its catalogue says")
    decompressor.finish()
    return out


def unpacked_whole(kind: str, data: bytes, url: str, limits: Limits) -> bytes:
    """What `data` unpacks to, where nobody has said how much that is.

    Raises:
        FormatError: it is damaged.
        LimitError: it unpacks to more than `limits.member_bytes`, or more than its ratio allows.
    """
    decompressor = Decompressor(kind, url, limits)
    decompressor.feed(data)
    out, filled = bytearray(max(_FIRST_ROOM, 2 * len(data))), 0
    while True:
        filled += decompressor.read_into(memoryview(out)[filled:])
        if filled > limits.member_bytes:
            most = limits.member_bytes
            raise LimitError(f"{masked(url)}: it unpacks to more than {most} bytes, the limit", url=url)
        if filled < len(out):
            break
        out += bytes(len(out))
    decompressor.finish()
    return bytes(out[:filled])
