"""The command `headrace`, with one module for each subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import headrace
from headrace.cli import index, inspect, pack
from headrace.cli.settings import say
from headrace.errors import HeadraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="headrace", description="Tools for data that headrace streams into PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    index.add_to(commands)
    inspect.add_to(commands)
    pack.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except KeyboardInterrupt:
        sys.stderr.write("\nheadrace: interrupted; the same command continues where this one ended\n")
        return 130
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes the rest at exit
        return 1
    except (HeadraceError, OSError, ValueError) as error:
        say(given.command, f"error: {error}{given.advice}")
        return 1
