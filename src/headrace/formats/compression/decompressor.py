"""Decompresses shards in bounded parts: gzip, bzip2, xz, zstd and lz4.

Output is not verified when it is returned, as the checksums follow the data. `Decompressor.finish` reports that all
were correct. Four kinds of damage cannot be detected, as no format covers them:

* changed bytes in zstd and lz4 frames, or xz streams, that were written without a checksum of their content;
* a changed length of a skippable frame;
* a changed name, time or comment in gzip's header, which do not affect the data;
* an archive that was truncated exactly between two frames (the end mark of a tar reveals it).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.compression.frames import STEP_PACKED, STEP_UNPACKED, Frame, is_skippable, opener
from headrace.formats.compression.seekable import Frames, seek_table, seek_table_bytes, unpack_frame
from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer

__all__ = ["Decompressor", "Frames", "kind_of", "seek_table", "seek_table_bytes", "unpack_frame"]


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

        Raises:
            OptionError: The kind is not known, or its library is not installed.
        """
        if kind not in _KINDS:
            raise OptionError(f"kind={kind!r} is not known; {', '.join(_KINDS)} are")
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

        Raises:
            FormatError: The data are damaged. `offset` is the start of the step that found it: all data before were
                intact. Up to 1 MiB of intact output after it may be lost.
            LimitError: The window, or the ratio of output to input, exceeds its limit.
        """
        view = target.cast("B")
        got = 0
        while got < len(view) and (self._ready or self._advance(len(view) - got)):
            part = self._ready[: len(view) - got]
            view[got : got + len(part)] = part
            self._ready = self._ready[len(part) :]
            got += len(part)
        if not got and self._damage is not None:
            raise self._located(self._damage, self._offset)
        return got

    def finish(self) -> None:
        """Check that the object may end here: the last frame is complete, checksums are correct.

        Raises:
            FormatError: The object is damaged or truncated.
            ValueError: Some output was not read.
        """
        if self.read_into(memoryview(bytearray(1))):
            raise ValueError("there is more: call read_into() until it gives nothing")
        end = self._offset + len(self._packed) - self._at
        if end == 0:
            raise self._located(FormatError(f"the archive is empty: there are no {self._name} data"), end)
        if self._frame is not None or self._skip or end > self._offset:
            raise self._located(FormatError(f"the archive is truncated: its {self._name} data end in a frame"), end)
        try:
            self._check_padding()
        except FormatError as damage:
            raise self._located(damage, end) from None

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
        if self._unpacked - self._spared > max(self._limits.unpacked_free_bytes, self._limits.unpacked_ratio * fed):
            raise LimitError(
                f"{fed} bytes of {self._name} data become {self._unpacked} or more; the limit is "
                f"{self._limits.unpacked_ratio} bytes for each (unpacked_ratio), once "
                f"{self._limits.unpacked_free_bytes} came out (unpacked_free_bytes)"
            )
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

    def _located(self, damage: FormatError, offset: int) -> FormatError:
        # a new error each time, as the traceback of a raised one keeps the caller's objects alive
        where = f"{masked(self._url)}, byte {offset}"
        error = type(damage)(f"{damage.args[0]} ({where})", url=self._url, offset=offset)
        error.__cause__ = damage.__cause__
        return error


_FIRST_ROOM = 4096


def unpacked_to(nbytes: int, kind: str, data: bytes, url: str, limits: Limits) -> bytearray:
    """Decompress `data` to `nbytes`, which the caller has checked against the limits.

    Raises:
        FormatError, ValueError: The data are damaged, or have another size.
    """
    out = bytearray(nbytes)
    decompressor = Decompressor(kind, url, limits)
    decompressor.feed(data)
    got = decompressor.read_into(memoryview(out))
    if got < nbytes:
        decompressor.finish()  # raises an error with the offset if the data are truncated
        raise ValueError(f"it unpacks to {got} bytes, and its catalogue says {nbytes}")
    if decompressor.read_into(memoryview(bytearray(1))):
        raise ValueError(f"it unpacks to more than the {nbytes} bytes that its catalogue says")
    decompressor.finish()
    return out


def unpacked_whole(kind: str, data: bytes, url: str, limits: Limits) -> bytes:
    """Decompress `data` to an unknown size.

    Raises:
        FormatError, LimitError: The data are damaged, or exceed `limits.member_bytes` or the ratio.
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
