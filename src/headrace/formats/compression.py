"""Decompresses shards: gzip, bzip2, xz, zstd and lz4 in bounded parts, and zstd frames.

Output is not verified when it is returned, as the checksums follow the data. `Decompressor.finish` reports that all
were correct. Four kinds of damage cannot be detected, as no format covers them:

* changed bytes in zstd and lz4 frames, or xz streams, that were written without a checksum of their content;
* a changed length of a skippable frame;
* a changed name, time or comment in gzip's header, which do not affect the data;
* an archive that was truncated exactly between two frames (the end mark of a tar reveals it).

The seekable zstd format is a sequence of independent frames. A skippable frame at the end has a table of their sizes.
"""

from __future__ import annotations

import abc
import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from headrace._util import check
from headrace._util.lazy import needed
from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer, Ints

# Most bytes that a step consumes and returns. Large, as each step releases the GIL and may wait 5 ms for it;
# not larger, as damage loses the output of its step.
STEP_PACKED = 2**18
STEP_UNPACKED = 2**20

_XZ_SLACK = 2**20  # liblzma's memory beyond its window: measured 65 KiB, and 1 KiB for each further filter
_ZSTD_BLOCK = 2**17
_SKIPPABLE_FIRST = [bytes([first]) for first in range(0x50, 0x60)]
ZSTD_WINDOW_MOST = 2**31  # the library's limit; `zstd_header` checks ours


class Frame(abc.ABC):
    """The decompression of one frame (member, stream).

    Attributes:
        ended: True if the end was reached and its checksums were correct.
        held: Bytes that the library has received beyond those that `step` has reported as consumed.
    """

    ended = False
    held = 0

    @abc.abstractmethod
    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        """Return (output, number of consumed bytes). Empty and 0: the frame needs more input.

        The output has at most `most` bytes, which is at least 1. A format that cannot stop within a block returns one
        block.

        Raises:
            FormatError: The data are damaged. The message has no location.
            LimitError: The data need a larger window than `limits.window_bytes`.
        """


def opener(kind: str, url: str, limits: Limits) -> Callable[[], Frame]:
    """Return a factory of frames. Raises an OptionError if the library is not installed."""
    if kind == "zstd":
        library = _zstandard(url)
        context = library.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MOST)
        return lambda: _Zstd(library, context, limits.window_bytes)
    if kind == "lz4":
        library = needed("lz4.frame", "lz4", f"reading {masked(url)}")
        return lambda: _Lz4(library)
    if kind == "xz":
        return lambda: _Xz(limits.window_bytes)
    return {"gzip": _Gzip, "bzip2": _Bzip2}[kind]


def _zstandard(url: str) -> Any:
    return needed("zstandard", "zstd", f"reading {masked(url)}")


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


class _Gzip(Frame):
    def __init__(self) -> None:
        self._library = zlib.decompressobj(wbits=31)

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = _piece(packed, most)
        try:
            out = self._library.decompress(piece, most)
        except zlib.error as error:
            raise damaged(error) from error
        self.ended = self._library.eof
        rest = self._library.unused_data if self.ended else self._library.unconsumed_tail
        return out, len(piece) - len(rest)


class _Bzip2(Frame):
    """The library buffers unconsumed input. All of it counts as consumed once more is needed."""

    def __init__(self, library: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None) -> None:
        self._library = library or bz2.BZ2Decompressor()

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = packed[:0] if self.held else _piece(packed, most)
        self.held += len(piece)
        try:
            out = self._library.decompress(piece, most)
        except OSError as error:
            raise damaged(error) from error
        used, self.ended = 0, self._library.eof
        if self.ended or self._library.needs_input:
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


class _Zstd(Frame):
    """Feeds whole blocks of at most 128 KiB output, as the library does not bound its output."""

    def __init__(self, library: Any, context: Any, window_bytes: int) -> None:
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
            raise FormatError(f"the frame claims to hold {self._content_size} bytes, {self._given} came out")
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


