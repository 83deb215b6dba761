"""Small videos, as FFmpeg writes them, and their frames, as it decodes all of them one after the other."""

import asyncio
import functools
import io
import struct
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.format import VideoTable, read_tables, table_of
from headrace.formats.mp4.frames import BODIES, PIECES, ClipDecoder, pieces_of
from headrace.formats.pinned_object import PinnedObject

SIZE = 48, 64
URL = "memory://videos/0.mp4"
RATE = 30
_X264 = "threads=1:scenecut=0:keyint=12:min-keyint=12"

HOW: dict[str, dict[str, Any]] = {
    "h264": {"options": {"x264-params": _X264}},
    "h264-open": {"options": {"x264-params": f"{_X264}:open-gop=1:bframes=3:b-pyramid=normal"}, "b_frames": 3},
    "h264-leading": {
        "options": {"x264-params": "threads=1:scenecut=0:keyint=7:min-keyint=7:open-gop=1:bframes=8:b-adapt=0"},
        "b_frames": 8,
        "count": 57,
    },
    "h264-plain": {"b_frames": 0, "options": {"x264-params": _X264}},
    "hevc-open": {
        "codec": "libx265",
        "options": {"x265-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:scenecut=0:log-level=none"},
    },
    "short-groups": {"options": {"x264-params": "threads=1:scenecut=0:keyint=2:min-keyint=2"}, "b_frames": 0},
    "mpeg4": {"codec": "mpeg4"},
    "vp9": {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}},
    "audio": {"with_audio": True, "options": {"x264-params": _X264}},
    "negative": {"mux": {"movflags": "+negative_cts_offsets"}, "options": {"x264-params": _X264}},
}

FRAGMENTED = {  # how, and whether there is sound beside
    "fragments": ("frag_keyframe+empty_moov", False),
    "fragments-audio": ("frag_keyframe+empty_moov+default_base_moof", True),
    "fragments-behind": ("frag_keyframe", True),  # the first part as in a plain file
    "fragments-edit": ("frag_keyframe+delay_moov", True),
    "fragments-dash": ("frag_keyframe+dash+global_sidx", True),
    "fragments-cmaf": ("frag_keyframe+cmaf", False),
    "fragments-implicit": ("frag_keyframe+empty_moov+omit_tfhd_offset", True),
    "fragments-small": ("frag_every_frame+empty_moov+default_base_moof", False),
    "fragments-separate": ("frag_keyframe+empty_moov+separate_moof", True),
}
HOW |= {
    name: {"mux": {"movflags": flags}, "with_audio": with_audio, "options": {"x264-params": _X264}}
    for name, (flags, with_audio) in FRAGMENTED.items()
}


