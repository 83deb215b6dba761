"""Decompression: damage is a FormatError, and what comes out is what the libraries' own readers give.

What one of those refuses is refused here too; what is one whole frame to them is one here. (After a frame the standard
library passes over what it does not know.) Fed in small parts, the same comes out, and then the same error.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lz4.frame
import zstandard
from builders.seekable import seekable
from full.fuzz.dice import Dice, edited

from headrace.errors import FormatError, LimitError
from headrace.formats.compression import Decompressor, seek_table, seek_table_bytes, unpack_frame
from headrace.formats.limits import Limits

URL = "s3://bucket/train.tar.x"
LIMITS = Limits(unpacked_free_bytes=2**18, unpacked_ratio=50, window_bytes=2**23)
KINDS = ("gzip", "zstd", "bzip2", "xz", "lz4")
SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"noise"
XZ_FILTERS = [{"id": lzma.FILTER_DELTA}, {"id": lzma.FILTER_LZMA2, "preset": 0}]
PACKS: dict[str, tuple[Callable[[bytes], bytes], ...]] = {
    "gzip": (
        lambda data: gzip.compress(data, 6, mtime=0),
        lambda data: gzip.compress(data, 0, mtime=0),
        lambda data: b"\x1f\x8b\x08\x1c" + bytes(6) + b"\x02\0abname\0note\0" + gzip.compress(data, mtime=0)[10:],
    ),
    "zstd": (
        lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
        lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
        lambda data: zstandard.ZstdCompressor(level=19).compressobj().compress(data) or SKIPPABLE,
    ),
    "bzip2": (bz2.compress, lambda data: bz2.compress(data, 1)),
    "xz": (
        lambda data: lzma.compress(data, preset=0),
        lambda data: lzma.compress(data, check=lzma.CHECK_SHA256, preset=1),
        lambda data: lzma.compress(data, check=lzma.CHECK_NONE, filters=XZ_FILTERS),
    ),
    "lz4": (
        lambda data: lz4.frame.compress(data, content_checksum=True),
        lambda data: lz4.frame.compress(data, block_linked=False, block_checksum=True, store_size=False),
        lambda data: lz4.frame.compress(data, compression_level=9, block_size=7),
    ),
}  # fmt: skip
LIBRARIES: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LIMITS.window_bytes),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=LIMITS.window_bytes).decompressobj(),
    "lz4": lz4.frame.LZ4FrameDecompressor,
}
BETWEEN = (b"", b"", b"", bytes(1), bytes(4), bytes(600), SKIPPABLE, b"garbage", b"\x1f", b"\x28\xb5")


def seeds() -> Iterator[bytes]:
    bodies = (b"", b"a" * 3000, bytes(range(256)) * 9)
    for k, kind in enumerate(KINDS):
        for pack in PACKS[kind]:
            yield from (bytes([0, k, n]) + pack(body) for n, body in enumerate(bodies))
        frame = PACKS[kind][0](b"a" * 30)
        yield from (bytes([0, k, n % 4]) + frame + between + frame for n, between in enumerate(BETWEEN))
        yield from (bytes([1, k, n, n + k, n * 3, 1, n % 10]) + bytes(range(n * 9, 200)) for n in range(12))
    # an empty block where there should be one byte: the library does not see that when it is fed so
    yield b"\0\1\1" + b"\x28\xb5\x2f\xfd\x24\1\1\0\0\x99\xe9\xd8\x51"
    for frames, checksums in ((0, 0), (1, 0), (3, 1)):
        yield b"\x02\0\0" + seekable([b"%d" % k * 400 for k in range(frames)], bool(checksums), own=True)


def check(data: bytes) -> None:
    dice = Dice(data)
    way, kind, piece = dice.number(2), dice.one_of(KINDS), dice.one_of((1, 3, 64, 1000))
    if way == 2:
        _check_seekable(dice.rest())
        return
    packed = _built(dice, kind) if way == 1 else dice.rest()
    out, error = _unpacked(kind, packed, max(len(packed), 1), 2**16)
    if len(packed) <= 2000 * piece:
        slowly, damage = _unpacked(kind, packed, piece, 100 * piece)
        assert (damage is None) == (error is None)
        assert slowly == out or error is not None  # a step loses what came out of it before it met damage
        assert slowly.startswith(out) or out.startswith(slowly)
    assert len(out) <= max(LIMITS.unpacked_free_bytes, LIMITS.unpacked_ratio * len(packed))
    if error is None:
        assert out == _by_library(kind, packed), "what comes out"
    elif not isinstance(error, LimitError) and len(out) < 2**17:
        assert not _is_one_frame(kind, packed), f"refused: {error}"


def _unpacked(kind: str, packed: bytes, piece: int, room: int) -> tuple[bytes, FormatError | None]:
    archive, out, target = Decompressor(kind, URL, LIMITS), bytearray(), bytearray(room)
    try:
        for at in range(0, len(packed), piece):
            archive.feed(packed[at : at + piece])
            got = room
            while got == room:
                got = archive.read_into(memoryview(target))
                out += target[:got]
        archive.finish()
    except FormatError as error:
        _assert_located(error, len(packed))
        return bytes(out), error
    return bytes(out), None


def _assert_located(error: FormatError, size: int) -> None:
    assert URL in str(error)
    assert error.offset is not None
    assert 0 <= error.offset <= size


def _by_library(kind: str, packed: bytes) -> bytes:
    if kind == "gzip":
        return gzip.decompress(packed)
    if kind == "zstd":
        return bytes(zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read())
    parts = []
    while packed:
        if kind == "lz4" and packed[1:4] == SKIPPABLE[1:4]:
            packed = packed[8 + int.from_bytes(packed[4:8], "little") :]
            continue
        library: Any = LIBRARIES[kind]()
        parts.append(library.decompress(packed))
        assert library.eof
        packed = library.unused_data or b""
        if kind == "xz":
            padding = len(packed) - len(packed.lstrip(b"\0"))
            assert padding % 4 == 0
            packed = packed[padding:]
    return b"".join(parts)


def _is_one_frame(kind: str, packed: bytes) -> bool:
    library: Any = LIBRARIES[kind]()
    try:
        library.decompress(packed)
    except (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zstandard.ZstdError):
        return False
    return bool(library.eof) and not library.unused_data


def _built(dice: Dice, kind: str) -> bytes:
    edits = dice.number(2)
    changes, parts = Dice(dice.some(4 * edits)), []
    for _ in range(dice.number(2) + 1):
        body = dice.some(dice.number(40)) * (dice.number(255) + 1) + dice.some(dice.number(200))
        parts += [dice.one_of(PACKS[kind])(body), dice.one_of(BETWEEN)]
    return edited(b"".join(parts), changes, edits)


def _check_seekable(packed: bytes) -> None:
    try:
        _check_frames(packed)
    except FormatError as error:
        if URL not in str(error):
            raise


def _check_frames(packed: bytes) -> None:
    need = seek_table_bytes(packed[-9:])
    frames = seek_table(packed[-need:] if need <= len(packed) else packed, len(packed), url=URL, limits=LIMITS)
    if frames is None:
        return
    bounds = frames.packed.tolist()
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    assert bounds[-1] == len(packed) - need
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        size = int(frames.unpacked[k + 1] - frames.unpacked[k])
        out = unpack_frame(packed[start:stop], size, LIMITS, url=URL)
        assert len(out) == size
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed[start:stop]), read_across_frames=True)
        assert out == reader.read()
