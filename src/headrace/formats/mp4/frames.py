"""Selects the bytes of some frames of a video, makes a small file of them, and decodes it with torchcodec or PyAV.

Decoding a frame needs those before it, from a key frame on. For each group of pictures with a wanted frame, the bytes
from its key frame to the last wanted frame are read. Consecutive groups become a file in memory, with its own tables.
Any decoder gives the pixels that it gives for the whole file. FFmpeg searches key frames by decoding time. The small
file has a clock by which a key frame is decoded when it is shown. A frame is not marked as key if frames decoded after
it are shown before it.

Frames that are decoded after a key frame and shown before it (an open group of pictures) also need the group before. If
one of them is wanted, that group is read, too.

Each decoder has its own version of FFmpeg, and versions round differently in conversions to RGB. The decoder is
therefore an explicit option, without a fallback. MP4 has no checksums: damage that FFmpeg conceals within a frame is
not detected. A missing frame is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import DecodeError, OptionError, StageError, masked, reason_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.media import scaled, torchcodec_decoders
from headrace.formats.mp4.format import Track, VideoTable, read_table
from headrace.formats.mp4.tables import box, tables_in
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
        # the file ends before the frames that push the last of these out of the decoder
        ends_early = table.track.codec in _DELAYED and int(table.given_by[frames[places]].max()) >= len(table.pts)
        pieces.append(
            Piece(
                table.track,
                table.size[some],
                delta,
                pts - dts,
                table.is_key[some] & (pts == dts) & (not ends_early),
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


Frames = NDArray[np.uint8]

DECODERS = {"torchcodec": ("torchcodec", "video"), "pyav": ("av", "pyav")}
"""(module, extra that installs it) by decoder name."""

PIECES, BODIES = "__pieces__", "__bodies__"
"""Fields of a clip's data until it is decoded."""


def check_decoder(name: str) -> None:
    """Raise an OptionError if the decoder is not known or not installed."""
    check.one_of("decoder", name, DECODERS)
    module, extra = DECODERS[name]
    if importlib.util.find_spec(module) is None:
        raise check.lacking(
            f"decoder={name!r}", f"{module}, which is not installed; try: pip install 'headrace[{extra}]'"
        )


_PASSED = StageError, OptionError


