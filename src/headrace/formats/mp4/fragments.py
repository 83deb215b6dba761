"""The frames of a fragmented MP4 file: before each part there is a box with its tables.

ISO/IEC 14496-12, 8.8. A value that a fragment omits comes from its track's `tfhd`, or else from the `trex` among the
file's own tables. Its bytes begin at the offset in `tfhd`. Without one they begin at the start of the fragment, or for
a further track after the bytes of the track before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.formats.mp4.boxes import Box, box
from headrace.formats.mp4.samples import FRAMES_MOST, Samples
from headrace.types import Ints

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


@dataclass(frozen=True, slots=True)
class _Defaults:
    description: int
    duration: int
    size: int
    flags: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Contiguous frames. `later` is the time from decoding to presentation, in ticks."""

    start: int
    stop: int
    duration: Ints
    size: Ints
    flags: Ints
    later: Ints

    def samples(self, begin: int, description: int) -> Samples:
        ends = begin + np.cumsum(self.duration)
        dts = ends - self.duration
        offset = self.start + np.cumsum(self.size) - self.size
        described = np.full(len(dts), description, np.int64)
        return Samples(offset, self.size, dts, dts + self.later, int(ends[-1]), self.flags & _NOT_KEY == 0, described)


def fragment_samples(fragments: Sequence[Fragment], mvex: Box, track: int, begin: int, nbytes: int) -> list[Samples]:
    """Return the frames of a track in the fragments, by run. Damage raises a ValueError.

    `begin` is the decoding time of the first frame if the fragments omit it, in ticks.
    """
    defaults = {
        part.number(4): _Defaults(*(part.number(at) for at in (8, 12, 16, 20))) for part in mvex if part.kind == b"trex"
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
                    begin = _time(tfdt)
                base = behind
                for trun in (part for part in traf if part.kind == b"trun"):
                    run = _run(trun, own, base, behind, taken)
                    behind = run.stop
                    if number == track and len(run.size):
                        found.append(run.samples(begin, own.description))
                        begin = found[-1].end
        except ValueError as error:
            raise ValueError(f"its fragment at byte {at}: {error}") from None
    return found


def _time(tfdt: Box) -> int:
    begin = tfdt.number(4, 8 if tfdt.version else 4)
    if begin > _TIME_MOST:
        raise ValueError(f"its time, {begin}, is too large")
    return begin


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
    for flag, default in (
        (_DESCRIPTION, defaults.description),
        (_DURATION, defaults.duration),
        (_SIZE, defaults.size),
        (_FLAGS, defaults.flags),
    ):
        found.append(tfhd.number(place) if flags & flag else default)
        place += 4 if flags & flag else 0
    return _Defaults(*found), base


def _run(trun: Box, own: _Defaults, base: int, behind: int, taken: _Taken) -> _Run:
    flags, count, place = trun.number(1, 3), trun.number(4), 8
    taken.count(count)
    start = behind
    if flags & _DATA_OFFSET:
        start, place = base + _signed(trun.number(place)), place + 4
    first = None
    if flags & _FIRST_FLAGS:
        first, place = trun.number(place), place + 4
    columns = [flag for flag in _ROW if flags & flag]
    if place + 4 * count * len(columns) > len(trun.body):
        raise ValueError(f"its box {trun} would have {count} rows, and has {len(trun.body)} bytes")
    if _SIZE_COLUMN not in columns and count * own.size > taken.nbytes:
        raise ValueError(f"it would have {count} frames of {own.size} bytes, and there are {taken.nbytes} bytes")
    rows = np.frombuffer(trun.body, ">u4", count * len(columns), place).reshape(count, -1).astype(np.int64)
    of = dict(zip(columns, rows.T, strict=True))

    def column(flag: int, default: int) -> Ints:
        return of[flag] if flag in of else np.full(count, default, np.int64)

    duration, size, kinds, later = map(column, _ROW, (own.duration, own.size, own.flags, 0))
    if first is not None and count:
        kinds[0] = first
    if count and not int(size.min()):
        raise ValueError(f"its frame {int(size.argmin())} has no bytes")
    stop = start + int(size.sum())
    taken.place(start, stop)
    # signed in version 0, too, as writers do, against the standard
    return _Run(start, stop, duration, size, kinds, np.where(later < 2**31, later, later - 2**32))


def _signed(number: int) -> int:
    return number if number < 2**31 else number - 2**32
