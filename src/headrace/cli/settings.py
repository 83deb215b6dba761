"""Common code of the commands: store settings, counts, messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from headrace.errors import OptionError, printable


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    epilog: str | None = None,
    advice: str = "",
) -> argparse.ArgumentParser:
    """Add a subcommand. `advice` follows the text of an error that ends it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, advice=advice)
    return parser


def add_storage_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-option",
        action="append",
        type=_setting,
        default=[],
        metavar="K=V",
        help="a setting for the store, such as endpoint=http://127.0.0.1:9000; inside a group: headers.X-Name=value, "
        "client_options.allow_http=true",
    )


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 or more")
    return int(text)


def storage_options(settings: list[tuple[str, str]]) -> dict[str, object]:
    """Convert the settings to `storage_options`.

    Raises:
        OptionError: a name is given both a value and a nested value.
    """
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


def say(command: str, text: str) -> None:
    sys.stderr.write(f"headrace {command}: {printable(text)}\n")


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("it must be NAME=VALUE")  # the text may be a secret, so it is not shown
    return name, value
