"""Camera frames of rows, at the time of a row in its episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import FormatError, masked
from headrace.formats.limits import Limits
from headrace.formats.mp4.frames import Piece, decode_errors, decoded
from headrace.formats.pinned_object import for_each
from headrace.indexes.videos import Videos
from headrace.sources.clips import read_frames, video_as_listed
from headrace.sources.reading import OwnReaders

_READ = "__frames__"
"""Field of a row's encoded frames, until they are decoded."""

_OFF_S = 1e-3
"""Maximum distance in seconds between a requested time and the frame for it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Location of an episode: for each camera a video number, and a start time in seconds."""

    length: int
    videos: tuple[tuple[int, float], ...]


class CameraFrames:
    """A step on the event loop that reads the encoded frames of a row.

    The row's `episode_index` and `timestamp` determine the frames.

    Args:
        cameras: Names, in the order of the videos of an episode.
        offsets: Seconds between the row's time and each frame.
        fps: Rows per second.
    """

    def __init__(
        self,
        videos: Videos,
        episodes: Mapping[int, Episode],
        cameras: tuple[str, ...],
        offsets: tuple[float, ...],
        fps: float,
        storage_options: Mapping[str, object] | None,
    ) -> None:
        self.videos, self.episodes, self.cameras = videos, episodes, cameras
        self.offsets, self.fps, self.storage_options = offsets, fps, storage_options
        self._readers = OwnReaders(storage_options, videos.aclose)

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.videos, self.episodes, self.cameras, self.offsets, self.fps, self.storage_options)
        return CameraFrames, arguments

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with its encoded frames."""
        where = f"row {row['__key__']} of {row['__url__']}"
        number, at = row.get("episode_index"), row.get("timestamp")
        episode = None if number is None else self.episodes.get(number)
        if episode is None or at is None:
            raise FormatError(f"{where} is of episode {number}, {at} s: nothing is known of that", url=row["__url__"])
        last = (episode.length - 1) / self.fps
        if not -_OFF_S <= at <= last + _OFF_S:  # otherwise the frame of another row would be used
            raise FormatError(f"{where}, at {at:.4f} s, is beyond its episode, {number}", url=row["__url__"])
        times = np.clip(float(at) + np.array(self.offsets), 0, last)

        async def of(camera: int) -> tuple[str, list[Piece], list[Any]]:
            ordinal, begin = episode.videos[camera]
            url = self.videos.urls[ordinal]
            async with self._readers.use() as reader:
                video = await video_as_listed(reader, self.videos, ordinal)
                try:
                    chosen = video[0].nearest((times + begin).tolist(), _OFF_S)
                    return url, *(await read_frames(reader, self.videos, url, video, chosen))
                except ValueError as error:
                    text = f"{masked(url)} has not the frames of {where}, episode {number}: {error}"
                    raise FormatError(text, url=url) from None

        return {**row, _READ: await for_each(len(self.cameras), of)}


class AddFrames:
    """The step after `CameraFrames`, in workers: decodes frames and adds the row's task as text."""

    def __init__(
        self,
        cameras: tuple[str, ...],
        tasks: Mapping[int, str],
        decoder: str,
        limits: Limits,
        size: tuple[int, int] | None,
        *,
        is_one: bool,
    ) -> None:
        self.cameras, self.tasks, self.decoder = cameras, tasks, decoder
        self.limits, self.size, self.is_one = limits, size, is_one

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the complete sample."""
        read = row.pop(_READ, ())
        if self.tasks and "task_index" in row:
            number = row["task_index"]
            if number not in self.tasks:
                where = f"row {row['__key__']} of {row['__url__']}"
                raise FormatError(f"{where} is of task {number}, which meta/tasks lacks", url=row["__url__"])
            row.setdefault("task", self.tasks[number])
        for camera, (url, pieces, bodies) in zip(self.cameras, read, strict=bool(read)):
            key = row["__key__"]
            text = f"frames of row {key!r} of {row['__url__']} do not decode by {self.decoder}, from {masked(url)}"
            with decode_errors(text, key, url, camera):
                frames, _ = decoded(self.decoder, pieces, bodies, self.limits, self.size)
            row[camera] = frames[0] if self.is_one else frames
        return row
