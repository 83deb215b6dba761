"""Decodes the frames of a small file in memory, with torchcodec or PyAV.

Each has its own version of FFmpeg, and versions round differently in conversions to RGB. The decoder is therefore an
explicit option, without a fallback. MP4 has no checksums: damage that FFmpeg conceals within a frame is not detected. A
missing frame is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import DecodeError, OptionError, StageError, masked
from headrace.formats.images import scaled
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.finding import tables_in
from headrace.formats.mp4.pieces import Piece, file_of, pieces_of
from headrace.formats.mp4.table import VideoTable, read_table
from headrace.formats.sounds import torchcodec_decoders
from headrace.types import Buffer, Ints

Frames = NDArray[np.uint8]

DECODERS = {"torchcodec": ("torchcodec", "video"), "pyav": ("av", "pyav")}
"""(module, extra that installs it) by decoder name."""

PIECES, BODIES = "__pieces__", "__bodies__"
"""Fields of a clip's data until it is decoded."""

WHY_MOST = 500
"""Maximum number of characters of a library's error text."""


def check_decoder(name: str) -> None:
    """Raise an OptionError if the decoder is not known or not installed."""
    check.one_of("decoder", name, DECODERS)
    module, extra = DECODERS[name]
    if importlib.util.find_spec(module) is None:
        raise OptionError(f"decoder={name!r} is not installed; try: pip install 'headrace[{extra}]'")


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
        try:
            frames, times = decoded(self.name, pieces, sample[BODIES], self.limits, self.size)
        except (StageError, OptionError):
            raise
        except Exception as error:
            why = str(error)[:WHY_MOST] or type(error).__name__
            text = f"clip {key!r} of {masked(url)} does not decode by {self.name}: {why}"
            raise DecodeError(text, key=key, url=url, field="frames") from error
        return {"__key__": key, "__url__": url, "frames": frames, "times": times}


def decoded(
    name: str,
    pieces: Sequence[Piece],
    bodies: Sequence[Buffer],
    limits: Limits,
    size: tuple[int, int] | None = None,
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
    if width * height > limits.pixels:
        raise ValueError(f"it has {width} x {height} pixels, over the limit of {limits.pixels}")
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
        if (count is not None and count < 1) or (times is not None and not len(times)):
            raise OptionError(f"count={count!r}, times={times!r}: one frame or more is needed")
        check_decoder(decoder)
        self.count, self.times = count, None if times is None else tuple(map(float, times))
        self.decoder, self.limits = decoder, limits

    def __call__(self, data: bytes) -> Frames:
        """Decode frames of the file `data`. Raises a DecodeError if it is damaged or too short."""
        try:
            table = read_table(tables_in(memoryview(data), self.limits), len(data), self.limits)
            pieces, spans = pieces_of(table, self._chosen(table))
            frames, _ = decoded(self.decoder, pieces, [memoryview(data)[a:b] for a, b in spans], self.limits)
        except OptionError:
            raise
        except Exception as error:
            why = str(error)[:WHY_MOST] or type(error).__name__
            raise DecodeError(f"its {len(data)} bytes do not decode as a video by {self.decoder}: {why}") from error
        return frames

    def _chosen(self, table: VideoTable) -> Ints:
        if self.times is None:
            count = self.count or 1
            return (np.arange(count) * 2 + 1) * len(table) // (2 * count)
        return table.shown_at(self.times)