@contextmanager
def decode_errors(
    what: str, key: object = None, url: str | None = None, field: str | None = None, passes: Any = _PASSED
) -> Iterator[None]:
    """Raise errors of a video's content and of libraries as DecodeErrors, which begin with `what`, except `passes`."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        raise DecodeError(f"{what}: {reason_of(error)}", key=key, url=url, field=field) from error


class ClipDecoder:
    """The first step of a stream of clips: decodes the bytes of frames to pixels.

    Args:
        limits: `pixels` of a frame, and `member_bytes` of a clip before scaling.
        size: (height, width) in pixels to scale frames to. None: no scaling.
    """

    def __init__(self, name: str, limits: Limits = DEFAULTS, size: tuple[int, int] | None = None) -> None:
        self.name, self.limits, self.size = name, limits, size

    def __call__(self, sample: dict[str, Any]) -> dict[str, object]:
        """Return `frames`, `[T, 3, H, W] uint8`, and `times` in seconds. Raises a DecodeError."""
        key, url = sample["__key__"], sample["__url__"]
        pieces: list[Piece] = sample[PIECES]
        with decode_errors(f"clip {key!r} of {masked(url)} does not decode by {self.name}", key, url, "frames"):
            frames, times = decoded(self.name, pieces, sample[BODIES], self.limits, self.size)
        return {"__key__": key, "__url__": url, "frames": frames, "times": times}


def decoded(
    name: str, pieces: Sequence[Piece], bodies: Sequence[Buffer], limits: Limits, size: tuple[int, int] | None = None
) -> tuple[Frames, NDArray[np.float64]]:
    """Return the wanted frames of all pieces, `[T, 3, H, W]`, and their times, `[T]`.

    `bodies` are the ranges read for the pieces, `size` is (height, width) to scale to. Frames that do not decode raise
    a ValueError, or an error of FFmpeg's libraries.
    """
    decode = _by_torchcodec if name == "torchcodec" else _by_pyav
    count, track = sum(len(piece.wanted) for piece in pieces), pieces[0].track
    _check_size(count, track.width, track.height, limits)
    frames, times = np.empty(0, np.uint8), np.empty(count)
    for k, piece in enumerate(pieces):
        some = decode(file_of(piece, bodies), piece, limits)
        if not k:
            _check_size(count, some.shape[3], some.shape[2], limits)
        some = some if size is None else _scaled(some, size)
        if not k:
            frames = some if len(pieces) == 1 else np.empty((count, *some.shape[1:]), np.uint8)
        if some.shape[1:] != frames.shape[1:]:
            raise ValueError(f"its frames have {some.shape[2:]} and {frames.shape[2:]} pixels")
        if len(pieces) > 1:
            frames[piece.places] = some
        times[piece.places] = piece.times
    return frames, times


def _scaled(frames: Frames, size: tuple[int, int]) -> Frames:
    made = np.empty((*frames.shape[:2], *size), np.uint8)
    for frame, new in zip(frames, made, strict=True):
        new[:] = scaled(np.ascontiguousarray(frame.transpose(1, 2, 0)), size).transpose(2, 0, 1)
    return made


def _check_size(count: int, width: int, height: int, limits: Limits) -> None:
    limits.check_pixels(width, height)
    if count * width * height * 3 > limits.member_bytes:
        raise ValueError(
            f"{count} frames of {width} x {height} pixels have {count * width * height * 3} bytes, over the limit of "
            f"{limits.member_bytes}"
        )


def _by_torchcodec(data: bytes, piece: Piece, limits: Limits) -> Frames:
    decoders = torchcodec_decoders("decoder='pyav' brings its own")
    decoder = decoders.VideoDecoder(data, seek_mode="exact", num_ffmpeg_threads=1)
    about = decoder.metadata
    _check_size(len(piece.wanted), about.width, about.height, limits)
    got = decoder.get_frames_at(piece.wanted.tolist())
    ticks = got.pts_seconds.numpy() * piece.track.timescale
    late = np.flatnonzero(np.abs(ticks - piece.ticks) > 0.5)
    if len(late):  # torchcodec would return another frame instead
        raise ValueError(f"its frame at {piece.times[late[0]]:.3f} s did not come of its bytes")
    frames: Frames = got.data.numpy()
    return frames


def _by_pyav(data: bytes, piece: Piece, limits: Limits) -> Frames:
    av = importlib.import_module("av")
    if piece.track.is_turned:
        raise ValueError("it is to be turned or mirrored, which decoder='torchcodec' does")
    ticks = piece.ticks.tolist()
    wanted, found = frozenset(ticks), dict[int, Frames]()
    with av.open(io.BytesIO(data)) as container:
        video = container.streams.video[0]
        video.thread_type = "NONE"
        _check_size(len(ticks), video.width, video.height, limits)
        for frame in container.decode(video):
            if frame.pts in wanted:
                _check_size(len(ticks), frame.width, frame.height, limits)
                found[frame.pts] = frame.to_ndarray(format="rgb24")
                if len(found) == len(wanted):
                    break
    for tick, time in zip(ticks, piece.times.tolist(), strict=True):
        if tick not in found:
            raise ValueError(f"its frame at {time:.3f} s did not come of its bytes")
    return np.ascontiguousarray(np.stack([found[tick] for tick in ticks]).transpose(0, 3, 1, 2))


class VideoFrames:
    """Decoder of fields with MP4 files. Returns `[count, 3, H, W] uint8`, in RGB.

    Only the requested frames, and those that they depend on, are decoded.

    Args:
        count: Number of frames: the middle frames of as many parts of equal length.
        times: Instead of `count`: the times of the frames in seconds, in any order.
        decoder: "torchcodec", or "pyav", which includes FFmpeg.
        limits: Limits on the pixels of a frame, and the bytes of all frames.

    Raises:
        OptionError: Not exactly one of `count` and `times`, or the decoder is not known or not installed.

    Examples:
        >>> data = hr.stream("s3://bucket/clips-{000..099}.tar").decode(mp4=hr.VideoFrames(8, decoder="pyav"))
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        times: Sequence[float] | None = None,
        decoder: str = "torchcodec",
        limits: Limits = DEFAULTS,
    ) -> None:
        if (count is None) == (times is None):
            raise check.lacking("hr.VideoFrames", "either a number of frames, or times=")
        if count is not None:
            check.whole("count", count, 1)
        if times is not None and not len(times):
            raise check.invalid("times", times, "one time or more")
        check_decoder(decoder)
        self.count, self.times = count, None if times is None else tuple(map(float, times))
        self.decoder, self.limits = decoder, limits

    def __call__(self, data: bytes) -> Frames:
        """Decode frames of the file `data`. Raises a DecodeError if it is damaged or too short."""
        with decode_errors(f"its {len(data)} bytes do not decode as a video by {self.decoder}", passes=OptionError):
            table = read_table(tables_in(memoryview(data), self.limits), len(data), self.limits)
            pieces, spans = pieces_of(table, self._chosen(table))
            frames, _ = decoded(self.decoder, pieces, [memoryview(data)[a:b] for a, b in spans], self.limits)
        return frames

    def _chosen(self, table: VideoTable) -> Ints:
        if self.times is None:
            count = self.count or 1
            return (np.arange(count) * 2 + 1) * len(table) // (2 * count)
        return table.shown_at(self.times)