class _Lz4(Frame):
    def __init__(self, library: Any) -> None:
        self._library, self._context = library, library.create_decompression_context()

    def step(self, packed: memoryview, most: int) -> tuple[bytes, int]:
        piece = _piece(packed, most)
        try:
            out, used, self.ended = self._library.decompress_chunk(self._context, piece, max_length=most)
        except RuntimeError as error:
            raise damaged(error) from error
        return out, used


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
    """

    packed: Ints
    unpacked: Ints


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
    """
    need = seek_table_bytes(tail)
    if not need:
        return None
    start = size - need
    if start < 0:
        raise _bad_table(f"it claims to have {need} bytes; the object has {size}", url, size - FOOTER_BYTES)
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
        raise _bad_table(f"its frames are {ends[0, -1]} bytes together; {start} are before it", url, start)
    try:
        limits.check_unpacked(start, int(ends[1, -1]), "zstd")
    except LimitError as error:
        raise _located(error, url) from None
    return Frames(ends[0], ends[1])


def unpack_frame(data: Buffer, size: int, limits: Limits = DEFAULTS, *, url: str = "") -> bytes:
    """Decompress one frame, exactly `data`, to `size` bytes, as its table has. Errors have no offset."""
    library = _zstandard(url)
    if size == 0 and len(data) >= 8 and is_skippable(bytes(data[:4])):
        return b""
    context = library.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MOST)
    try:
        limits.check_unpacked(len(data), size, "zstd")
        header = zstd_header(library, data, limits.window_bytes)
        if header.content_size not in (size, library.CONTENTSIZE_UNKNOWN):
            raise FormatError(f"the frame claims to hold {header.content_size} bytes, its table {size}")
        # never 0: the library would allocate any size that the frame states
        out = context.decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
    except library.ZstdError as error:
        raise _located(damaged(error), url) from error
    except FormatError as error:
        raise _located(error, url) from None
    if len(out) != size:
        raise _located(FormatError(f"{len(out)} bytes come out of the frame; its table has {size}"), url)
    return bytes(out)


def _bad_table(why: str, url: str, offset: int) -> FormatError:
    return _located(FormatError(f"the table of zstd frames is damaged: {why}"), url, offset)


def _located(damage: FormatError, url: str, offset: int | None = None) -> FormatError:
    # a new error each time, as the traceback of a raised one keeps the caller's objects alive
    byte = "" if offset is None else f", byte {offset}"
    error = type(damage)(f"{damage.args[0]} ({masked(url)}{byte})", url=url, offset=offset)
    error.__cause__ = damage.__cause__
    return error


_ZEROS_FOR_A_BYTE = 8
_PADDING_MOST = 2**36  # bytes; takes one to two minutes to decompress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A compression: `padding` zeros (0: none) or skippable frames may separate its frames."""

    endings: tuple[str, ...]
    magic: bytes
    padding: int = 0
    skips: bool = False


_KINDS = {
    "gzip": _Kind(endings=(".gz", ".tgz"), magic=b"\x1f\x8b", padding=1),
    "zstd": _Kind(endings=(".zst", ".tzst"), magic=b"\x28\xb5\x2f\xfd", skips=True),
    "bzip2": _Kind(endings=(".bz2", ".tbz2", ".tbz"), magic=b"BZh"),
    "xz": _Kind(endings=(".xz", ".txz"), magic=b"\xfd7zXZ\0", padding=4),
    "lz4": _Kind(endings=(".lz4",), magic=b"\x04\x22\x4d\x18", skips=True),
}
ENDINGS = frozenset(ending for kind in _KINDS.values() for ending in kind.endings)
"""File name suffixes of shards that are compressed as a whole."""


def kind_of(url_or_path: str) -> str | None:
    """Return the compression of a whole shard by its name, or None."""
    path = "" if url_or_path.startswith("pipe:") else path_of(url_or_path)  # the command may decompress it
    return next((name for name, kind in _KINDS.items() if path.endswith(kind.endings)), None)


def kind_by_bytes(head: bytes) -> str | None:
    return next((name for name, kind in _KINDS.items() if head.startswith(kind.magic)), None)


def ending_of(kind: str) -> str:
    return _KINDS[kind].endings[0]


def without_compression(path: str) -> str:
    """Return the name of the decompressed shard: "a.tar" for "a.tar.gz" and "a.tgz"."""
    for kind in _KINDS.values():
        for ending in kind.endings:
            if path.endswith(ending):
                return path.removesuffix(ending) + (".tar" if ending.startswith(".t") else "")
    return path


