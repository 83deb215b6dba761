"""`hr.lerobot`: LeRobot data sets, with rows in Parquet files and frames in MP4 files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from headrace._util import check
from headrace.dataset.source import blocking
from headrace.dataset.stream import Stream
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.arrow_values import library
from headrace.formats.json_values import as_number, as_object, as_text
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.frames import Piece, check_decoder, decode_errors, decoded
from headrace.formats.parquet.format import Parquet
from headrace.formats.pinned_object import for_each
from headrace.ops.operator import EachSample
from headrace.sources.clips import Videos, read_frames, video_as_listed
from headrace.sources.constructors import stream
from headrace.sources.discovery import Place, folders_at
from headrace.sources.entries import Entries, only
from headrace.sources.reading import Options, OwnReaders, found, read_from
from headrace.sources.shards import opening, shards_at
from headrace.workers.tasks import Step

INFO = "meta/info.json"
"""Metadata file that identifies a data set and describes its layout."""

_GIVEN = re.compile(r"\{(\w+)(?::(0?\d+)d)?\}")


def lerobot(
    url: str | os.PathLike[str],
    *,
    cameras: Sequence[str] | None = None,
    offsets: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
    decoder: str = "torchcodec",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Options = None,
) -> Stream:
    """Read rows of a LeRobot data set, version 2 or 3, with the camera frames at their time.

    A sample has the columns of its row, such as `action`, `episode_index` and `timestamp`, the text of its task as
    `task`, and for each camera its frame, `[3, H, W] uint8` in RGB; with `offsets`, `[T, 3, H, W]`. Rows have numbers,
    in the order of the data set, so `len(data)`, `data[i]`, `.shuffle("global")`, `.slice()`, ranks and exact resume
    work as usual. Only the parts of videos that the frames need are read.

    Construction lists the folder, and reads the locations of episodes.

    Args:
        url: The folder, such as "hf://datasets/lerobot/pusht".
        cameras: Video features whose frames are read. (): none. None: all.
        offsets: Times of frames in seconds relative to the row, instead of the row's time; negative ones are before it.
            Beyond the episode, its first or last frame is used.
        size: (height, width) in pixels to which frames are scaled. The aspect ratio is not preserved.
        decoder: As in `hr.video`.
        limits: Limits on the pixels of a frame, and on the bytes of a sample's frames, before and after decoding.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: This is no such data set, or another version of it; or there is no such camera, or decoder.
        FormatError: The metadata of episodes are damaged.
        StorageError: The folder could not be listed.

    Examples:
        >>> options = {"decoder": "pyav", "offsets": [-0.1, 0]}
        >>> data = hr.lerobot("hf://datasets/lerobot/pusht", **options).shuffle("global")  # doctest: +SKIP
    """
    check.size("size", size)
    if offsets is not None and not (np.ndim(offsets) == 1 and np.size(offsets) and _are_finite(offsets)):
        raise check.invalid("offsets", offsets, "one number of seconds or more; for no frames, give cameras=()")
    names = folders_at((os.fspath(url),), storage_options, kept=listing == "kept")
    folder = names.listings[0].folder
    about = _about(folder, storage_options)
    there = _There(folder, names.listings[0].urls, about, storage_options)
    cameras = about.videos if cameras is None else (cameras,) if isinstance(cameras, str) else cameras
    for name in cameras:
        check.one_of(f"{masked(folder)}: cameras", name, about.videos)
    facts = (
        *names.facts,
        ("layout", f"LeRobot's, {about.version}: {about.episodes:,} episodes, {about.fps:g} rows a second"),
    )
    source = shards_at(Place(there.rows, Parquet(), facts), "auto", limits, storage_options)
    rows = Stream(source, opening(source))
    adds = AddFrames(tuple(cameras), there.tasks(), decoder, limits, size, is_one=offsets is None)
    if not cameras:
        return Stream(source, (*rows.operators, EachSample(Step("task", "map", adds, False))))
    check_decoder(decoder)
    urls, episodes = there.episodes(cameras)
    videos = Videos(urls, None, limits)
    frames = CameraFrames(videos, episodes, tuple(cameras), tuple(offsets or (0.0,)), about.fps, storage_options)
    steps = EachSample(Step("frames", "map", frames, False)), EachSample(Step("decode(frames)", "map", adds, False))
    return Stream(source, (*rows.operators, *steps))


def _are_finite(offsets: Sequence[float]) -> bool:
    return np.asarray(offsets).dtype.kind in "iuf" and bool(np.isfinite(offsets).all())


@dataclass(frozen=True, slots=True)
class _About:
    version: str
    fps: float
    episodes: int
    frames: int | None
    videos: tuple[str, ...]
    video_path: str
    data_path: str
    chunk: int

    @property
    def has_files_of_several(self) -> bool:
        """True if a file may have several episodes."""
        return self.version.startswith("v3")


def _about(folder: str, storage_options: Options) -> _About:
    place = f"{folder}{INFO}"
    data = blocking(partial(found, place, None, storage_options))
    if data is None:
        raise OptionError.at(folder, f"has no {INFO}, or it cannot be read: it is no data set of LeRobot's layout")
    try:
        said = as_object(json.loads(data)) or {}
    except ValueError as error:
        raise FormatError.at(place, f"is damaged: {error}") from None
    version, features = as_text(said.get("codebase_version")) or "", as_object(said.get("features")) or {}
    if not re.fullmatch(r"v[23]\.\d+", version):
        raise OptionError.at(
            place, f"is of the version {version!r}: 2 and 3 are read; LeRobot's own scripts convert others"
        )
    fps, count, chunk = said.get("fps"), as_number(said.get("total_episodes")), as_number(said.get("chunks_size"))
    if not isinstance(fps, int | float) or not 0 < fps < 1e6 or count is None:
        raise FormatError.at(place, "is damaged: it has no fps, or no total_episodes")
    videos = [name for name, one in features.items() if (as_object(one) or {}).get("dtype") == "video"]
    video_path, data_path = (as_text(said.get(name)) or "" for name in ("video_path", "data_path"))
    frames = as_number(said.get("total_frames"))
    return _About(version, float(fps), count, frames, tuple(videos), video_path, data_path, max(chunk or 1000, 1))


class _There:
    """Contents of the folder of a data set."""

    def __init__(self, folder: str, urls: Entries, about: _About, storage_options: Options) -> None:
        self._folder, self._about, self._options = folder, about, storage_options
        self._videos = only(urls, lambda one: one.endswith(".mp4"))
        self._meta = frozenset(only(urls, lambda one: one.startswith(f"{folder}meta/")))
        self.rows = only(urls, lambda one: one.startswith(f"{folder}data/") and one.endswith(".parquet"))
        if not len(self.rows):
            raise OptionError.at(folder, "has no rows: nothing like data/**/*.parquet is there")

    def _read(self, name: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Read the rows of a table in `meta`: JSON lines, or one or more Parquet files."""
        lines = f"{self._folder}meta/{name}.jsonl"
        if lines in self._meta:
            return list(stream(lines, index=None, storage_options=self._options))
        begins = f"{self._folder}meta/{name}"
        places = sorted(url for url in self._meta if url.startswith(begins) and url.endswith(".parquet"))
        if not places:
            return []
        return list(stream(places, format=Parquet(columns=columns), storage_options=self._options))

    def tasks(self) -> dict[int, str]:
        place = f"{self._folder}meta/tasks.parquet"
        if place not in self._meta:
            return self._numbered([(int(row["task_index"]), str(row["task"])) for row in self._read("tasks")])
        data = blocking(partial(read_from, self._options, place))
        pa = library()
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(pa.BufferReader(data))
            # LeRobot stores the texts as a pandas index; this is the name of an unnamed index
            texts = table.column("task" if "task" in table.column_names else "__index_level_0__")
            numbers = table.column("task_index").to_pylist()
            return self._numbered(list(zip(numbers, map(str, texts.to_pylist()), strict=True)))
        except (pa.ArrowException, KeyError, OSError) as error:
            raise FormatError.at(place, f"is damaged: {error}") from None

    def _numbered(self, tasks: Sequence[tuple[int, str]]) -> dict[int, str]:
        found = dict(tasks)
        if len(found) < len(tasks):
            place = f"{self._folder}meta/tasks"
            raise FormatError.at(place, f"is damaged: two of its {len(tasks)} tasks have one number")
        return found

    def episodes(self, cameras: Sequence[str]) -> tuple[Entries, dict[int, Episode]]:
        columns = ["episode_index", "length"]
        if self._about.has_files_of_several:
            parts = ("chunk_index", "file_index", "from_timestamp")
            columns += [f"videos/{camera}/{part}" for camera in cameras for part in parts]
            columns += [f"data/{part}" for part in parts[:2] if f"{{{part}" in self._about.data_path]
        number = {url: k for k, url in enumerate(self._videos)}
        episodes: dict[int, Episode] = {}
        rows: set[str] = set()
        for row in self._read("episodes", columns):
            try:
                index, length = int(row["episode_index"]), int(row["length"])
                where = [self._video(row, index, camera) for camera in cameras]
                rows.add(self._folder + self._filled(self._about.data_path, row, index, "data"))
            except (KeyError, TypeError, ValueError) as error:
                raise self._damaged(f"an episode lacks what is needed of it: {error}") from None
            if not 0 <= index < self._about.episodes:
                raise self._damaged(f"it has an episode {index}, and {INFO} has {self._about.episodes} episodes")
            missing = next((url for url, _ in where if url not in number), None)
            if missing is not None:
                raise self._damaged(f"the video of episode {index} would be {masked(missing)}, which is not there")
            if length < 1 or index in episodes:
                raise self._damaged(f"episode {index} has {length} rows, or comes twice")
            episodes[index] = Episode(length, tuple((number[url], begin) for url, begin in where))
        self._check(episodes, rows)
        return self._videos, episodes

    def _check(self, episodes: Mapping[int, Episode], rows: set[str]) -> None:
        about = self._about
        if len(episodes) != about.episodes:
            raise self._damaged(f"it has {len(episodes)} episodes, and {INFO} has {about.episodes}")
        frames = sum(one.length for one in episodes.values())
        if about.frames not in (None, frames):
            raise self._damaged(f"its episodes have {frames} rows, and {INFO} has {about.frames}")
        if about.data_path and (odd := sorted(rows ^ set(self.rows))):
            which = "is not there" if odd[0] in rows else "is of none of its episodes"
            raise self._damaged(f"the file of rows {masked(odd[0])} {which}")

    def _video(self, row: Mapping[str, Any], episode: int, camera: str) -> tuple[str, float]:
        """Return the file of an episode's video, and the episode's start in it, in seconds."""
        begin = float(row[f"videos/{camera}/from_timestamp"]) if self._about.has_files_of_several else 0.0
        return self._folder + self._filled(self._about.video_path, row, episode, f"videos/{camera}"), begin

    def _filled(self, path: str, row: Mapping[str, Any], episode: int, where: str) -> str:
        names: dict[str, str | int] = {"video_key": where.removeprefix("videos/")}
        names |= {"episode_chunk": episode // self._about.chunk, "episode_index": episode}
        if self._about.has_files_of_several:
            names |= {one: int(row[f"{where}/{one}"]) for one in ("chunk_index", "file_index") if f"{{{one}" in path}
        return _GIVEN.sub(partial(_filled, names), path)

    def _damaged(self, why: str) -> FormatError:
        place = f"{self._folder}meta/episodes"
        return FormatError.at(place, f"is damaged: {why}")


def _filled(names: Mapping[str, str | int], match: re.Match[str]) -> str:
    value = names.get(match[1], match[0])
    return f"{value:{match[2]}d}" if isinstance(value, int) and match[2] else str(value)


_READ = "__frames__"
"""Field of a row's encoded frames, until they are decoded."""

_OFF_S = 1e-3
"""Maximum distance in seconds between a requested time and the frame for it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Location of an episode: for each camera a video number, and a start time in seconds."""

    length: int
    videos: tuple[tuple[int, float], ...]


@dataclass(eq=False, repr=False)
class CameraFrames:
    """A step on the event loop that reads the encoded frames of a row.

    The row's `episode_index` and `timestamp` determine the frames.

    Attributes:
        cameras: Names, in the order of the videos of an episode.
        offsets: Seconds between the row's time and each frame.
        fps: Rows per second.
    """

    videos: Videos
    episodes: Mapping[int, Episode]
    cameras: tuple[str, ...]
    offsets: tuple[float, ...]
    fps: float
    storage_options: Options

    def __post_init__(self) -> None:
        self._readers = OwnReaders(self.storage_options, self.videos.aclose)

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


@dataclass(frozen=True, eq=False, repr=False)
class AddFrames:
    """The step after `CameraFrames`, in workers: decodes frames and adds the row's task as text."""

    cameras: tuple[str, ...]
    tasks: Mapping[int, str]
    decoder: str
    limits: Limits
    size: tuple[int, int] | None
    is_one: bool

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
