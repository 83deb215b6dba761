"""The tables of MP4 files (ISO/IEC 14496-12): boxes, the frames that they describe, and reads of only these bytes.

A box has a length, a kind of four letters and a body. A file is a sequence of boxes. A plain file has one `moov` box at
any place, with one set of tables. A fragmented file also has `moof` boxes with tables before each part (8.8). Each is
found after the one before with a separate request. If `sidx` or `mfra` lists them, many are read at once. The reader
still walks from box to box, so that an incomplete list skips none.

A value that a fragment omits comes from its track's `tfhd`, or else from the `trex` among the file's own tables. Its
bytes begin at the offset in `tfhd`. Without one they begin at the start of the fragment, or for a further track after
the bytes of the track before.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.formats.limits import Limits, check_bytes
from headrace.types import Buffer, Ints

HEADER_BYTES = 16
"""Maximum size of a box's header."""

_BOXES_MOST = 10_000  # in one box: malicious files have millions of empty ones
_U32, _U64 = struct.Struct(">I"), struct.Struct(">Q")


def header_of(data: bytes | memoryview, left: int) -> tuple[bytes, int, int]:
    """Parse a box header: (kind, header bytes, box bytes). `left`: bytes left in the container."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are left, fewer than a box's header")
    (size,), kind, header = _U32.unpack_from(data), bytes(data[4:8]), 8
    if size == 1:
        if len(data) < HEADER_BYTES:
            raise ValueError(f"the header of its box {shown(kind)} is cut off")
        (size,), header = _U64.unpack_from(data, 8), HEADER_BYTES
    elif size == 0:
        size = left
    if not header <= size:
        raise ValueError(f"its box {shown(kind)} has {size} bytes, fewer than its header")
    return kind, header, size


def shown(kind: bytes) -> str:
    return repr(kind.decode("latin-1"))


@dataclass(frozen=True, slots=True)
class Box:
    """A box with its kind and body. Iteration returns the boxes in it."""

    kind: bytes
    body: memoryview

    def __iter__(self) -> Iterator[Box]:
        at, end = 0, len(self.body)
        for _ in range(_BOXES_MOST):
            if end - at < 8 and not any(self.body[at:]):  # QuickTime ends some boxes with zeros
                return
            kind, header, size = header_of(self.body[at : at + HEADER_BYTES], end - at)
            if size > end - at:
                raise ValueError(f"its box {shown(kind)} has {size} bytes, and {end - at} are left in {self}")
            yield Box(kind, self.body[at + header : at + size])
            at += size
        raise ValueError(f"there are over {_BOXES_MOST} boxes in {self}")

    def __str__(self) -> str:
        return shown(self.kind)

    def find(self, *path: bytes) -> Box | None:
        found: Box | None = self
        for kind in path:
            found = next((box for box in found if box.kind == kind), None) if found is not None else None
        return found

    def need(self, *path: bytes) -> Box:
        found = self.find(*path)
        if found is None:
            raise ValueError(f"{self} has no box {'/'.join(shown(kind).strip(chr(39)) for kind in path)}")
        return found

    def number(self, at: int, size: int = 4) -> int:
        if at + size > len(self.body):
            raise ValueError(f"its box {self} has {len(self.body)} bytes, and is cut off")
        return int.from_bytes(self.body[at : at + size], "big")

    @property
    def version(self) -> int:
        """Version of a box that begins with a version and flags."""
        return self.number(0, 1)

    def table(self, columns: int, *, at: int = 4, dtype: str = ">u4") -> Ints:
        """Return the rows after a row count at `at`: `[rows, columns]`."""
        rows, width = self.number(at), columns * np.dtype(dtype).itemsize
        if at + 4 + rows * width > len(self.body):
            raise ValueError(f"its box {self} would have {rows} rows of {width} bytes, and has {len(self.body)} bytes")
        numbers = np.frombuffer(self.body, dtype, rows * columns, at + 4)
        if dtype == ">u8" and rows and int(numbers.max()) > 2**53:
            raise ValueError(f"its box {self} has a number that is too large")
        return numbers.astype(np.int64).reshape(rows, columns)


def box(kind: bytes, *parts: Buffer) -> bytes:
    """Return a box of these parts, of less than 4 GiB."""
    return b"".join([_U32.pack(8 + sum(map(len, parts))), kind, *parts])


FRAMES_MOST = 2**26
"""Frames of about a month. With a constant frame size, a few bytes could claim any number."""

REMUX = "`ffmpeg -i IN.mp4 -c copy -movflags +faststart OUT.mp4` makes a plain file of it"


@dataclass(frozen=True)
class Samples:
    """Consecutive frames in decoding order.

    Attributes:
        offset, size: Bytes of each frame in the file.
        dts, pts: Decoding and presentation time, in ticks of the track.
        end: Decoding time of the next frame after them.
        is_key: True if decoding can begin there.
        description: Number of the track's sample description, from 1.
    """

    offset: Ints
    size: Ints
    dts: Ints
    pts: Ints
    end: int
    is_key: NDArray[np.bool_]
    description: Ints

    @cached_property
    def delta(self) -> Ints:
        """Ticks until the next frame is decoded."""
        return np.diff(self.dts, append=self.end)


def joined(parts: Sequence[Samples]) -> Samples:
    """Concatenate parts. Raises a ValueError if one begins before the end of the part before."""
    if len(parts) == 1:
        return parts[0]
    names = ("offset", "size", "dts", "pts", "is_key", "description")
    offset, size, dts, pts, is_key, description = (
        np.concatenate([getattr(part, name) for part in parts]) for name in names
    )
    back = np.flatnonzero(np.diff(dts) < 0)
    if len(back):
        raise ValueError(f"its frame {int(back[0]) + 1} is decoded before the one that is stored before it")
    return Samples(offset, size, dts, pts, parts[-1].end, is_key, description)


def plain_samples(stbl: Box, nbytes: int) -> Samples | None:
    """Return the frames in the tables of a track. None if there are none."""
    size = _sizes(stbl, nbytes)
    count = len(size)
    if not count:
        return None
    offset, description = _offsets(stbl, size, nbytes)
    delta = _per_frame(stbl.need(b"stts"), count)
    dts = np.cumsum(delta) - delta
    ctts = stbl.find(b"ctts")
    pts = dts if ctts is None else dts + _per_frame(ctts, count, is_signed=True)
    return Samples(offset, size, dts, pts, int(delta.sum()), _keys(stbl.find(b"stss"), count), description)


def _sizes(stbl: Box, nbytes: int) -> Ints:
    stsz = stbl.find(b"stsz")
    if stsz is None:
        raise ValueError(f"it has no table 'stsz' of its frames' sizes; {REMUX}")
    each, count = stsz.number(4), stsz.number(8)
    if count > FRAMES_MOST:
        raise ValueError(f"it would have {count} frames, over the limit of {FRAMES_MOST}")
    if not each:
        sizes = stsz.table(1, at=8)[:, 0]
    elif each * count > nbytes:
        raise ValueError(f"it would have {count} frames of {each} bytes, and has {nbytes} bytes")
    else:
        sizes = np.full(count, each, np.int64)
    if count and not int(sizes.min()):
        raise ValueError(f"its frame {int(sizes.argmin())} has no bytes")
    return sizes


def _offsets(stbl: Box, sizes: Ints, nbytes: int) -> tuple[Ints, Ints]:
    """Return the offset of each frame, and the number of its description."""
    stco = stbl.find(b"stco")
    chunks = stbl.need(b"co64").table(1, dtype=">u8")[:, 0] if stco is None else stco.table(1)[:, 0]
    runs = stbl.need(b"stsc").table(3)
    first = np.append(runs[:, 0], len(chunks) + 1)
    if not len(runs) or first[0] != 1 or (np.diff(first) <= 0).any():
        raise ValueError(f"its table 'stsc' does not go through its {len(chunks)} chunks one after the other")
    in_chunk = np.repeat(runs[:, 1], np.diff(first))
    if int(in_chunk.sum()) != len(sizes):
        raise ValueError(f"its chunks have {int(in_chunk.sum())} frames, and there are {len(sizes)}")
    before = np.cumsum(sizes) - sizes
    first_of_chunk = np.minimum(np.cumsum(in_chunk) - in_chunk, len(sizes) - 1)
    offset = np.repeat(chunks - before[first_of_chunk], in_chunk) + before
    beyond = np.flatnonzero(offset + sizes > nbytes)
    if len(beyond):
        at = int(beyond[0])
        end = int(offset[at] + sizes[at])
        raise ValueError(f"its frame {at} would end at byte {end}, and it has {nbytes} bytes: it is cut off")
    return offset, np.repeat(np.repeat(runs[:, 2], np.diff(first)), in_chunk)


def _per_frame(box: Box, count: int, *, is_signed: bool = False) -> Ints:
    """Expand a table of (number of frames, value) to one value per frame."""
    runs = box.table(2)
    if int(runs[:, 0].sum()) != count:
        raise ValueError(f"its table {box} is of {int(runs[:, 0].sum())} frames, and there are {count}")
    return np.repeat(_signed(runs[:, 1]) if is_signed else runs[:, 1], runs[:, 0])


def _keys(stss: Box | None, count: int) -> NDArray[np.bool_]:
    """Return a mask of key frames. All frames if there is no table."""
    if stss is None:
        return np.ones(count, np.bool_)
    numbers = stss.table(1)[:, 0]
    if not len(numbers) or numbers[0] != 1 or int(numbers.max()) > count:
        raise ValueError(
            "its first frame is none where one can begin to decode, or its table 'stss' has others' numbers"
        )
    is_key = np.zeros(count, np.bool_)
    is_key[numbers - 1] = True
    return is_key


Fragment = tuple[int, bytes]
"""(offset, body) of a `moof` box."""

_BASE, _DESCRIPTION, _DURATION, _SIZE, _FLAGS, _BASE_IS_MOOF = 0x1, 0x2, 0x8, 0x10, 0x20, 0x20000  # of `tfhd`
_DATA_OFFSET, _FIRST_FLAGS, _SIZE_COLUMN = 0x1, 0x4, 0x200  # of `trun`
_ROW = (0x100, _SIZE_COLUMN, 0x400, 0x800)  # optional columns: duration, size, flags, composition offset
_TIME_MOST = 2**53
_NOT_KEY = 0x01010000  # flags of a frame: not a sync sample, or depends on others


def track_of(trak: Box) -> int:
    tkhd = trak.need(b"tkhd")
    return tkhd.number(20 if tkhd.version else 12)


def of_track(moof: Box, track: int) -> bytes | None:
    """Return the parts of a fragment that locate the frames of a track. None if it has none."""
    tracks = [part for part in moof if part.kind == b"traf"]
    heads = [part.need(b"tfhd") for part in tracks]
    own = [part for part, tfhd in zip(tracks, heads, strict=True) if tfhd.number(4) == track]
    if not own:
        return None
    # Without an offset, its bytes follow those of the tracks before it.
    is_placed = all(part.need(b"tfhd").number(1, 3) & (_BASE | _BASE_IS_MOOF) for part in own)
    return b"".join(box(part.kind, part.body) for part in (own if is_placed else tracks))


_Defaults = tuple[int, int, int, int]
"""(sample description, duration, size, flags) of the frames that do not state them."""


def fragment_samples(fragments: Sequence[Fragment], mvex: Box, track: int, begin: int, nbytes: int) -> list[Samples]:
    """Return the frames of a track in the fragments, by run. Damage raises a ValueError.

    `begin` is the decoding time of the first frame if the fragments omit it, in ticks.
    """
    defaults = {
        part.number(4): (part.number(8), part.number(12), part.number(16), part.number(20))
        for part in mvex
        if part.kind == b"trex"
    }
    found: list[Samples] = []
    taken = _Taken(nbytes)
    for at, body in fragments:
        behind = at
        try:
            for traf in (part for part in Box(b"moof", memoryview(body)) if part.kind == b"traf"):
                tfhd, tfdt = traf.need(b"tfhd"), traf.find(b"tfdt")
                number = tfhd.number(4)
                if number not in defaults:
                    raise ValueError(f"'mvex' does not describe its track {number}")
                own, behind = _head(tfhd, defaults[number], at, behind)
                if number == track and tfdt is not None:
                    begin = tfdt.number(4, 8 if tfdt.version else 4)
                    if begin > _TIME_MOST:
                        raise ValueError(f"its time, {begin}, is too large")
                base = behind
                for trun in (part for part in traf if part.kind == b"trun"):
                    behind, run = _run(trun, own, (base, behind), begin, taken)
                    if number == track and len(run.size):
                        found.append(run)
                        begin = run.end
        except ValueError as error:
            raise ValueError(f"its fragment at byte {at}: {error}") from None
    return found


class _Taken:
    """Checks that all frames fit into a file of `nbytes`, before memory is allocated for them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.frames, self.taken = nbytes, 0, 0

    def count(self, frames: int) -> None:
        self.frames += frames
        if self.frames > FRAMES_MOST:
            raise ValueError(f"there would be {self.frames} frames up to there, over the limit of {FRAMES_MOST}")

    def place(self, start: int, stop: int) -> None:
        self.taken += stop - start
        if not 0 <= start <= stop <= self.nbytes or self.taken > self.nbytes:
            raise ValueError(
                f"its frames would be at bytes {start} to {stop}, and with those before have {self.taken} bytes, and "
                f"it has {self.nbytes}: it is cut off"
            )


