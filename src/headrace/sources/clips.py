"""Clips of videos: some frames of each. Only the bytes that they need are read."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from headrace._util import check
from headrace._util.reads import Reads, Version
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.source import SampleSource, StoredSource, Traits, blocking, fingerprint_of, forwarded
from headrace.dataset.stream import Stream, Urls
from headrace.errors import FormatError, ObjectChangedError, masked, printable
from headrace.formats.limits import DEFAULTS, Limits, check_bytes
from headrace.formats.mp4.format import MP4, VideoTable, read_tables, table_of, unpack_tables
from headrace.formats.mp4.frames import BODIES, PIECES, ClipDecoder, Piece, check_decoder, pieces_of
from headrace.formats.pinned_object import PinnedObject, for_each
from headrace.indexes.building import build_file
from headrace.indexes.cache_path import cache_path, cached
from headrace.indexes.index import HeldReads, OpenedFile, open_file
from headrace.ops.operator import EachSample
from headrace.sources.bodies import read_exactly
from headrace.sources.discovery import Names, names_at
from headrace.sources.entries import Facts, check_listed, shown
from headrace.sources.reading import OwnReaders, number_of
from headrace.types import Ints
from headrace.workers.randomness import rng
from headrace.workers.tasks import Step

Video = tuple[VideoTable, Version]
"""The frames of a video, and the object's version."""


