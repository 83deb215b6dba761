"""`headrace inspect`: describes the data at an address, and its first samples."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.cli.settings import add_command, add_storage_to, count, storage_options
from headrace.errors import HeadraceError, ObjectMissingError, masked, printable

_DESCRIPTION = """\
Describe the data at a place: the format and the reason for it, the numbers of objects and samples if known, and the
first samples. Nothing else is read, except with --check. Objects that store their number of samples, as Parquet files
do, are asked for it, if there are no more than 256.
"""

_COUNTED = 256


def add_to(commands: Any) -> None:
    parser = add_command(commands, "inspect", run, summary="describe the data at a place", description=_DESCRIPTION)
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="an address, a folder, or a pattern like 's3://bucket/**/*.tar'"
    )
    parser.add_argument("--format", metavar="NAME", help="tar, jsonl, …; by default it follows from the data")
    add_storage_to(parser)
    parser.add_argument("--samples", type=count, default=2, metavar="N", help="samples to show (default: %(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="read everything, and count the samples or name the damage"
    )


def run(given: argparse.Namespace) -> int:
    from headrace.dataset.stream import told
    from headrace.formats.mp4.format import MP4, is_video
    from headrace.sources.constructors import stream
    from headrace.sources.discovery import names_at

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
        print(printable(f"damage: after {seen:,} samples: {error}"))
        return 1
    if given.check:
        print(f"no damage: {seen:,} samples were read")
    return 0


def _run_videos(given: argparse.Namespace, urls: Sequence[str], options: dict[str, object]) -> int:
    last = f" to {masked(urls[-1])}" if len(urls) > 1 else ""
    print(printable(f"videos: {len(urls):,}, {masked(urls[0])}{last}; hr.video() gives clips of them"))
    seen, frames = 0, 0
    try:
        for count, lines in _described_videos(urls if given.check else urls[: given.samples], options):
            if seen < given.samples:
                print(printable(f"video {masked(urls[seen])}"))
                print(printable("".join(f"  {line}\n" for line in lines)), end="")
            seen, frames = seen + 1, frames + count
    except HeadraceError as error:
        print(f"damage: after {seen:,} videos: {error}")
        return 1
    if given.check:
        print(f"no damage in the tables of {seen:,} videos with {frames:,} frames; pictures are not decoded")
    return 0


def _described_videos(
    urls: Sequence[str], storage_options: Mapping[str, object]
) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the number of frames and a description of each video, from its tables. They are read on demand."""
    from headrace.dataset.source import blocking  # imports numpy, as the next ones do
    from headrace.formats.limits import DEFAULTS
    from headrace.sources.clips import Videos
    from headrace.sources.reading import OwnReaders

    videos = Videos(urls, None, DEFAULTS)
    readers = OwnReaders(storage_options, videos.aclose)

    async def described(ordinal: int) -> tuple[int, Sequence[str]]:
        async with readers.use() as reader:
            table, version = await videos.video(reader, ordinal)
        track, count = table.track, len(table)
        seconds = (table.end_ticks - int(table.shown_ticks[0])) / track.timescale
        codec, turned = track.codec.decode("latin-1"), ", to be shown turned" if track.is_turned else ""
        return count, (
            f"pictures: {track.width} x {track.height}, {codec!r}{turned}",
            f"frames: {count:,} in {seconds:.3f} s, {count / seconds:.4g} a second; {len(table.keys):,} key frames",
            f"bytes: {version.size or 0:,}, including {int(table.size.sum()):,} of frames",
        )

    for ordinal in range(len(urls)):
        yield blocking(partial(described, ordinal))