def _head(tfhd: Box, defaults: _Defaults, at: int, behind: int) -> tuple[_Defaults, int]:
    """Return (values for a track's frames in the fragment at `at`, base offset of its bytes)."""
    flags, place = tfhd.number(1, 3), 8
    base = at if flags & _BASE_IS_MOOF else behind
    if flags & _BASE:
        base, place = tfhd.number(place, 8), place + 8
    found = []
    for flag, default in zip((_DESCRIPTION, _DURATION, _SIZE, _FLAGS), defaults, strict=True):
        found.append(tfhd.number(place) if flags & flag else default)
        place += 4 if flags & flag else 0
    description, duration, size, kind = found
    return (description, duration, size, kind), base


def _run(trun: Box, own: _Defaults, places: tuple[int, int], begin: int, taken: _Taken) -> tuple[int, Samples]:
    """Return the end of a run of frames, and the frames. `places`: base offset, and the end of the run before."""
    flags, count, place = trun.number(1, 3), trun.number(4), 8
    taken.count(count)
    described, each_duration, each_size, each_kind = own
    base, start = places
    if flags & _DATA_OFFSET:
        start, place = base + int(_signed(np.asarray(trun.number(place)))), place + 4
    first = None
    if flags & _FIRST_FLAGS:
        first, place = trun.number(place), place + 4
    columns = [flag for flag in _ROW if flags & flag]
    if place + 4 * count * len(columns) > len(trun.body):
        raise ValueError(f"its box {trun} would have {count} rows, and has {len(trun.body)} bytes")
    if _SIZE_COLUMN not in columns and count * each_size > taken.nbytes:
        raise ValueError(f"it would have {count} frames of {each_size} bytes, and there are {taken.nbytes} bytes")
    rows = np.frombuffer(trun.body, ">u4", count * len(columns), place).reshape(count, -1).astype(np.int64)
    of = dict(zip(columns, rows.T, strict=True))

    def column(flag: int, default: int) -> Ints:
        return of[flag] if flag in of else np.full(count, default, np.int64)

    duration, size, kinds, later = map(column, _ROW, (each_duration, each_size, each_kind, 0))
    if first is not None and count:
        kinds[0] = first
    if count and not int(size.min()):
        raise ValueError(f"its frame {int(size.argmin())} has no bytes")
    stop = start + int(size.sum())
    taken.place(start, stop)
    ends = begin + np.cumsum(duration)
    dts, offset = ends - duration, start + np.cumsum(size) - size
    end, description = int(ends[-1]) if count else begin, np.full(count, described, np.int64)
    return stop, Samples(offset, size, dts, dts + _signed(later), end, kinds & _NOT_KEY == 0, description)