def path_of(url: str) -> str:
    """Return the URL without the query that may follow its path."""
    if "?" not in url and "#" not in url:
        return url  # fast path: there may be very many URLs
    try:
        return urlsplit(url).path
    except ValueError:
        return url  # invalid URLs raise an error when they are read


def begin_of(kind: str, packed: bytes, most: int) -> bytes:
    """Return at most `most` first bytes of a compressed object. Empty if it is damaged."""
    target = bytearray(most)
    try:
        decompressor = Decompressor(kind, "")
        decompressor.feed(packed)
        return bytes(target[: decompressor.read_into(memoryview(target))])
    except (FormatError, OptionError):
        return b""


class Decompressor:
    """Decompresses one archive in order, in bounded memory.

    It holds what was fed, the output of one step, and the window of the format. Consecutive frames (members, streams)
    are joined. Padding and skippable frames are skipped, if the format has them. For each part of the object, call
    `feed`, and `read_into` until it returns less than requested; then `finish`. Not thread-safe; the GIL is released
    while the library works. Damage is raised after all output before it was read, and by every later call.

    Attributes:
        is_past_end: Set by the caller once the archive inside has ended. Zeros that follow are padding, which no ratio
            limits up to 64 GiB.

    Example:
        >>> import gzip
        >>> archive = Decompressor("gzip", "file:///train.tar.gz")
        >>> target = bytearray(1000)
        >>> archive.feed(gzip.compress(b"abc"))
        >>> archive.read_into(memoryview(target))
        3
        >>> archive.finish()
    """

    def __init__(self, kind: str, url: str, limits: Limits = DEFAULTS, *, is_padded: bool = False) -> None:
        """Create a decompressor that was fed nothing.

        Args:
            kind: "gzip", "zstd", "bzip2", "xz" or "lz4", as returned by `kind_of`.
            limits: `window_bytes`, `unpacked_ratio` and `unpacked_free_bytes` are checked.
            is_padded: Allow eight times the ratio for zeros, as they follow the end of tar archives, until
                `is_past_end` is set. For callers that hold little of the output.
        """
        check.one_of("kind", kind, _KINDS)
        self._name, self._kind, self._url, self._limits = kind, _KINDS[kind], url, limits
        self._open = opener(kind, url, limits)
        self._frame: Frame | None = None
        self._frames = 0
        self._damage: FormatError | None = None
        self._packed = bytearray()  # fed bytes; consumed up to _at
        self._at = 0
        self._offset = 0  # offset of _at in the object
        self._skip = 0  # remaining bytes of a skippable frame
        self._padding = 0  # zeros since the last frame
        self._ready = memoryview(b"")  # output that did not fit into the target
        self._unpacked = 0
        self._spared = 0  # zeros exempt from the ratio, in steps with no other output
        self._is_padded, self.is_past_end = is_padded, False

    def feed(self, data: Buffer) -> None:
        if self._damage is None:
            del self._packed[: self._at]
            self._at = 0
            self._packed += data

    def read_into(self, target: memoryview) -> int:
        """Fill `target` with the next bytes and return their number.

        The number is less than the size of `target` only if more must be fed, or at the end.
        """
        view = target.cast("B")
        got = 0
        while got < len(view) and (self._ready or self._advance(len(view) - got)):
            part = self._ready[: len(view) - got]
            view[got : got + len(part)] = part
            self._ready = self._ready[len(part) :]
            got += len(part)
        if not got and self._damage is not None:
            raise _located(self._damage, self._url, self._offset)
        return got

    def finish(self) -> None:
        """Check that the object may end here: the last frame is complete, checksums are correct."""
        if self.read_into(memoryview(bytearray(1))):
            raise ValueError("there is more: call read_into() until it gives nothing")
        end = self._offset + len(self._packed) - self._at
        if end == 0:
            raise _located(FormatError(f"the archive is empty: there are no {self._name} data"), self._url, end)
        if self._frame is not None or self._skip or end > self._offset:
            text = f"the archive is truncated: its {self._name} data end in a frame"
            raise _located(FormatError(text), self._url, end)
        try:
            self._check_padding()
        except FormatError as damage:
            raise _located(damage, self._url, end) from None

    def _advance(self, most: int) -> bool:
        """Do one bounded step. Return True if it consumed or produced bytes."""
        if self._damage is not None:
            return False
        try:
            with memoryview(self._packed) as packed:
                used = self._step(packed[self._at :], min(most, STEP_UNPACKED))
        except FormatError as damage:
            # remove tracebacks, as their frames keep buffers alive
            if damage.__cause__ is not None:
                damage.__cause__.__traceback__ = None
            self._damage = damage.with_traceback(None)
            return False
        self._at += used
        self._offset += used
        return used > 0 or len(self._ready) > 0

    def _step(self, packed: memoryview, most: int) -> int:
        """Set `_ready` to the output of one step. Return the number of consumed bytes."""
        if self._frame is None:
            used = self._pass_over(packed)
            if self._frame is None:
                return used
        out, used = self._frame.step(packed, most)
        self._unpacked += len(out)
        fed = self._offset + used + self._frame.held
        if self._is_padded and out[:1] == b"\0" and not out.rstrip(b"\0"):
            is_padding = self.is_past_end and self._unpacked <= _PADDING_MOST
            self._spared += len(out) if is_padding else len(out) - len(out) // _ZEROS_FOR_A_BYTE
        self._limits.check_unpacked(fed, self._unpacked - self._spared, self._name)
        self._ready = memoryview(out)
        if self._frame.ended:
            self._frame = None
        return used

    def _pass_over(self, packed: memoryview) -> int:
        """Skip data between frames, or begin a frame. Return the number of consumed bytes."""
        if self._skip:
            used = min(self._skip, len(packed))
            self._skip -= used
            return used
        if self._kind.padding and self._frames:
            some = bytes(packed[:STEP_PACKED])
            zeros = len(some) - len(some.lstrip(b"\0"))
            self._padding += zeros
            if zeros:
                return zeros
        head = bytes(packed[:8])
        if not head:
            return 0
        self._check_padding()
        if self._kind.skips and is_skippable(head):
            if len(head) < 8:
                return 0
            self._skip = int.from_bytes(head[4:], "little")
            return 8
        if not self._kind.magic.startswith(head[: len(self._kind.magic)]):
            raise FormatError(self._foreign(head))
        if len(head) >= len(self._kind.magic):
            self._frame, self._frames, self._padding = self._open(), self._frames + 1, 0
        return 0

    def _check_padding(self) -> None:
        unit = self._kind.padding
        if unit and self._padding % unit:
            raise FormatError(f"{self._padding} zeros follow the {self._name} data; padding is in multiples of {unit}")

    def _foreign(self, head: bytes) -> str:
        other = kind_by_bytes(head)
        looks = "" if other is None else f", as {other} data do"
        if self._frames:
            return f"more follows the {self._name} data; it begins with {head.hex(' ')}{looks}"
        return f"these are not {self._name} data: they begin with {head.hex(' ')}{looks}"


_FIRST_ROOM = 4096


def unpacked(kind: str, data: bytes, url: str, limits: Limits, nbytes: int | None = None) -> bytearray:
    """Decompress `data` to `nbytes`, which the caller has checked against the limits. None: to any size."""
    decompressor = Decompressor(kind, url, limits)
    decompressor.feed(data)
    out, filled = bytearray(max(_FIRST_ROOM, 2 * len(data)) if nbytes is None else nbytes + 1), 0
    while True:
        filled += decompressor.read_into(memoryview(out)[filled:])
        if nbytes is None and filled > limits.member_bytes:
            raise LimitError.at(url, f": it unpacks to more than {limits.member_bytes} bytes, the limit")
        if filled < len(out):
            break
        if nbytes is not None:
            raise ValueError(f"it unpacks to more than the {nbytes} bytes that its catalogue lists")
        out += bytes(len(out))
    decompressor.finish()  # raises an error with the offset if the data are truncated
    if nbytes not in (None, filled):
        raise ValueError(f"it unpacks to {filled} bytes, and its catalogue lists {nbytes}")
    del out[filled:]
    return out