class Videos:
    """Frame locations of videos. Thread-safe; for several event loops. Copies are opened again.

    Args:
        place: Address of an index file. None: each video's own tables are read.
        is_built: True if that file is on this machine and built if missing.
    """

    def __init__(self, urls: Sequence[str], place: str | None, limits: Limits, *, is_built: bool = False) -> None:
        self.urls, self.place, self.limits, self.is_built = urls, place, limits, is_built
        self._file: OpenedFile | None = None
        self._held = HeldReads[Video](lambda video: video[0].nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Videos, is_built=self.is_built), (self.urls, self.place, self.limits)

    async def open(self, reader: Reads) -> Ints | None:
        """Build the index file if needed. Return its numbers of displayed frames. None: there is no such file."""
        if self.place is None:
            return None
        file = await self._opened(reader, self.place)
        return file.directory.samples[file.order]

    async def video(self, reader: Reads, ordinal: int) -> Video:
        return await self._held.get(ordinal, partial(self._load, reader, ordinal))

    async def aclose(self) -> None:
        await self._held.aclose()

    async def _load(self, reader: Reads, ordinal: int) -> Video:
        url = self.urls[ordinal]
        if self.place is None:
            shard = PinnedObject(reader, url)
            tables = await read_tables(shard, self.limits)
            version = Version(shard.size, shard.etag)
        else:
            file = await self._opened(reader, self.place)
            tables = unpack_tables(await file.block(reader, ordinal), masked(self.place))
            entry = file.directory[int(file.order[ordinal])]
            version = Version(entry.size, entry.etag)
        size = -1 if version.size is None else version.size
        return table_of(tables, url, size, self.limits), version

    async def _opened(self, reader: Reads, place: str) -> OpenedFile:
        if self._file is None:
            if self.is_built:
                await build_file(reader, self.urls, Path(place), form=MP4, limits=self.limits)
            self._file = await open_file(reader, place, self.urls)
        return self._file


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Frames of a clip, and choice of clips in a video.

    Frames are counted in display order. With `fps`, ticks of that rate are counted instead, from the first frame on. A
    tick takes the frame displayed then, so a frame may occur once, several times or not at all.

    Attributes:
        frames: Number of frames in a clip.
        stride: A clip takes every `stride`-th frame.
        every: Distance in frames between the starts of consecutive clips. None: a clip starts where the last ends.
        of_each: Alternative: this many clips of each video, at random positions in each epoch that depend on the
            loader's seed, the epoch and the sample's position.
        fps: See above. None: all frames of the video, whatever its rate.
        short: A video that is shorter than a clip: "drop" makes no clip of it, and "error" raises an error.
    """

    frames: int
    stride: int = 1
    every: int | None = None
    of_each: int | None = None
    fps: float | None = None
    short: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        for name in ("frames", "stride", "every", "of_each"):
            value = getattr(self, name)
            if value is not None:
                check.number(name, value, 1, 2**31)
        if self.fps is not None:
            check.number("fps", self.fps, 0, 1e6, is_open=True)
        check.one_of("short", self.short, ("error", "drop"))
        if self.of_each is not None and (self.every is not None or self.short == "drop"):
            raise check.conflict("of_each=", "every= or short='drop'", "of_each= gives as many clips of each video")

    @property
    def span(self) -> int:
        """Number of frames from the first to the last of a clip, inclusive."""
        return (self.frames - 1) * self.stride + 1

    def counts(self, frames: Ints) -> Ints:
        """Return the number of clips in videos with these numbers of frames."""
        every = self.every or self.frames * self.stride
        return np.asarray(np.maximum(frames - self.span + every, 0) // every)

    def frames_of(self, table: VideoTable) -> int:
        """Return the number of frames in a video, or of ticks with `fps`."""
        if self.fps is None:
            return len(table)
        ticks = table.end_ticks - int(table.shown_ticks[0])
        return max(1, math.ceil(ticks * self.fps / table.track.timescale - 1e-6))

    def chosen(self, table: VideoTable, start: int) -> Ints:
        """Return the frames of the clip from `start` on, by number in display order."""
        counted = start + self.stride * np.arange(self.frames)
        if self.fps is None:
            return counted
        ticks = np.floor(counted * (table.track.timescale / self.fps) + 1e-6).astype(np.int64)
        chosen: Ints = np.searchsorted(table.shown_ticks, ticks + table.shown_ticks[0], side="right") - 1
        return chosen


class VideoClips(AsyncDataset):
    """Clips of videos by number, read by requests for the bytes that their frames need."""

    def __init__(
        self, videos: Videos, clips: Clips, storage_options: Mapping[str, object] | None = None, facts: Facts = ()
    ) -> None:
        self.videos, self.clips, self.storage_options, self.facts = videos, clips, storage_options, facts
        self._readers = OwnReaders(storage_options, videos.aclose)
        self._starts: Ints | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return VideoClips, (self.videos, self.clips, self.storage_options, self.facts)

    def __sample_source__(self) -> SampleSource:
        return ClipSource(self)

    @property
    def urls(self) -> Sequence[str]:
        return self.videos.urls

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def starts(self) -> Ints:
        """First clip number of each video, then the total."""
        if self._starts is None:
            blocking(self.aopen)
        assert self._starts is not None
        return self._starts

    async def aopen(self) -> None:
        if self._starts is None:
            self._starts = np.concatenate([[0], np.cumsum(await self._counts())])

    async def aclose(self) -> None:
        await self.videos.aclose()

    async def _counts(self) -> Ints:
        clips = self.clips
        async with self._readers.use() as reader:
            frames = await self.videos.open(reader)
            if clips.of_each is not None:
                return np.full(len(self.urls), clips.of_each)
            if frames is None or clips.fps is not None:
                frames = await self._frames(reader)
        short = np.flatnonzero(frames < clips.span)
        if len(short) and clips.short == "error":
            first = int(short[0])
            raise _too_short(self.urls[first], int(frames[first]), clips)
        return clips.counts(frames)

    async def _frames(self, reader: Reads) -> Ints:
        async def of(ordinal: int) -> int:
            return self.clips.frames_of((await video_as_listed(reader, self.videos, ordinal))[0])

        return np.array(await for_each(len(self.urls), of), np.int64)

    async def aget(self, key: int) -> dict[str, object]:
        """Return clip `key`, encoded: the bytes of its frames, and of frames that these depend on."""
        await self.aopen()
        starts = self.starts
        number = number_of(key, int(starts[-1]), "clip")
        ordinal = int(np.searchsorted(starts, number, side="right")) - 1
        async with self._readers.use() as reader:
            return await self._get(reader, ordinal, number - int(starts[ordinal]))

    async def _get(self, reader: Reads, ordinal: int, number: int) -> dict[str, object]:
        url = self.urls[ordinal]
        table, version = await video_as_listed(reader, self.videos, self._video_of(ordinal))
        try:
            start, chosen = self._chosen(table, ordinal, number)
            pieces, bodies = await read_frames(reader, self.videos, url, (table, version), chosen)
        except ValueError as error:
            raise FormatError(f"clip {number} of {masked(url)}: {error}", url=url) from None
        name = posixpath.basename(urlsplit(url).path).rpartition(".")[0]
        return {"__key__": f"{name}/{start}", "__url__": masked(url), PIECES: pieces, BODIES: bodies}

    def _video_of(self, ordinal: int) -> int:
        return ordinal

    def _chosen(self, table: VideoTable, ordinal: int, number: int) -> tuple[str, Ints]:
        """Return the start and the frames of a clip, by its number in the video."""
        clips = self.clips
        if clips.of_each is None:
            start = number * (clips.every or clips.frames * clips.stride)
        else:
            spare = clips.frames_of(table) - clips.span
            if spare < 0:
                raise _too_short(self.urls[ordinal], spare + clips.span, clips)
            start = int(rng().integers(spare + 1))
        return str(start), clips.chosen(table, start)

    @property
    def text(self) -> str:
        return str(self.clips)

    @property
    def identity(self) -> str:
        """Text that identifies these clips of the videos in fingerprints."""
        return repr(self.clips)


def _too_short(url: str, frames: int, clips: Clips) -> FormatError:
    at = "" if clips.fps is None else f" at {clips.fps:g} a second"
    return FormatError.at(
        url,
        f"has {frames} frames{at}, and a clip of {clips.frames} takes {clips.span}; short='drop' leaves "
        "such videos out",
    )


async def video_as_listed(reader: Reads, videos: Videos, ordinal: int) -> Video:
    """Return the table and the version of a video."""
    table, version = await videos.video(reader, ordinal)
    if videos.place is None:  # with an index file, reads of frames compare the version
        check_listed(videos.urls, ordinal, version.size, version.etag)
    return table, version


async def read_frames(
    reader: Reads, videos: Videos, url: str, video: Video, chosen: Ints
) -> tuple[list[Piece], list[np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """Read what decoding some frames of a video needs: pieces, and the bytes of their ranges."""
    table, version = video
    pieces, spans = pieces_of(table, chosen)
    check_bytes("a clip", sum(int(piece.size.sum()) for piece in pieces), videos.limits.member_bytes, url=url)

    async def body(k: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(await read_exactly(reader, url, *spans[k], version), np.uint8)

    try:
        return pieces, await for_each(len(spans), body)
    except ObjectChangedError as error:
        if videos.place is not None:
            error.add_note(printable(f"its index is {masked(videos.place)}: make a new one, or give index=None"))
        raise


class ClipSource(StoredSource, KeySource):
    data: VideoClips
    traits = Traits(numbered=True, objects=True)
    starts = forwarded("data")

    @property
    def text(self) -> str:
        return f"video({shown(self.urls)}, {self.data.text})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(self.data.facts)

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, self.data.identity))

    def fingerprint_with(self, sizes: Ints) -> str:
        return fingerprint_of((*self.urls, fingerprint_of((self.data.identity,), sizes)), sizes)


Listed = Sequence[tuple[str, Sequence[float]]]
"""Clips: (URL of a video, times in seconds)."""


def listed_clips(given: object) -> Listed | None:
    """Return the clips of a list. None: the list does not have clips."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        return None
    clips: list[tuple[str, tuple[float, ...]]] = []
    for number, one in enumerate(list(given)):
        if not isinstance(one, tuple | list) or len(one) != 2 or isinstance(one[1], str):
            if clips:
                raise check.invalid(f"clip {number}", one, "(address, times), as those before it")
            return None
        url, times = one
        try:
            seconds = tuple(float(time) for time in times)
        except (TypeError, ValueError):
            raise check.invalid(f"clip {number}", one, "(address, times): times are numbers, in seconds") from None
        if not seconds or not all(map(math.isfinite, seconds)):
            raise check.invalid(f"clip {number}, its times", seconds, "finite: one time or more is needed")
        clips.append((str(url), seconds))
    return clips or None