def _signed(numbers: Ints) -> Ints:
    """Take 32-bit numbers as signed, in version 0 of a box, too, as writers do, against the standard."""
    return np.where(numbers < 2**31, numbers, numbers - 2**32)


HEAD_BYTES = 64 * 1024
"""Size of the first read. It has the tables of some minutes of a file made for streaming."""

_FRAGMENT_BYTES = 8 * 1024  # read per fragment; its tables have about 12 bytes per frame
_FRAGMENT_MOST = 2**20
_AT_ONCE = 32
_LIST_MOST = 2**24  # bytes of a list of fragments; longer lists are ignored
_BEFORE_MOST = 1000  # maximum number of boxes before the tables

Ranges = list[tuple[int, int]]
"""Byte ranges [start, stop) of a file."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The `moov` box of a file, without unneeded parts, and its fragments in order."""

    moov: bytes
    fragments: tuple[Fragment, ...] = ()


Found = Generator[Ranges, list[memoryview], Tables]
"""Yields byte ranges to read, receives their bytes, and returns the tables."""


def find_tables(head: memoryview, size: int, url: str, limits: Limits) -> Found:
    """Find the tables of a file. The generator requests the bytes that it needs.

    `head` are the first bytes. Tables of more than `limits.member_bytes` together raise a LimitError.
    """
    walk = _Walk(head, size)
    at, number, nbytes = 0, 0, 0
    moov: Box | None = None
    track, fragments, listed = 0, list[Fragment](), list[int]()
    while at < size:
        kind, header, length = header_of((yield from walk.part(at, min(HEADER_BYTES, size - at))), size - at)
        if at + length > size:
            raise ValueError(
                f"its box {shown(kind)} at {at} would end at byte {at + length}, and it has {size}: it is cut off"
            )
        if kind in (b"moov", b"moof"):
            nbytes += length
            check_bytes("the table of its frames", nbytes, limits.member_bytes, url=url)
            if kind == b"moof" and moov is None:
                raise ValueError("it begins with a fragment, and its tables do not come before")
            if kind == b"moof" and not walk.is_among_fragments:
                yield from walk.look_for_list(at, listed)
            if kind == b"moof":
                walk.ahead = max(walk.ahead, min(length + 1024, _FRAGMENT_MOST))
            body = yield from walk.part(at + header, length - header)
            if kind == b"moof":
                own = of_track(Box(kind, body), track)
                fragments += [] if own is None else [(at, own)]
            elif moov is not None:
                raise ValueError("it has two boxes 'moov'")
            else:
                moov = Box(kind, memoryview(b"".join(_kept(Box(kind, body)))))
                if moov.find(b"mvex") is None:
                    return Tables(bytes(moov.body))
                track = track_of(video_track(moov))
        elif kind == b"sidx" and not walk.is_among_fragments and length < _LIST_MOST:
            body = yield from walk.part(at + header, length - header)
            listed += _listed_in_sidx(Box(kind, body), at + length)
        at += length
        number += 1
        if moov is None and number > _BEFORE_MOST:
            break
    if moov is None:
        raise ValueError(f"it has no box 'moov' with tables within its {size} bytes: it is cut off, or no MP4")
    return Tables(bytes(moov.body), tuple(fragments))


