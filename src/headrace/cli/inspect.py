"""Says what lies at a place, why that is thought so, and what its first samples have: `headrace inspect`."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.settings import add_storage_to, count, say, storage_options
from headrace.errors import HeadraceError

_DESCRIPTION = """\
Say what lies at a place: its format and why it is taken for that, how many objects and samples there are where that is
known, and what the first samples have. Nothing else is read, but with --check.
"""


def add_to(commands: Any) -> None:
    """Add the command to a parser's."""
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
    """Inspect what was asked for; gives the exit status: 1 where it is damaged."""
    try:
        return _run(given)
    except (HeadraceError, OSError) as error:
        say("inspect", f"error: {error}")
        return 1


def _run(given: argparse.Namespace) -> int:
    from headrace.datasets.constructors import stream
    from headrace.datasets.telling import told

    data = stream(given.urls, format=given.format, storage_options=storage_options(given.storage_option))
    print(data.describe())
    seen, samples = 0, iter(data if given.check else data.take(given.samples))
    try:
        for sample in samples:
            if seen < given.samples:
                print(f"sample {seen}")
                print("".join(f"  {line}\n" for line in told([sample])), end="")
            seen += 1
    except (HeadraceError, ValueError) as error:
        print(f"damage: behind {seen:,} samples: {error}")
        return 1
    if given.check:
        print(f"no damage: {seen:,} samples were read")
    return 0
