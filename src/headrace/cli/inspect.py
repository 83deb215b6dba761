"""`headrace inspect`: describes the data at an address, and its first samples."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.cli.settings import add_storage_to, count, say, storage_options
from headrace.dataset.blocking import blocking
from headrace.errors import HeadraceError, ObjectMissingError, masked, printable
from headrace.formats.limits import DEFAULTS, Limits

_DESCRIPTION = """\
Say what lies at a place: its format and why it is taken for that, how many objects and samples there are where that is
known, and what the first samples have. Nothing else is read, but with --check. Where objects say themselves how many
samples they have, as Parquet files do, they are asked, if there are no more than 256 of them.
"""

_COUNTED = 256


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what lies at a place",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="an address, a folder, or a pattern like 's3://bucket/**/*.tar'"
    )
    parser.add_argument("--format", metavar="NAME", help="tar, jsonl, …; by default it follows from what lies there")
    add_storage_to(parser)
    parser.add_argument("--samples", type=count, default=2, metavar="N", help="samples to show (default: %(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="read everything, and count the samples or name the damage"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    try:
        return _run(given)
    except BrokenPipeError:
        raise
    except (HeadraceError, OSError) as error:
        say("inspect", f"error: {error}")
        return 1


def _run(given: argparse.Namespace) -> int:
    from headrace.dataset.describe import told
    from headrace.formats.mp4.format import MP4, is_video
    from headrace.sources.constructors import stream
    from headrace.sources.discovery.guessing import names_at

    options = storage_options(given.storage_option)
    urls = names_at(given.urls, options).urls if given.format in (None, MP4.name) else ()
    if urls and all(is_video(url) for url in urls):
        return _run_videos(given, urls, options)
    data = stream(given.urls, format=given.format, storage_options=options)
    source = data.source.__sample_source__()
    if source.traits.numbered and (given.check or len(source.urls) <= _COUNTED):
        with suppress(HeadraceError, TypeError, OSError):  # damage is reported with the samples
            len(data)
    print(printable(data.describe()))
    seen, samples = 0, iter(data if given.check else data.take(given.samples))
    try:
        for sample in samples:
            if seen < given.samples:
                print(f"sample {seen}")
                print("".join(f"  {line}\n" for line in told([sample])), end="")
            seen += 1
    except ObjectMissingError as error:
        print(f"missing: {error}")
        return 1
    except (HeadraceError, ValueError) as error:
        print(printable(f"damage: behind {seen:,} samples: {error}"))
        return 1
    if given.check:
        print(f"no damage: {seen:,} samples were read")
    return 0


def _run_videos(given: argparse.Namespace, urls: Sequence[str], options: dict[str, object]) -> int:
    from headrace.cli.inspect import facts_of_videos

    last = f" to {masked(urls[-1])}" if len(urls) > 1 else ""
    print(printable(f"videos: {len(urls):,}, {masked(urls[0])}{last}; hr.video() gives clips of them"))
    seen, frames = 0, 0
    try:
        for facts in facts_of_videos(urls if given.check else urls[: given.samples], options):
            if seen < given.samples:
                print(printable(f"video {facts.url}"))
                print(printable("".join(f"  {line}\n" for line in facts.lines)), end="")
            seen, frames = seen + 1, frames + facts.frames
    except HeadraceError as error:
        print(f"damage: behind {seen:,} videos: {error}")
        return 1
    if given.check:
        print(f"no damage in the tables of {seen:,} videos with {frames:,} frames; pictures are not decoded")
    return 0


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
    from headrace.indexes.videos import Videos  # imports numpy
    from headrace.sources.reading import OwnReaders

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