def video_track(movie: Box) -> Box:
    """Return the video track. Raises a ValueError unless there is exactly one."""
    videos = [trak for trak in movie if trak.kind == b"trak" and not _is_other(trak)]
    if len(videos) != 1:
        raise ValueError(f"it has {len(videos)} video tracks; one is read")
    return videos[0]


def _is_other(trak: Box) -> bool:
    return bytes(trak.need(b"mdia", b"hdlr").body[8:12]) != b"vide"


def _kept(moov: Box) -> Iterator[bytes]:
    for part in moov:
        if part.kind != b"udta" and not (part.kind == b"trak" and _is_other(part)):
            yield box(part.kind, part.body)


class _Walk:
    """Reads a file forwards, in steps of at least `ahead`. Holds bytes that were not passed."""

    def __init__(self, head: memoryview, size: int) -> None:
        self.ahead = HEAD_BYTES
        self.is_among_fragments = False
        self._listed: list[int] = []
        self._size = size
        self._parts = [(0, head)]

    def part(self, start: int, length: int) -> Generator[Ranges, list[memoryview], memoryview]:
        """Return a part of the file. Raises a ValueError if the file ends before it."""
        parts = [part for part in self._parts if part[0] + len(part[1]) > start]
        have = parts[0][1][start - parts[0][0] :][:length] if parts and parts[0][0] <= start else memoryview(b"")
        self._parts = parts
        if len(have) == length:
            return have
        stop = max(start + length, min(start + self.ahead, self._size))
        behind = [part for part in parts if part[0] >= stop]
        ranges = [(start + len(have), stop), *([] if behind else self._listed_behind(stop))]
        read = yield ranges
        data = memoryview(b"".join([have, read[0]])) if len(have) else read[0]
        self._parts = [
            (start, data),
            *((at, more) for (at, _), more in zip(ranges[1:], read[1:], strict=True)),
            *behind,
        ]
        if len(data) < length:
            raise ValueError(f"it ends within a box at {start}: it is cut off")
        return data[:length]

    def look_for_list(self, at: int, listed: list[int]) -> Generator[Ranges, list[memoryview], None]:
        """Set the starts of fragments from a list in the file. `listed` are those of `sidx` boxes."""
        self.ahead, self.is_among_fragments = _FRAGMENT_BYTES, True
        if len(listed) < 2 and self._size - at > 4 * HEAD_BYTES:
            (tail,) = yield [(self._size - 16, self._size)]
            mfra = int.from_bytes(tail[12:], "big")
            if bytes(tail[4:8]) == b"mfro" and 24 < mfra < min(self._size - at, _LIST_MOST):
                (tail,) = yield [(self._size - mfra, self._size)]
                listed = _listed_in_mfra(tail)
        self._listed = sorted({one for one in listed if at < one < self._size})

    def _listed_behind(self, stop: int) -> Ranges:
        """Return ranges at the starts of the next listed fragments from `stop` on."""
        ranges: Ranges = []
        first = bisect_left(self._listed, stop)
        for at in self._listed[first : first + _AT_ONCE]:
            if at >= stop:
                stop = min(at + self.ahead, self._size)
                ranges.append((at, stop))
        return ranges


