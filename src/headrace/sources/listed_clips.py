"""Clips given as a list of videos and display times of frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from headrace.errors import OptionError, masked_text
from headrace.formats.mp4.table import VideoTable
from headrace.indexes.videos import Videos
from headrace.sources.clips import Clips, VideoClips
from headrace.types import Ints

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
                raise OptionError(
                    f"clip {number}, {masked_text(repr(one)):.80}: (address, times) as of those before it is meant"
                )
            return None
        url, times = one
        try:
            seconds = tuple(float(time) for time in times)
        except (TypeError, ValueError):
            raise OptionError(f"clip {number}, {one!r:.80}: times are numbers, in seconds") from None
        if not seconds or not all(map(math.isfinite, seconds)):
            raise OptionError(f"clip {number}, {one!r:.80}: one time or more is needed, and each is finite")
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

    def _chosen(self, table: VideoTable, ordinal: int, number: int) -> tuple[str, Ints]:  # noqa: ARG002 (one of each)
        times = self.listed[ordinal][1]
        return f"{times[0]:g}", table.shown_at(times)