def picture(k: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    return np.stack([(x * 3 + k * 7) % 256, (y * 5 + k * 3) % 256, ((x + y) * 2 + k * 11) % 256], -1).astype(np.uint8)


@functools.cache
def named(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # some ways read what was written again
        return written(**HOW[name], path=f"{folder}/0.mp4")


def written(
    count: int = 50,
    codec: str = "libx264",
    *,
    options: dict[str, str] | None = None,
    mux: dict[str, str] | None = None,
    b_frames: int = 2,
    with_audio: bool = False,
    path: str | None = None,
    pictures: Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]] = picture,
) -> bytes:
    out: Any = io.BytesIO() if path is None else path
    with av.open(out, "w", format="mp4", options=mux or {}) as container:
        video: Any = container.add_stream(codec, rate=RATE, options=options or {})
        video.height, video.width = SIZE
        video.pix_fmt = "yuv420p"
        video.codec_context.gop_size, video.codec_context.max_b_frames = 12, b_frames
        video.codec_context.thread_count = 1
        audio: Any = container.add_stream("aac", rate=16000) if with_audio else None
        for k in range(count):
            frame = av.VideoFrame.from_ndarray(pictures(k), format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, RATE)
            container.mux(video.encode(frame))
            if with_audio:
                sound = np.random.default_rng(k).normal(0, 0.1, (1, 16000 // RATE)).astype(np.float32)
                heard = av.AudioFrame.from_ndarray(sound, format="fltp", layout="mono")
                heard.sample_rate, heard.pts, heard.time_base = 16000, k * sound.shape[1], Fraction(1, 16000)
                container.mux(audio.encode(heard))
        for stream in filter(None, (video, audio)):
            container.mux(stream.encode(None))
    if path is None:
        data: bytes = out.getvalue()
        return data
    return Path(path).read_bytes()


def decoded(data: bytes) -> tuple[list[float], np.ndarray[Any, np.dtype[np.uint8]]]:
    """The times and pixels, `[T, 3, H, W]`, of all frames, by FFmpeg from the file's beginning to its end."""
    with av.open(io.BytesIO(data)) as container:
        video: Any = container.streams.video[0]
        video.thread_type = "NONE"
        frames = list(container.decode(video))
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    return [frame.time for frame in frames], pixels.transpose(0, 3, 1, 2)


def torchcodec() -> Any:
    """Its module of decoders; without FFmpeg's libraries, as without itself, a test that needs it is skipped."""
    try:
        import torchcodec.decoders as decoders
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"torchcodec does not load here: {str(error)[:80]}")
    return decoders


def by_torchcodec(data: bytes) -> tuple[list[float], np.ndarray[Any, np.dtype[np.uint8]]]:
    frames = torchcodec().VideoDecoder(data, seek_mode="exact")
    batch = frames.get_frames_in_range(0, len(frames))
    return batch.pts_seconds.tolist(), batch.data.numpy()


def with_edit(data: bytes, media_time: int, duration: int) -> bytes:
    at = data.index(b"elst") + 4
    _, count, _, begin = struct.unpack_from(">IIIi", data, at)
    assert (count, begin) == (1, 1024), "one part, from the first frame on"
    return data[: at + 8] + struct.pack(">Ii", duration, media_time) + data[at + 16 :]


class One(PinnedObject):
    """One object in memory, with its reads."""

    def __init__(self, data: bytes) -> None:
        self.url, self.etag, self.data, self.size, self.reads = URL, None, data, -1, list[tuple[int, int]]()

    async def read(self, start: int, length: int) -> memoryview:
        self.size = len(self.data)
        length = max(min(length, self.size - start), 0)
        if length:
            self.reads.append((start, length))
        return memoryview(self.data)[start : start + length]


def table(data: bytes, limits: Limits = DEFAULTS) -> VideoTable:
    return table_of(asyncio.run(read_tables(One(data), limits)), URL, len(data), limits)


def clip(data: bytes, frames: VideoTable, chosen: list[int], decoder: str) -> tuple[Any, int]:
    """(the clip's pixels, how many bytes were read for it)."""
    pieces, spans = pieces_of(frames, np.array(chosen))
    bodies = [np.frombuffer(data[begin:end], np.uint8) for begin, end in spans]
    sample = {"__key__": "0", "__url__": URL, PIECES: pieces, BODIES: bodies}
    return ClipDecoder(decoder)(sample)["frames"], sum(map(len, bodies))


_WITH_BOXES = (b"moof", b"traf", b"moov", b"trak", b"mvex", b"mdia", b"minf", b"stbl", b"edts", b"dinf")


def places_of_boxes(data: bytes, begin: int = 0, stop: int | None = None) -> Iterator[int]:
    """Bytes where a reader could go wrong: the beginning of each box, the middle of its header, its body and end."""
    at, stop = begin, len(data) if stop is None else stop
    while at < stop:
        size, kind = struct.unpack_from(">I4s", data, at)
        yield from (at, at + 3, at + 8, at + size - 1)
        if kind in _WITH_BOXES:
            yield from places_of_boxes(data, at + 8, at + size)
        at += size