def _listed_in_sidx(sidx: Box, end: int) -> list[int]:
    """Return the starts in a `sidx` box that ends at byte `end`. Empty if it is damaged."""
    try:
        wide = 8 if sidx.version else 4
        sizes = sidx.table(3, at=12 + 2 * wide)[:, 0] & (2**31 - 1)  # the highest bit marks references to other lists
        listed: list[int] = (end + sidx.number(12 + wide, wide) + np.cumsum(sizes) - sizes).tolist()
    except (ValueError, OverflowError):
        return []
    return listed


def _listed_in_mfra(data: memoryview) -> list[int]:
    """Return the starts of fragments in an `mfra` box with header. Empty if it is damaged."""
    listed: list[int] = []
    try:
        for tfra in (part for part in Box(b"mfra", data[8:]) if part.kind == b"tfra"):
            wide, lengths = 8 if tfra.version else 4, tfra.number(8)
            row = 2 * wide + 3 + (lengths >> 4 & 3) + (lengths >> 2 & 3) + (lengths & 3)
            rows = np.frombuffer(tfra.body, np.uint8, tfra.number(12) * row, 16).reshape(-1, row)
            listed += np.ascontiguousarray(rows[:, wide : 2 * wide]).view(f">u{wide}")[:, 0].tolist()
    except ValueError:
        return []
    return listed


def tables_in(data: memoryview, limits: Limits) -> Tables:
    walk = find_tables(data, len(data), "the file", limits)
    try:
        ranges = next(walk)
        while True:
            ranges = walk.send([data[start:stop] for start, stop in ranges])
    except StopIteration as end:
        found: Tables = end.value
        return found
