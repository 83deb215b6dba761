"""Bytes of compressed shards: gzip, bzip2, xz, zstd and lz4, a bounded part at a time.

What is given has been decompressed, not yet proved: the formats have their checksums behind the data, and only
`Decompressor.finish` says that all were right. Four things no reader can see, because no format has them covered:

* other bytes in zstd and lz4 frames, or xz streams, that were written without a checksum of their content;
* the length of a skippable frame;
* gzip's name, time and other remarks in its header, which do not touch the data;
* that an archive was cut just between two frames (a tar's end mark shows it).
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
_PADDING_MOST = 2**36  # bytes: a minute or two of nothing but zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How a name says it, what every frame begins with, and what may lie between frames.

    Attributes:
        padding: zeros may, in multiples of so many; 0: none.
        skips: skippable frames may.
    """

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
"""What names of shards end in that are compressed as a whole."""


def kind_of(url_or_path: str) -> str | None:
    """How the name says that a shard is compressed as a whole; None where it does not."""
    path = "" if url_or_path.startswith("pipe:") else path_of(url_or_path)  # a command may have unpacked it
    return next((name for name, kind in _KINDS.items() if path.endswith(kind.endings)), None)


def kind_by_bytes(head: bytes) -> str | None:
    """How an object is compressed as a whole, by its first bytes; None where these are of no frame."""
    return next((name for name, kind in _KINDS.items() if head.startswith(kind.magic)), None)


def ending_of(kind: str) -> str:
    """What the name of an object ends in that is compressed so."""
    return _KINDS[kind].endings[0]


def without_compression(path: str) -> str:
    """The name that a shard has once it is unpacked: of "a.tar.gz", and of "a.tgz", it is "a.tar"."""
    for kind in _KINDS.values():
        for ending in kind.endings:
            if path.endswith(ending):
                return path.removesuffix(ending) + (".tar" if ending.startswith(".t") else "")
    return path


def path_of(url: str) -> str:
    """The address, without a query that may follow its path."""
    if "?" not in url and "#" not in url:
        return url  # as nearly all are; there may be very many
    try:
        return urlsplit(url).path
    except ValueError:
        return url  # what is wrong with the address is said where it is asked for


def begin_of(kind: str, packed: bytes, most: int) -> bytes:
    """The first bytes that come out of the begin of a compressed object, `most` at most; none if it is damaged."""
    target = bytearray(most)
    try:
        decompressor = Decompressor(kind, "")
        decompressor.feed(packed)
        return bytes(target[: decompressor.read_into(memoryview(target))])
    except (FormatError, OptionError):
        return b""


class Decompressor:
    """Decompresses one archive in order, and holds no more than was fed, one step's output, and the format's window.

    Frames (members, streams) that follow one another are one; padding and skippable frames, where the format has them,
    are passed over. Feed it a part of the object and read until less comes than could, for each part; then `finish`.
    One thread uses it at a time; the GIL is free while the library works. Damage is raised when all that came out
    before it was read, and again by whatever is called then.

    Attributes:
        is_past_end: whether the archive inside has ended. Zeros that follow are padding, which no ratio limits up to
            64 GiB. The caller sets it.

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
        """Read nothing yet.

        Args:
            kind: "gzip", "zstd", "bzip2", "xz" or "lz4", as `kind_of` says.
            url: for errors.
            limits: of which `window_bytes`, `unpacked_ratio` and `unpacked_free_bytes` hold here.
            is_padded: Allow eight times the ratio for zeros, as they follow the end of tar archives, until
                `is_past_end` is set. For callers that hold little of what comes out.

        Raises:
            OptionError: the kind is not known, or its library is not installed.
        """
        if kind not in _KINDS:
            raise OptionError(f"kind={kind!r} is not known; {', '.join(_KINDS)} are")
        self._name, self._kind, self._url, self._limits = kind, _KINDS[kind], url, limits
        self._open = opener(kind, url, limits)
        self._frame: Frame | None = None
        self._frames = 0
        self._damage: FormatError | None = None
        self._packed = bytearray()  # fed; used up to _at
        self._at = 0
        self._offset = 0  # of _at in the object
        self._skip = 0  # bytes of a skippable frame still to come
        self._padding = 0  # zeros since the last frame
        self._ready = memoryview(b"")  # came out, and had no room
        self._unpacked = 0
        self._spared = 0  # zeros that no ratio limits, in steps that gave nothing else
        self._is_padded, self.is_past_end = is_padded, False

    def feed(self, data: Buffer) -> None:
        """Take the next bytes of the object; they are copied."""
        if self._damage is None:
            del self._packed[: self._at]
            self._at = 0
            self._packed += data

    def read_into(self, target: memoryview) -> int:
        """Fill `target` with the next bytes; fewer only where more must be fed, or nothing follows. Gives how many.

        Raises:
            FormatError: the data are damaged. `offset` is where the step began that met it: all before was sound. Of
                what lies behind, up to 1 MiB may have been too, and is lost.
            LimitError: the window, or the output for so little input, is over its limit.
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
        """Prove that the object may end here: the last frame is whole, and all checksums were right.

        Raises:
            FormatError: it is damaged, or truncated.
            ValueError: not all was read.
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
        """Take one bounded step; whether it got anywhere."""
        if self._damage is not None:
            return False
        try:
            with memoryview(self._packed) as packed:
                used = self._step(packed[self._at :], min(most, STEP_UNPACKED))
        except FormatError as damage:
            # without tracebacks: their frames keep buffers alive
            if damage.__cause__ is not None:
                damage.__cause__.__traceback__ = None
            self._damage = damage.with_traceback(None)
            return False
        self._at += used
        self._offset += used
        return used > 0 or len(self._ready) > 0

    def _step(self, packed: memoryview, most: int) -> int:
        """Set what came out; gives how many bytes are used."""
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
        """Pass over what may lie between frames, or begin the next; gives how many bytes are used."""
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
        # made anew each time: one that was raised keeps what the caller had in hand alive
        where = f"{masked(self._url)}, byte {offset}"
        error = type(damage)(f"{damage.args[0]} ({where})", url=self._url, offset=offset)
        error.__cause__ = damage.__cause__
        return error


_FIRST_ROOM = 4096


def unpacked_to(nbytes: int, kind: str, data: bytes, url: str, limits: Limits) -> bytearray:
    """Unpack `data` to `nbytes` bytes, which the caller has compared with the limits.

    Raises a FormatError for damage, and a ValueError for more or fewer bytes.
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
    """Unpack `data` of which no size is known.

    Raises a FormatError for damage, and a LimitError for more than `limits.member_bytes`, or than its ratio allows.
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
