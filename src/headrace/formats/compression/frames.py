"""Wraps the decompression libraries: one class per kind of frame, in steps of bounded size."""

from __future__ import annotations

import bz2
import importlib
import lzma
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.limits import Limits
from headrace.types import Buffer

# Most bytes that a step consumes and returns. Large, as each step releases the GIL and may wait 5 ms for it;
# not larger, as damage loses the output of its step.
STEP_PACKED = 2**18
STEP_UNPACKED = 2**20

_XZ_SLACK = 2**20  # liblzma's memory beyond its window: measured 65 KiB, and 1 KiB for each further filter
_ZSTD_BLOCK = 2**17
_SKIPPABLE_FIRST = [bytes([first]) for first in range(0x50, 0x60)]
ZSTD_WINDOW_MOST = 2**31  # the library's limit; `zstd_header` checks ours


class Frame(Protocol):
    """The decompression of one frame (member, stream).

    Attributes:
        held: Bytes that the library has received beyond those that `step` has reported as consumed.
    """

    held: int

    @property
    def ended(self) -> bool:
        """True if the end was reached and its checksums were correct."""
        ...

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        """Return (output, number of consumed bytes). Empty and 0: the frame needs more input.

        The output has at most `most` bytes, which is at least 1. A format that cannot stop within a block returns one
        block.

        Raises:
            FormatError: The data are damaged. The message has no location.
            LimitError: The data need a larger window than `limits.window_bytes`.
        """
        ...


def opener(kind: str, url: str, limits: Limits) -> Callable[[], Frame]:
    """Return a factory of frames. Raises an OptionError if the library is not installed."""
    if kind == "zstd":
        library = zstandard(url)
        context = library.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MOST)
        return lambda: _Zstd(library, context, limits.window_bytes)
    if kind == "lz4":
        library = _imported("lz4.frame", "lz4", url)
        return lambda: _Lz4(library)
    if kind == "xz":
        return lambda: _Xz(limits.window_bytes)
    return {"gzip": _Gzip, "bzip2": _Bzip2}[kind]


def zstandard(url: str) -> Any:
    return _imported("zstandard", "zstd", url)


def _imported(module: str, extra: str, url: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise OptionError(f"reading {masked(url)} needs {package}: pip install 'headrace[{extra}]'") from None


def is_skippable(head: bytes) -> bool:
    """True if `head` may be the start of a skippable frame of zstd or lz4."""
    return head[:1] in _SKIPPABLE_FIRST and b"\x2a\x4d\x18".startswith(head[1:4])


def damaged(error: Exception) -> FormatError:
    return FormatError(f"the data are damaged: {error}")


def zstd_header(library: Any, frame: Buffer, window_bytes: int) -> Any:
    """Parse the header of a zstd frame. Raises a LimitError if its window is too large."""
    header = library.get_frame_parameters(frame[:18])
    if header.window_size > window_bytes:
        raise _over_window(header.window_size, window_bytes)
    return header


def _over_window(asked: object, limit: int) -> LimitError:
    return LimitError(f"the data ask for a window of {asked} bytes; the limit is {limit} (window_bytes)")


def _piece(packed: memoryview, most: int) -> memoryview:
    # small for small outputs, as the standard library copies unconsumed input
    return packed[: min(max(most, 1024), STEP_PACKED)]


class _Gzip:
    held = 0

    def __init__(self) -> None:
        self._library = zlib.decompressobj(wbits=31)

    @property
    def ended(self) -> bool:
        return self._library.eof

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = _piece(packed, most)
        try:
            out = self._library.decompress(piece, most)
        except zlib.error as error:
            raise damaged(error) from error
        rest = self._library.unused_data if self._library.eof else self._library.unconsumed_tail
        return out, len(piece) - len(rest)


class _Bzip2:
    """The library buffers unconsumed input. All of it counts as consumed once more is needed."""

    def __init__(self, library: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None) -> None:
        self._library = library or bz2.BZ2Decompressor()
        self.held = 0

    @property
    def ended(self) -> bool:
        return self._library.eof

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = packed[:0] if self.held else _piece(packed, most)
        self.held += len(piece)
        try:
            out = self._library.decompress(piece, most)
        except OSError as error:
            raise damaged(error) from error
        used = 0
        if self._library.eof or self._library.needs_input:
            used, self.held = self.held - len(self._library.unused_data), 0
        return out, used


class _Xz(_Bzip2):
    def __init__(self, window_bytes: int) -> None:
        self._lzma = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=window_bytes + _XZ_SLACK)
        self._window_bytes = window_bytes
        super().__init__(self._lzma)

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        try:
            out, used = super().step(packed, most)
        except lzma.LZMAError as error:
            if "emory usage limit" in str(error):
                raise _over_window("more", self._window_bytes) from error
            raise damaged(error) from error
        # the library ignores unknown checks
        check = self._lzma.check
        if check != lzma.CHECK_UNKNOWN and not lzma.is_check_supported(check):
            raise FormatError(f"the data have a check of kind {check}, which cannot be verified")
        return out, used


class _Zstd:
    """Feeds whole blocks of at most 128 KiB output, as the library does not bound its output."""

    held = 0

    def __init__(self, library: Any, context: Any, window_bytes: int) -> None:
        self.ended = False
        self._library, self._window_bytes = library, window_bytes
        self._frame = context.decompressobj(write_size=STEP_UNPACKED)
        self._checksum_bytes: int | None = None  # None until the header is complete
        self._content_size, self._given = library.CONTENTSIZE_UNKNOWN, 0
        self._had_last = False

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        try:
            used = self._whole(packed, most)
            out = self._frame.decompress(packed[:used]) if used else b""
        except self._library.ZstdError as error:
            raise damaged(error) from error
        assert not self.ended or self._frame.eof
        self._given += len(out)
        if self.ended and self._content_size not in (self._given, self._library.CONTENTSIZE_UNKNOWN):
            # the library misses this if the last block is empty and fed separately
            raise FormatError(f"the frame says that it holds {self._content_size} bytes, {self._given} came out")
        return out, used

    def _whole(self, packed: memoryview, most: int) -> int:
        at = 0
        if self._checksum_bytes is None:
            at = self._header(packed)
            if self._checksum_bytes is None:
                return 0
        blocks = max(most // _ZSTD_BLOCK, 1)
        while blocks and not self._had_last:
            if len(packed) < at + 3:
                return at
            word = int.from_bytes(packed[at : at + 3], "little")
            size = 1 if word >> 1 & 3 == 1 else word >> 3  # a run is one byte
            if size > _ZSTD_BLOCK:
                raise FormatError(f"the data are damaged: a block of {size} bytes, more than the format has")
            if len(packed) < at + 3 + size:
                return at
            at, blocks, self._had_last = at + 3 + size, blocks - 1, bool(word & 1)
        if self._had_last and len(packed) >= at + self._checksum_bytes:
            at += self._checksum_bytes
            self.ended = True
        return at

    def _header(self, packed: memoryview) -> int:
        size = self._library.frame_header_size(packed[:18]) if len(packed) >= 5 else 5
        if len(packed) < size:
            return 0
        header = zstd_header(self._library, packed, self._window_bytes)
        self._checksum_bytes, self._content_size = 4 if header.has_checksum else 0, header.content_size
        return int(size)


class _Lz4:
    held = 0

    def __init__(self, library: Any) -> None:
        self.ended = False
        self._library, self._context = library, library.create_decompression_context()

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = _piece(packed, most)
        try:
            out, used, self.ended = self._library.decompress_chunk(self._context, piece, max_length=most)
        except RuntimeError as error:
            raise damaged(error) from error
        return out, used
