"""Finds the tables of a file and reads only the bytes that this takes.

A file is a sequence of boxes. A plain file has one `moov` box at any place. A fragmented file also has `moof` boxes,
each found after the one before with a separate request. If `sidx` or `mfra` lists them, many are read at once. The
reader still walks from box to box, so that an incomplete list skips none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from headrace.formats.limits import Limits, check_bytes
from headrace.formats.mp4.boxes import HEADER_BYTES, Box, box, header_of, shown
from headrace.formats.mp4.samples import Fragment, of_track, track_of

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
