"""Catalogues of folders: untrusted JSON, and the names and URLs of shards."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.json_values import as_object, as_text

_ODD = re.compile(r"[\x00-\x1f\\?#]|://")


def catalogue_object(url: str, data: bytes) -> dict[str, object]:
    try:
        said = as_object(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise catalogue_damage(url, f"it is no JSON ({str(error)[:80]})") from None
    if said is None:
        raise catalogue_damage(url, "it is no JSON object")
    return said


def catalogue_damage(url: str, why: str) -> FormatError:
    return FormatError(f"the catalogue {masked(url)} is damaged: {why}", url=url)


@contextmanager
def catalogue_entry(url: str, what: str) -> Iterator[None]:
    """Name the catalogue at `url` and the entry `what` in errors. A ValueError becomes a FormatError."""
    try:
        yield
    except LimitError as error:
        raise LimitError.at(url, f": {what}: {error.args[0]}") from None
    except ValueError as error:
        raise catalogue_damage(url, f"{what}: {error}") from None


def check_each_once(url: str, shards: Iterable[str]) -> None:
    """Raise a FormatError if the catalogue at `url` names a shard twice, by normalized path."""
    seen: dict[str, int] = {}
    for number, shard in enumerate(shards):
        first = seen.setdefault(posixpath.normpath(shard), number)
        if first != number:
            text = f"entries {first} and {number} both name {masked(shard)}: its samples would come twice"
            raise catalogue_damage(url, text)


def file_name(said: object) -> str:
    """Return the name of a file in a catalogue's folder. Raises a ValueError if invalid."""
    name = as_text(said)
    if not name or _ODD.search(name) or name.startswith("/"):
        raise ValueError(f"its file is called {str(said)[:80]!r}")
    if ".." in name.split("/"):
        raise ValueError(f"its file {name[:80]!r} is outside of the folder")
    return name


def split_path(url: str) -> tuple[str, str]:
    """Split a URL at the end of its path."""
    end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
    return url[:end], url[end:]


def beside(url: str, name: str) -> str:
    """Return the URL of an object next to that at `url`, with the same query."""
    path, rest = split_path(url)
    return posixpath.dirname(path) + "/" * ("/" in path) + name + rest