class ListedClips(VideoClips):
    """Clips by their number in the list. The tables of each video are read once."""

    def __init__(self, videos: Videos, listed: Listed, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(videos, Clips(frames=1), storage_options)
        self.listed = listed
        number = {url: k for k, url in enumerate(videos.urls)}
        self._video = [number[url] for url, _ in listed]

    def __reduce__(self) -> tuple[object, ...]:
        return ListedClips, (self.videos, self.listed, self.storage_options)

    @property
    def urls(self) -> Sequence[str]:
        return tuple(url for url, _ in self.listed)

    @property
    def text(self) -> str:
        return f"{len(self.listed)} clips at times"

    @property
    def identity(self) -> str:
        return repr([times for _, times in self.listed])

    async def _counts(self) -> Ints:
        async with self._readers.use() as reader:
            await self.videos.open(reader)
        return np.ones(len(self.listed), np.int64)

    def _video_of(self, ordinal: int) -> int:
        return self._video[ordinal]

    def _chosen(self, table: VideoTable, ordinal: int, number: int) -> tuple[str, Ints]:
        times = self.listed[ordinal][1]
        return f"{times[0]:g}", table.shown_at(times)


def video(
    urls: Urls | Listed,
    clips: Clips | None = None,
    *,
    size: tuple[int, int] | None = None,
    decoder: str = "torchcodec",
    index: str | os.PathLike[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read clips of MP4 videos as samples. Only the parts of a file that a clip needs are read.

    A sample has `__key__`, `__url__`, `frames`, `[T, 3, H, W] uint8` in RGB, and `times`, `[T] float64`, the display
    time of each frame in seconds. Clips have numbers, so `len(data)`, `data[i]`, `.shuffle()` over all of them,
    `.slice()`, ranks and exact resume work as usual.

    The tables of frames are at the beginning or the end of each file. They are read once, in two or three requests,
    before the first sample; with `Clips(of_each=…)`, when a video is first needed.

    Args:
        urls: A URL or path, a pattern such as "videos/{000..999}.mp4" or "videos/**/*.mp4", a folder, or a list of
            these. Or the clips themselves, a list of (URL, times): each has the frames displayed at these times, in
            seconds, in this order.
        clips: Frames of a clip, and choice of clips. None if `urls` lists the clips.
        size: (height, width) in pixels to which frames are scaled. The aspect ratio is not preserved.
        decoder: "torchcodec", or "pyav", which includes its own FFmpeg. Their pixels may differ by rounding.
        index: URL of an index file with the tables of all videos (`headrace index` makes it). "build": the index in
            this machine's cache, made first if missing, by one process for all. "auto": the index in the cache, if
            present. None: no index.
        limits: Limits on the pixels of a frame, and on the bytes of a clip, before and after decoding.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no URL, the size is invalid, or the decoder is unknown, or not installed.

    Examples:
        >>> data = hr.video("s3://bucket/{000..999}.mp4", hr.Clips(frames=16, stride=2, every=8), decoder="pyav")
        >>> data = data.shuffle().select("frames")
    """
    check_decoder(decoder)
    check.size("size", size)
    listed = listed_clips(urls)
    if (listed is None) == (clips is None):
        raise check.lacking("hr.video", "videos and clips=hr.Clips(…), or a list of (address, times) alone")
    if listed is not None:
        names = Names(tuple(dict.fromkeys(url for url, _ in listed)))
    else:
        names = names_at(urls, storage_options, kept=listing == "kept", folders=MP4.suffixes)
    paths = names.urls
    place: str | os.PathLike[str] | None = index
    if index == "build":
        place = cache_path(paths, storage_options, MP4)
    elif index == "auto":
        place = cached(paths, storage_options, MP4)
    videos = Videos(paths, None if place is None else os.fspath(place), limits, is_built=index == "build")
    decode = EachSample(Step("decode(clip)", "map", ClipDecoder(decoder, limits, size), is_implied=True), opens=True)
    if listed is not None:
        return Stream(ListedClips(videos, listed, storage_options), (decode,))
    assert clips is not None
    return Stream(VideoClips(videos, clips, storage_options, names.facts), (decode,))
