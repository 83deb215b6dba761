"""Some frames of a video, as bytes to be read and as a small file of their own.

To decode a frame takes those before it, from a key frame on. So what is read of a file is, for each group of pictures
that a frame is wanted of, its bytes from the key frame to the last frame that is wanted. Of those in a row a file is
made in memory, with tables of its own: any decoder reads it, and gives of each frame the pixels that it gives of the
whole file. FFmpeg looks for a key frame by when it is decoded: so that file has a clock of its own, by which a key
frame is decoded when it is shown, and none is called so that others behind it are shown before.

Frames that are decoded behind a key frame and shown before it (an open group of pictures) also take the group before:
that is read, too, where one of them is wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.formats.mp4.boxes import box
from headrace.formats.mp4.table import Track, VideoTable
from headrace.types import Buffer, Ints

_GAP_BYTES = 32 * 1024  # of other tracks: with so few of them in between, frames are read at once
_DELAYED = frozenset((b"avc1", b"avc2", b"avc3", b"avc4"))
"""Where decoding begins at a key frame that does not empty the decoder (of an open group), FFmpeg's decoder of H.264
leaves out what it has not given by the end. So it is also fed the frames that push out the last one."""
_FTYP = box(b"ftyp", b"isom", bytes(4), b"isommp41")
_UNITY = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


@dataclass(frozen=True, slots=True)
class Piece:
    """Frames of a video in a row, from a key frame on, of which some are wanted.

    Attributes:
        track: what they have in common.
        size, delta, composition, is_key, description: of each frame, in the order in which they are decoded: its bytes;
            how much later the next one is decoded, and how much later it is shown, in ticks; whether one can begin
            there, and all that follows is shown later; and which description it has.
        span, at: in which of the ranges that are read each lies, and where in it.
        wanted: the numbers of those that are wanted, as they are shown.
        places: which frames of the clip these are.
        times: when they are shown in their video, in seconds.
    """

    track: Track
    size: Ints
    delta: Ints
    composition: Ints
    is_key: NDArray[np.bool_]
    description: Ints
    span: Ints
    at: Ints
    wanted: Ints
    places: Ints
    times: NDArray[np.float64]

    @property
    def ticks(self) -> Ints:
        """When each of those that are wanted is shown in a file of these frames alone, in ticks."""
        shown = np.sort(np.cumsum(self.delta) - self.delta + self.composition)
        return np.asarray(shown[self.wanted], np.int64)


def pieces_of(table: VideoTable, chosen: Ints) -> tuple[list[Piece], list[tuple[int, int]]]:
    """What it takes to decode some frames, and which ranges (start, stop) of the file must be read for that.

    Args:
        chosen: their numbers among those that are shown. A ValueError says that one of them cannot be decoded.
    """
    frames = table.shown[chosen]
    runs = _runs(table, frames)
    used = np.concatenate([np.arange(first, end) for first, end in runs])
    spans, span, at = _spans(table.offset[used], table.size[used])
    pieces, begin = [], 0
    for first, end in runs:
        here, some = slice(begin, begin + end - first), slice(first, end)
        begin += end - first
        places = np.flatnonzero((frames >= first) & (frames < end))
        pts = table.pts[some]
        rank = np.empty(end - first, np.int64)
        rank[np.argsort(pts, kind="stable")] = np.arange(end - first)
        # The latest clock by which none is decoded after it is shown: players look for key frames by it.
        dts = np.minimum.accumulate(pts[::-1])[::-1]
        delta = np.append(np.diff(dts), table.delta[end - 1])
        if max(int((pts - dts).max()), int(delta.max())) >= 2**31:
            raise ValueError("its frames are shown too long after they are decoded, or one after the other")
        pieces.append(
            Piece(
                table.track,
                table.size[some],
                delta,
                pts - dts,
                table.is_key[some] & (pts == dts) & (not _ends_early(table, frames[places])),
                table.description[some],
                span[here],
                at[here],
                rank[frames[places] - first],
                places,
                table.seconds(chosen[places]),
            )
        )
    return pieces, spans


def _runs(table: VideoTable, frames: Ints) -> list[tuple[int, int]]:
    """The numbers [first, end) of all frames that it takes to decode these; the first of each run is a key frame."""
    keys, pts = table.keys, table.pts
    group = np.searchsorted(keys, frames, side="right") - 1
    back = pts[frames] < pts[keys[group]]
    if (back & (group == 0)).any():
        raise ValueError("its first frames take others to be decoded, which were cut off")
    end = frames + 1
    if table.track.codec in _DELAYED:
        end = table.given_by[frames] + 1
        back |= (end > len(pts)) & (group > 0)
    begin = keys[group - back]
    order = np.argsort(begin, kind="stable")
    runs: list[tuple[int, int]] = []
    for first, stop in zip(begin[order].tolist(), np.minimum(end, len(pts))[order].tolist(), strict=True):
        if runs and first <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((first, stop))
    return runs


def _ends_early(table: VideoTable, frames: Ints) -> bool:
    """Whether the file ends before what would push the last of these frames out of the decoder."""
    return table.track.codec in _DELAYED and int(table.given_by[frames].max()) >= len(table.pts)


def _spans(offset: Ints, size: Ints) -> tuple[list[tuple[int, int]], Ints, Ints]:
    """Ranges of a file that hold all of these bytes, and for each in which range, and where in it, they lie."""
    order = np.argsort(offset, kind="stable")
    start, stop = offset[order], np.maximum.accumulate((offset + size)[order])
    begins = np.flatnonzero(np.concatenate([[True], start[1:] - stop[:-1] > _GAP_BYTES]))
    spans = [(int(start[a]), int(stop[b - 1])) for a, b in pairwise([*begins.tolist(), len(start)])]
    span = np.empty(len(offset), np.int64)
    span[order] = np.searchsorted(begins, np.arange(len(start)), side="right") - 1
    return spans, span, offset - start[begins][span]


def file_of(piece: Piece, bodies: Sequence[Buffer]) -> bytes:
    """A file of the frames of a piece alone, of the ranges that were read."""
    spans, number = np.unique(piece.span, return_inverse=True)
    cuts, firsts = list[memoryview](), np.zeros(len(spans), np.int64)
    for k, span in enumerate(spans.tolist()):
        inside = piece.span == span
        low, high = int(piece.at[inside].min()), int((piece.at + piece.size)[inside].max())
        firsts[k] = sum(map(len, cuts)) - low
        cuts.append(memoryview(bodies[span])[low:high])
    places = firsts[number] + piece.at
    begin = len(_FTYP) + len(_head(piece, places)) + 8
    return b"".join([_FTYP, _head(piece, places + begin), box(b"mdat", *cuts)])


def _head(piece: Piece, places: Ints) -> bytes:
    """The box with the tables: each frame is a chunk."""
    boxes, track = dict(piece.track.boxes), piece.track
    count, duration = len(piece.size), min(int(piece.delta.sum()), 2**32 - 1)
    numbers = np.arange(1, count + 1)
    changes = np.flatnonzero(np.diff(piece.description, prepend=0))
    runs = np.stack([numbers[changes], np.ones_like(changes), piece.description[changes]], axis=1)
    stbl = box(
        b"stbl",
        box(b"stsd", boxes[b"stsd"]),
        _table(b"stts", np.stack([np.ones(count, np.int64), piece.delta], axis=1)),
        _table(b"ctts", np.stack([np.ones(count, np.int64), piece.composition], axis=1), version=1),
        _table(b"stss", numbers[piece.is_key | (numbers == 1)][:, None]),
        _table(b"stsc", runs),
        box(b"stsz", struct.pack(">III", 0, 0, count), piece.size.astype(">u4").tobytes()),
        box(b"co64", struct.pack(">II", 0, count), places.astype(">u8").tobytes()),
    )
    dref = box(b"dref", struct.pack(">II", 0, 1), box(b"url ", struct.pack(">I", 1)))
    minf = box(b"minf", box(b"vmhd", boxes[b"vmhd"]), box(b"dinf", dref), stbl)
    mdhd = box(b"mdhd", struct.pack(">6I", 0, 0, 0, track.timescale, duration, 0x55C40000))
    mdia = box(b"mdia", mdhd, box(b"hdlr", boxes[b"hdlr"]), minf)
    mvhd = struct.pack(">5I", 0, 0, 0, track.timescale, duration) + struct.pack(">IH10x", 1 << 16, 1 << 8)
    mvhd += _UNITY + bytes(24) + struct.pack(">I", 2)
    return box(b"moov", box(b"mvhd", mvhd), box(b"trak", box(b"tkhd", boxes[b"tkhd"]), mdia))


def _table(kind: bytes, rows: Ints, *, version: int = 0) -> bytes:
    """A box of rows of numbers of 32 bits, with their count before them."""
    return box(kind, struct.pack(">II", version << 24, len(rows)), (rows & 0xFFFFFFFF).astype(">u4").tobytes())
