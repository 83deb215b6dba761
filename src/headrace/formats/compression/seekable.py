"""Archives in the seekable zstd format: locates frames, and decompresses them separately.

The format is a sequence of independent zstd frames. A skippable frame at the end has a table of their sizes. Readers
that ignore the table decompress the same bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.compression.frames import ZSTD_WINDOW_MOST, damaged, is_skippable, zstandard, zstd_header
from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer, Ints

FOOTER_BYTES = 9
_FOOTER = struct.Struct("<IBI")  # frames, descriptor, magic
_FOOTER_MAGIC = 0x8F92EAB1
_HEADER = struct.Struct("<II")  # magic of a skippable frame, bytes that follow
_TABLE_MAGIC = 0x184D2A5E
_HAS_CHECKSUMS, _RESERVED = 0x80, 0x7C


class Frames(NamedTuple):
    """The locations of frames: frame i is bytes `packed[i]` to `packed[i + 1]` of the object.

    Attributes:
        packed, unpacked: Start of each frame in the object and in the output, and the end.
        checksums: Checksum of each frame's output. None: the table has none.
    """

    packed: Ints
    unpacked: Ints
    checksums: Ints | None = None


def seek_table_bytes(footer: Buffer) -> int:
    """Return the size of the table. 0 if there is none. `footer`: the last 9 bytes, or more."""
    if len(footer) < FOOTER_BYTES:
        return 0
    frames, descriptor, magic = _FOOTER.unpack(footer[-FOOTER_BYTES:])
    if magic != _FOOTER_MAGIC:
        return 0
    return int(_HEADER.size + frames * (12 if descriptor & _HAS_CHECKSUMS else 8) + FOOTER_BYTES)


def seek_table(tail: Buffer, size: int, *, url: str = "", limits: Limits = DEFAULTS) -> Frames | None:
    """Parse the table of frames. None if the object has none.

    Args:
        tail: The last bytes of the object, at least `seek_table_bytes`.
        size: Size of the object, in bytes.
        limits: `unpacked_ratio` and `unpacked_free_bytes` are checked for all frames together.

    Raises:
        FormatError, LimitError: The table does not match the object, or the output would exceed the limits.
        ValueError: `tail` is too short.
    """
    need = seek_table_bytes(tail)
    if not need:
        return None
    start = size - need
    if start < 0:
        raise _bad_table(f"it says that it has {need} bytes; the object has {size}", url, size - FOOTER_BYTES)
    if len(tail) < need:
        raise ValueError(f"the table is {need} bytes long; {len(tail)} were given")
    table = memoryview(tail).cast("B")[-need:]
    magic, follow = _HEADER.unpack(table[: _HEADER.size])
    frames, descriptor, _ = _FOOTER.unpack(table[-FOOTER_BYTES:])
    if magic != _TABLE_MAGIC or follow != need - _HEADER.size:
        raise _bad_table(f"it is not a skippable frame of {need - _HEADER.size} bytes", url, start)
    if descriptor & _RESERVED:
        raise _bad_table(f"its descriptor is {descriptor:#04x}, with reserved bits set", url, size - 5)
    columns = 3 if descriptor & _HAS_CHECKSUMS else 2
    body = np.frombuffer(table[_HEADER.size : -FOOTER_BYTES], "<u4").reshape(frames, columns).astype(np.int64)
    ends = np.zeros((2, frames + 1), np.int64)
    np.cumsum(body[:, :2].T, axis=1, out=ends[:, 1:])
    if ends[0, -1] != start:
        raise _bad_table(f"its frames are {ends[0, -1]} bytes together; {start} lie before it", url, start)
    _check_ratio(int(ends[1, -1]), start, url, limits)
    return Frames(ends[0], ends[1], body[:, 2] if columns == 3 else None)


def unpack_frame(
    data: Buffer, size: int, limits: Limits = DEFAULTS, *, checksum: int | None = None, url: str = ""
) -> bytes:
    """Decompress one frame, exactly `data`. Errors have no offset.

    Args:
        size: Size of the output, from the table.
        limits: `unpacked_ratio` and `unpacked_free_bytes` are checked.
        checksum: Checksum of the output, from the table. It is verified.

    Raises:
        FormatError, LimitError: The frame is damaged, its output has another size, or would exceed the limits.
        OptionError: zstandard is not installed.
    """
    library = zstandard(url)
    _check_ratio(size, len(data), url, limits)
    if size == 0 and len(data) >= 8 and is_skippable(bytes(data[:4])):
        return b""
    context = library.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MOST)
    try:
        header = zstd_header(library, data, limits.window_bytes)
        if header.content_size not in (size, library.CONTENTSIZE_UNKNOWN):
            raise FormatError(f"the frame says that it holds {header.content_size} bytes, its table {size}")
        if checksum is not None:
            data = _with_checksum(bytes(data), checksum, has_one=header.has_checksum)
        # never 0: the library would allocate any size that the frame states
        out = context.decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
    except library.ZstdError as error:
        raise _located(damaged(error), url) from error
    except FormatError as error:
        raise _located(error, url) from None
    if len(out) != size:
        raise _located(FormatError(f"{len(out)} bytes come out of the frame; its table says {size}"), url)
    return bytes(out)


def _with_checksum(frame: bytes, checksum: int, *, has_one: bool) -> bytes:
    """Return the frame with the table's checksum as its own, for the library to verify."""
    own = checksum.to_bytes(4, "little")
    if not has_one:
        return frame[:4] + bytes([frame[4] | 4]) + frame[5:] + own
    if not frame.endswith(own):
        raise FormatError("the frame's checksum is not the one that its table has")
    return frame


def _check_ratio(unpacked: int, packed: int, url: str, limits: Limits) -> None:
    if unpacked > max(limits.unpacked_free_bytes, limits.unpacked_ratio * packed):
        raise _located(
            LimitError(
                f"{packed} bytes of zstd data are to become {unpacked}; the limit is {limits.unpacked_ratio} bytes for "
                f"each (unpacked_ratio) where they are more than {limits.unpacked_free_bytes} (unpacked_free_bytes)"
            ),
            url,
        )


def _bad_table(why: str, url: str, offset: int) -> FormatError:
    return _located(FormatError(f"the table of zstd frames is damaged: {why}", offset=offset), url)


def _located(damage: FormatError, url: str) -> FormatError:
    byte = "" if damage.offset is None else f", byte {damage.offset}"
    return type(damage)(f"{damage.args[0]} ({masked(url)}{byte})", url=url, offset=damage.offset)
