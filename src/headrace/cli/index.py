"""Writes down where the samples of shards lie, for whoever streams them: `headrace index`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, OptionError, masked

if TYPE_CHECKING:
    from headrace.fetch import Meter
    from headrace.indexes.building import BuildProgress

_SHOWN_EVERY_S = 0.2
_FAILURES_SHOWN = 20
_READS_PER_SHARD = 4
_DESCRIPTION = """\
Write down where the samples of shards lie, so that they have numbers and keys, and each can be got by itself.
"""
_EPILOG = """\
The index of all shards goes to this machine's cache, where hr.stream(index="auto") looks for it, unless --output or
--beside say otherwise. A build that was interrupted goes on where it ended when the same command is given again.
"""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "index",
        help="write down where the samples of shards lie",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="a shard, or a pattern like 's3://bucket/train-{000..999}.tar'"
    )
    parser.add_argument("--format", metavar="NAME", help="tar, jsonl, …; by default it follows from the names")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--output", metavar="PATH_OR_URL", help="where the index goes")
    places.add_argument(
        "--beside", action="store_true", help="write an index for each shard, beside it, with .hri behind its name"
    )
    parser.add_argument(
        "--headers",
        action="store_true",
        help="read headers only where members are long: a few percent of the bytes, and no checksums of members",
    )
    parser.add_argument(
        "--concurrency", type=_count, default=8, metavar="N", help="shards at once (default: %(default)s)"
    )
    parser.add_argument(
        "--storage-option",
        action="append",
        type=_setting,
        default=[],
        metavar="K=V",
        help="a setting for the store, such as endpoint=http://127.0.0.1:9000; inside a group: headers.X-Name=value, "
        "client_options.allow_http=true",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Build what was asked for; gives the exit status."""
    try:
        return asyncio.run(_run(given))
    except (HeadraceError, OSError) as error:
        _say(f"error: {error}")
        return 1


async def _run(given: argparse.Namespace) -> int:
    from headrace.datasets.urls import expand
    from headrace.fetch import Reader
    from headrace.formats.registry import format_named, format_of
    from headrace.formats.tar.format import TAR
    from headrace.indexes.building import BuildProgress, build_beside, build_index, cache_path

    urls = expand(given.urls)
    storage_options = _storage_options(given.storage_option)
    began, progress = time.monotonic(), BuildProgress()
    form = (format_of(urls) if given.format is None else format_named(given.format)) or TAR
    settings: dict[str, Any] = {
        "form": form,
        "headers_only": given.headers,
        "concurrency": given.concurrency,
        "storage_options": storage_options,
        "progress": progress,
    }
    output = given.output or str(cache_path(urls, storage_options, form))
    async with Reader(concurrency=_READS_PER_SHARD * given.concurrency, storage_options=storage_options) as reader:
        showing = asyncio.create_task(_show(progress)) if sys.stderr.isatty() and not given.quiet else None
        try:
            if given.beside:
                await build_beside(reader, urls, **settings)
            else:
                await build_index(reader, urls, output, **settings)
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
        print(_summary(progress, reader.meter, where, time.monotonic() - began), end="")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 or more")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("it must be NAME=VALUE")  # the text is not shown: it may be a secret
    return name, value


def _storage_options(settings: list[tuple[str, str]]) -> dict[str, object]:
    options: dict[str, Any] = {}
    for name, text in settings:
        value = {"true": True, "false": False}.get(text, text)
        group, dot, inner = name.partition(".")
        if dot and isinstance(options.setdefault(group, {}), dict):
            options[group][inner] = value
        elif dot:
            raise OptionError(f"--storage-option {group} is given a value and a part of one, {name}")
        else:
            options[name] = value
    return options


async def _show(progress: BuildProgress) -> None:
    """Keep one line of the terminal up to date."""
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
        _say(f"error: {error}")
    more = f" ({len(failures) - _FAILURES_SHOWN} are not shown)" if len(failures) > _FAILURES_SHOWN else ""
    written = "the others have theirs" if is_beside else "no index was written; what is done is kept for the next time"
    _say(f"error: {len(failures):,} of {progress.total:,} shards failed{more}; {written}")


def _summary(progress: BuildProgress, meter: Meter, where: str, seconds: float) -> str:
    entries = progress.entries.values()
    samples, members = (sum(getattr(entry, name) for entry in entries) for name in ("samples", "members"))
    share = f" ({100 * meter.bytes / progress.seen_bytes:.1f} % of the shards)" if progress.seen_bytes else ""
    kept = f" ({progress.kept:,} from before)" if progress.kept else ""
    return (
        f"{len(entries):,} shards{kept}, {samples:,} samples, {members:,} members: {progress.index_bytes:,} bytes of "
        f"index {where}; {meter.requests:,} requests, {meter.bytes:,} bytes read{share}, {seconds:.1f} s\n"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"headrace index: {text}\n")
