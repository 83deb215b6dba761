"""Selects the bytes of some frames of a video, and makes a small file of them.

Decoding a frame needs those before it, from a key frame on. For each group of pictures with a wanted frame, the bytes
from its key frame to the last wanted frame are read. Consecutive groups become a file in memory, with its own tables.
Any decoder gives the pixels that it gives for the whole file. FFmpeg searches key frames by decoding time. The small
file has a clock by which a key frame is decoded when it is shown. A frame is not marked as key if frames decoded after
it are shown before it.

Frames that are decoded after a key frame and shown before it (an open group of pictures) also need the group before. If
one of them is wanted, that group is read, too.
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

_GAP_BYTES = 32 * 1024  # frames with at most so many bytes of other tracks in between are read together
_DELAYED = frozenset((b"avc1", b"avc2", b"avc3", b"avc4"))
"""If decoding begins at a key frame of an open group, which does not empty the decoder, FFmpeg's H.264 decoder
discards its delayed frames at the end. The file therefore includes the frames that push out the last one."""
_FTYP = box(b"ftyp", b"isom", bytes(4), b"isommp41")
_UNITY = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive frames of a video, from a key frame on. Some of them are wanted.

    Attributes:
        size, delta, composition, is_key, description: Per frame, in decoding order: bytes; ticks until the next is
            decoded; ticks from decoding to presentation; True if decoding can begin there and all later frames are
            shown later; number of the sample description.
        span, at: Index of the read range of each frame, and offset in it.
        wanted: Numbers of the wanted frames, in presentation order.
        places: Their positions in the clip.
        times: Their presentation times in the video, in seconds.
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
        """Presentation times of the wanted frames in a file of these frames alone, in ticks."""
        shown = np.sort(np.cumsum(self.delta) - self.delta + self.composition)
        return np.asarray(shown[self.wanted], np.int64)


def pieces_of(table: VideoTable, chosen: Ints) -> tuple[list[Piece], list[tuple[int, int]]]:
    """Return the pieces that decode some frames, and the ranges (start, stop) to read.

    `chosen` are indices among the shown frames. One that cannot be decoded raises a ValueError.
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
        # The latest decoding times that do not exceed presentation times: players search key frames by them.
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
    """Return runs [first, end) of the frames that decoding needs. Each begins at a key frame."""
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
    """True if the file ends before the frames that push the last of these out of the decoder."""
    return table.track.codec in _DELAYED and int(table.given_by[frames].max()) >= len(table.pts)


def _spans(offset: Ints, size: Ints) -> tuple[list[tuple[int, int]], Ints, Ints]:
    """Return ranges that cover all frames, and for each frame its range and the offset in it."""
    order = np.argsort(offset, kind="stable")
    start, stop = offset[order], np.maximum.accumulate((offset + size)[order])
    begins = np.flatnonzero(np.concatenate([[True], start[1:] - stop[:-1] > _GAP_BYTES]))
    spans = [(int(start[a]), int(stop[b - 1])) for a, b in pairwise([*begins.tolist(), len(start)])]
    span = np.empty(len(offset), np.int64)
    span[order] = np.searchsorted(begins, np.arange(len(start)), side="right") - 1
    return spans, span, offset - start[begins][span]


def file_of(piece: Piece, bodies: Sequence[Buffer]) -> bytes:
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
    return box(kind, struct.pack(">II", version << 24, len(rows)), (rows & 0xFFFFFFFF).astype(">u4").tobytes())
