"""The command `headrace`, with one module for each subcommand. torch is never imported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from headrace.cli import index, inspect, pack


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="headrace", description="Tools for data that headrace streams into PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"headrace {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    index.add_to(commands)
    inspect.add_to(commands)
    pack.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except KeyboardInterrupt:
        sys.stderr.write("\nheadrace: interrupted; the same command goes on where this one ended\n")
        return 130
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes the rest at exit
        return 1


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "(not installed)"
