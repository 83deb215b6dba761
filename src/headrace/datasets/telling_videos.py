"""Descriptions of videos from their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.datasets.blocking import blocking
from headrace.errors import masked
from headrace.formats.limits import DEFAULTS, Limits
from headrace.indexes.videos import Videos
from headrace.reading import OwnReaders


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Facts about one video, known without decoding it. `frames` counts displayed frames."""

    url: str
    frames: int
    lines: tuple[str, ...]


def facts_of_videos(
    urls: Sequence[str], storage_options: Mapping[str, object] | None = None, limits: Limits = DEFAULTS
) -> Iterator[VideoFacts]:
    """Yield facts about each video, in order, from its tables. They are read on demand.

    Raises:
        FormatError: A video is damaged, or of an unsupported kind.
        StorageError: It could not be read.
    """
    videos = Videos(urls, None, limits)
    readers = OwnReaders(storage_options, videos.aclose)

    async def facts(ordinal: int) -> VideoFacts:
        async with readers.use() as reader:
            table, version = await videos.video(reader, ordinal)
        track, count = table.track, len(table)
        seconds = (table.end_ticks - int(table.shown_ticks[0])) / track.timescale
        codec, turned = track.codec.decode("latin-1"), ", to be shown turned" if track.is_turned else ""
        return VideoFacts(
            masked(urls[ordinal]),
            count,
            (
                f"pictures: {track.width} x {track.height}, {codec!r}{turned}",
                f"frames: {count:,} in {seconds:.3f} s, {count / seconds:.4g} a second; {len(table.keys):,} key frames",
                f"bytes: {version.size or 0:,}, of which {int(table.size.sum()):,} are frames",
            ),
        )

    for ordinal in range(len(urls)):
        yield blocking(partial(facts, ordinal))
