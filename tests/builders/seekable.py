"""Archives in the seekable format of Zstandard."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard


def skippable(body: bytes, number: int = 0) -> bytes:
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + struct.pack("<I", len(body)) + body


def table_of(sizes: Sequence[tuple[int, ...]], descriptor: int) -> bytes:
    body = b"".join(struct.pack(f"<{len(entry)}I", *entry) for entry in sizes)
    return skippable(body + struct.pack("<IBI", len(sizes), descriptor, 0x8F92EAB1), 14)


def seekable(parts: Sequence[bytes], checksums: bool = True, own: bool = False) -> bytes:
    """Frames and their table; `own`: the frames have checksums themselves too."""
    frames = [zstandard.ZstdCompressor(write_checksum=own).compress(part) for part in parts]
    sizes: list[tuple[int, ...]] = [(len(frame), len(part)) for frame, part in zip(frames, parts, strict=True)]
    if checksums:
        with_own = [zstandard.ZstdCompressor(write_checksum=True).compress(part) for part in parts]
        sums = [int.from_bytes(frame[-4:], "little") for frame in with_own]
        sizes = [(*size, one) for size, one in zip(sizes, sums, strict=True)]
    return b"".join(frames) + table_of(sizes, 0x80 if checksums else 0)


def in_frames(data: bytes, size: int, own: bool = False) -> bytes:
    """Frames of so many bytes, and their table without checksums."""
    return seekable([data[at : at + size] for at in range(0, len(data), size)], checksums=False, own=own)
