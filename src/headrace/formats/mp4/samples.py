"""The frames of a plain file, from its tables: offsets, times and key frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.formats.mp4.boxes import Box
from headrace.types import Ints

FRAMES_MOST = 2**26
"""Frames of about a month. With a constant frame size, a few bytes could claim any number."""

REMUX = "`ffmpeg -i IN.mp4 -c copy -movflags +faststart OUT.mp4` makes a plain file of it"


@dataclass(frozen=True, slots=True)
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

    @property
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
    values = runs[:, 1]
    if is_signed:  # in version 0, too, as writers do, against the standard
        values = np.where(values < 2**31, values, values - 2**32)
    return np.repeat(values, runs[:, 0])


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
