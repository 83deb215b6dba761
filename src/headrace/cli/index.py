"""`headrace index`: builds indexes of shards."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace.cli.settings import add_command, add_storage_to, count, say, storage_options
from headrace.errors import OptionError, masked, printable

if TYPE_CHECKING:
    from headrace.fetch import Meter
    from headrace.formats.format import Format
    from headrace.indexes.building import BuildProgress

_SHOWN_EVERY_S = 0.2
_FAILURES_SHOWN = 20
_READS_PER_SHARD = 4
_DESCRIPTION = """\
Record the byte ranges of the samples of shards. Samples then have numbers and keys, and each can be read alone.
"""
_EPILOG = """\
The index of all shards is written to this machine's cache, where hr.stream(index="auto") looks for it, unless
--output or --beside is given. The same command continues an interrupted build.
"""


def add_to(commands: Any) -> None:
    summary = "record the byte ranges of the samples of shards"
    parser = add_command(commands, "index", run, summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="a shard, or a pattern like 's3://bucket/train-{000..999}.tar'"
    )
    parser.add_argument("--format", metavar="NAME", help="tar, jsonl, …; by default it follows from the names")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--output", metavar="PATH_OR_URL", help="where the index goes")
    places.add_argument(
        "--beside", action="store_true", help="write an index for each shard, beside it, with .hri appended to its name"
    )
    parser.add_argument(
        "--headers",
        action="store_true",
        help="read headers only where members are long: a few percent of the bytes, and no checksums of members",
    )
    parser.add_argument(
        "--concurrency", type=count, default=8, metavar="N", help="shards at once (default: %(default)s)"
    )
    add_storage_to(parser)
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(given: argparse.Namespace) -> int:
    return asyncio.run(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from headrace.fetch import Reader
    from headrace.indexes.building import BuildProgress, build_index
    from headrace.indexes.cache_path import cache_path

    options = storage_options(given.storage_option)
    urls, form = _shards(given, options)
    began, progress = time.monotonic(), BuildProgress()
    settings: dict[str, Any] = {
        "form": form,
        "headers_only": given.headers,
        "concurrency": given.concurrency,
        "storage_options": options,
        "progress": progress,
    }
    output = given.output or str(cache_path(urls, options, form))
    async with Reader(concurrency=_READS_PER_SHARD * given.concurrency, storage_options=options) as reader:
        showing = asyncio.create_task(_show(progress)) if sys.stderr.isatty() and not given.quiet else None
        try:
            await build_index(reader, urls, None if given.beside else output, **settings)
        finally:
            if showing is not None:
                showing.cancel()
                with suppress(asyncio.CancelledError):
                    await showing
    if progress.failures:
        _tell_failures(progress, is_beside=given.beside)
        return 1
    if not given.quiet:
        where = "beside the shards" if given.beside else f"in {masked(output)}"
        print(printable(_summary(progress, reader.meter, where, time.monotonic() - began)), end="")
    return 0


def _shards(given: argparse.Namespace, options: dict[str, object]) -> tuple[Sequence[str], Format]:
    from headrace.formats.limits import DEFAULTS
    from headrace.formats.mp4.format import MP4, is_video
    from headrace.sources.discovery import names_at, place_of

    place = place_of(names_at(given.urls, options), given.format, DEFAULTS, options)
    form = MP4 if place.format is None and all(is_video(url) for url in place.urls) else place.format
    if form is None:
        raise OptionError("single files have no index: hr.folder and hr.files read each by itself")
    return place.urls, form


async def _show(progress: BuildProgress) -> None:
    try:
        while True:
            failed = f", {len(progress.failures)} failed" if progress.failures else ""
            done = (
                f"{len(progress.entries):,} of {progress.total:,} shards{failed}, {progress.nbytes / 1e6:,.1f} MB read"
            )
            sys.stderr.write(f"\rheadrace index: {done}\x1b[K")
            sys.stderr.flush()
            await asyncio.sleep(_SHOWN_EVERY_S)
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _tell_failures(progress: BuildProgress, *, is_beside: bool) -> None:
    failures = list(progress.failures.values())
    for error in failures[:_FAILURES_SHOWN]:
        say("index", f"error: {error}")
    more = f" ({len(failures) - _FAILURES_SHOWN} are not shown)" if len(failures) > _FAILURES_SHOWN else ""
    written = "the others have theirs" if is_beside else "no index was written; what is done is kept for the next time"
    say("index", f"error: {len(failures):,} of {progress.total:,} shards failed{more}; {written}")


def _summary(progress: BuildProgress, meter: Meter, where: str, seconds: float) -> str:
    entries = progress.entries.values()
    samples, members = (sum(getattr(entry, name) for entry in entries) for name in ("samples", "members"))
    share = f" ({100 * meter.bytes / progress.seen_bytes:.1f} % of the shards)" if progress.seen_bytes else ""
    kept = f" ({progress.kept:,} from before)" if progress.kept else ""
    return (
        f"{len(entries):,} shards{kept}, {samples:,} samples, {members:,} members: {progress.index_bytes:,} bytes of "
        f"index {where}; {meter.requests:,} requests, {meter.bytes:,} bytes read{share}, {seconds:.1f} s\n"
    )
