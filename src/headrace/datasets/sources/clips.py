"""Clips of videos: some frames of each, of which the bytes are read that they take, and no others."""

from __future__ import annotations

import math
import operator
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.blocking import blocking
from headrace.datasets.fingerprints import fingerprint_of
from headrace.datasets.places.entries import check_listed
from headrace.datasets.source import KeepsKey, SampleSource, SourceOrders, Traits
from headrace.datasets.sources.files import Facts
from headrace.datasets.stored import StoredSource
from headrace.errors import FormatError, LimitError, ObjectChangedError, OptionError, masked, not_as_indexed, printable
from headrace.formats.mp4.frames import BODIES, PIECES
from headrace.formats.mp4.pieces import Piece, pieces_of
from headrace.formats.mp4.table import VideoTable
from headrace.indexes.index import for_each
from headrace.indexes.videos import Video, Videos
from headrace.protocols import Reads
from headrace.reading import OwnReaders
from headrace.types import Ints
from headrace.work.randomness import rng


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Which frames of a video make a clip, and which clips there are.

    They are counted in frames as they are shown; with `fps`, in times of that rate from the first frame on, at each of
    which the frame counts that is shown then: once, several times or not at all.

    Attributes:
        frames: of a clip.
        stride: a clip has every so many of the frames one behind the other.
        every: so many frames behind the first of a clip the next one begins; None: where that one ends.
        of_each: instead, of each video so many clips, whose places are drawn anew in each epoch, from the loader's
            seed, the epoch and the sample's position.
        fps: see above; None: the frames of the video, whatever its rate.
        short: of a video that has fewer frames than a clip "drop" makes no clip, and "error" an error.
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
            if value is not None and not 0 < value <= 2**31:
                raise OptionError(f"{name}={value!r} must be 1 or more")
        if self.fps is not None and not 0 < self.fps <= 1e6:
            raise OptionError(f"fps={self.fps!r} must be over 0, and at most a million")
        if self.short not in ("error", "drop"):
            raise OptionError(f"short={self.short!r} must be 'error' or 'drop'")
        if self.of_each is not None and (self.every is not None or self.short == "drop"):
            raise OptionError("of_each= gives as many clips of each video: every= and short='drop' do not go with it")

    @property
    def span(self) -> int:
        """How many frames lie between the first and the last of a clip, with these."""
        return (self.frames - 1) * self.stride + 1

    def counts(self, frames: Ints) -> Ints:
        """How many clips videos have of so many frames each."""
        every = self.every or self.frames * self.stride
        return np.asarray(np.maximum(frames - self.span + every, 0) // every)

    def frames_of(self, table: VideoTable) -> int:
        """How many frames a video has, as they are counted here."""
        if self.fps is None:
            return len(table)
        ticks = table.end_ticks - int(table.shown_ticks[0])
        return max(1, math.ceil(ticks * self.fps / table.track.timescale - 1e-6))

    def chosen(self, table: VideoTable, start: int) -> Ints:
        """The frames of the clip from `start` on, by their numbers among those that are shown."""
        counted = start + self.stride * np.arange(self.frames)
        if self.fps is None:
            return counted
        ticks = np.floor(counted * (table.track.timescale / self.fps) + 1e-6).astype(np.int64)
        chosen: Ints = np.searchsorted(table.shown_ticks, ticks + table.shown_ticks[0], side="right") - 1
        return chosen


class VideoClips(AsyncDataset):
    """The clips of videos by number, each read by requests for just the bytes that its frames take.

    Args:
        videos: where their frames lie.
        clips: which frames make one.
        storage_options: for the store.
        facts: what is said of the videos, and why.
    """

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
        """The addresses of the videos."""
        return self.videos.urls

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def starts(self) -> Ints:
        """The number of each video's first clip, and of all clips last."""
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
        """How many clips each video has."""
        clips = self.clips
        async with self._readers.use() as reader:
            await self.videos.open(reader)
            if clips.of_each is not None:
                return np.full(len(self.urls), clips.of_each)
            frames = await self.videos.counts(reader) if clips.fps is None else await self._frames(reader)
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
        """Clip `key`, as it is before it is decoded: the bytes of its frames, and of those that these take.

        Raises:
            IndexError: there are fewer clips.
            FormatError: its video is damaged.
            ObjectChangedError: the video is another one than that whose tables were read, or that was listed.
        """
        await self.aopen()
        starts = self.starts
        try:
            number = range(int(starts[-1]))[operator.index(key)]
        except IndexError:
            raise IndexError(f"there is no clip {key}: there are {int(starts[-1])}") from None
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
        """Which of the videos it is."""
        return ordinal

    def _chosen(self, table: VideoTable, ordinal: int, number: int) -> tuple[str, Ints]:
        """(where a clip begins, its frames), of the clip of that number in its video.

        Raises:
            FormatError: the video is too short.
            ValueError: it has no such frames.
        """
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
        """Which clips these are, in words."""
        return str(self.clips)

    @property
    def identity(self) -> str:
        """What tells these clips of videos from others."""
        return repr(self.clips)


def _too_short(url: str, frames: int, clips: Clips) -> FormatError:
    at = "" if clips.fps is None else f" at {clips.fps:g} a second"
    return FormatError(
        f"{masked(url)} has {frames} frames{at}, and a clip of {clips.frames} takes {clips.span}; short='drop' leaves "
        "such videos out",
        url=url,
    )


async def video_as_listed(reader: Reads, videos: Videos, ordinal: int) -> Video:
    """The frames of one of the videos.

    Raises:
        ObjectChangedError: it is another than was listed.
    """
    table, version = await videos.video(reader, ordinal)
    if videos.place is None:  # else frames are read in the version that the index file names
        check_listed(videos.urls, ordinal, version.size, version.etag)
    return table, version


async def read_frames(
    reader: Reads, videos: Videos, url: str, video: Video, chosen: Ints
) -> tuple[list[Piece], list[np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """What it takes to decode some frames of one of the videos: the pieces, and the bytes of their ranges.

    Raises:
        ValueError: one of them cannot be decoded.
        LimitError: they are too many bytes.
        ObjectChangedError: the video is another one than that whose tables were read.
        StorageError: it could not be read.
    """
    table, version = video
    pieces, spans = pieces_of(table, chosen)
    nbytes = sum(int(piece.size.sum()) for piece in pieces)
    if nbytes > videos.limits.member_bytes:
        raise LimitError(
            f"{masked(url)}: a clip takes {nbytes} bytes, over the limit of {videos.limits.member_bytes}", url=url
        )

    async def body(k: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        begin, end = spans[k]
        data = await reader.read(url, begin, end, version=version)
        if len(data) < end - begin:
            raise not_as_indexed(url, f"of bytes {begin} to {end} it has only {len(data)}")
        return np.frombuffer(data, np.uint8)

    try:
        return pieces, await for_each(len(spans), body)
    except ObjectChangedError as error:
        if videos.place is not None:
            error.add_note(printable(f"its tables are from {masked(videos.place)}: make it anew, or give index=None"))
        raise


class ClipSource(StoredSource, KeySource):
    """Clips, read by the loader's own reader."""

    traits = Traits(numbered=True, objects=True)

    def __init__(self, data: VideoClips) -> None:
        super().__init__(data)
        self.data: VideoClips = data

    @property
    def starts(self) -> Ints:
        return self.data.starts

    @property
    def text(self) -> str:
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"video({masked(self.urls[0])}{more}, {self.data.text})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(self.data.facts)

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:  # noqa: ARG002
        return _ClipOrders(self, keeps)

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, self.data.identity))


class _ClipOrders(SourceOrders):
    """The clips of one video behind those of the other."""

    def __init__(self, source: ClipSource, keeps: tuple[KeepsKey, ...]) -> None:
        super().__init__(source, keeps)
        self._identity = source.data.identity

    @cached_property
    def _named(self) -> str:
        return fingerprint_of((self._identity,), self.sizes)

    @property
    def fingerprint(self) -> str:
        """What tells these clips from others: their videos' names, how many each has, and which frames they have."""
        return fingerprint_of((*self._source.urls, self._named), self.sizes)
