"""Addresses of shards, as users write them: braces, and patterns with `*`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from headrace.errors import OptionError, masked, masked_text

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")


def expand(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Expand braces in a pattern or a list of patterns.

    `{000..012}` counts (the width is kept, a third number is the step). `{train,test}` are alternatives.

    Raises:
        OptionError: there is no address, or one is empty or not a path.

    Examples:
        >>> expand("s3://bucket/train-{08..10}.tar")
        ('s3://bucket/train-08.tar', 's3://bucket/train-09.tar', 's3://bucket/train-10.tar')
    """
    is_some = not isinstance(urls, str | os.PathLike) and hasattr(type(urls), "__iter__")
    patterns: Iterable[object] = urls if is_some else [urls]  # type: ignore[assignment]  # it has __iter__
    found = tuple(url for pattern in patterns for url in _expanded(_as_text(pattern)))
    if not found or not all(found):
        raise OptionError(
            f"urls={[masked(url) for url in found]} names no object; give an address, a pattern like "
            "'a-{000..012}.tar', or a list"
        )
    return found


def _as_text(url: object) -> str:
    try:
        text = os.fspath(url)  # type: ignore[call-overload]  # raises if it is no path
    except TypeError:
        text = None
    if type(text) is bytes or text is None:
        raise OptionError(
            f"{masked_text(repr(url)):.200} is no address; samples that a data set of this program has are a stream by "
            "hr.from_map(dataset) or hr.from_iterable(iterable)"
        )
    return str(text)


def _expanded(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in _choices(match[1], pattern):
        yield from _expanded(pattern[: match.start()] + choice + pattern[match.end() :])


def _choices(inside: str, pattern: str) -> list[str]:
    counted = _RANGE.fullmatch(inside)
    if counted is None:
        return inside.split(",")
    first, last = counted[1], counted[2]
    is_padded = any(re.match(r"-?0\d", number) for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    low, high = int(first), int(last)
    step = abs(int(counted[3])) if counted[3] else 1
    if not step:
        raise OptionError(f"{masked(pattern)!r}: a step of 0 never gets from {first} to {last}")
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]


_MAGIC = re.compile(r"[*?[]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://)?")
_WEB = frozenset({"http", "https"})  # here "?" begins a query


class Pattern:
    """An address with `*`, `?` or `[…]`, as in shells. `**` matches any number of folders.

    Names that begin with a dot match only if the pattern has the dot.

    Attributes:
        folder: The folder to list, with a slash at its end, or empty.
        levels: Levels of folders below it. None: all.
        is_open: True if the end of the pattern may match several kinds of objects.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fixed = _MAGIC.search(url, _begin(url))
        assert fixed is not None, "it is no pattern"
        self.folder = url[: url.rfind("/", 0, fixed.start()) + 1]
        self._parts = url[len(self.folder) :].split("/")
        last = self._parts[-1]
        self.is_open = "." not in last or _MAGIC.search(last.rpartition(".")[2]) is not None
        self.levels = None if "**" in self._parts else len(self._parts)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        *folders, last = self._parts
        text = "".join(r"(?:(?!\.)[^/]+/)*" if part == "**" else f"{_translated(part)}/" for part in folders)
        text += r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+" if last == "**" else _translated(last)
        return re.compile(text, re.DOTALL)

    def matches(self, path: str) -> bool:
        return self._regex.fullmatch(path) is not None

    def matches_below(self, name: str) -> bool:
        """True if objects in this direct subfolder may match."""
        first = self._parts[0]
        if first == "**":
            return not name.startswith(".")
        return len(self._parts) > 1 and re.fullmatch(_translated(first), name, re.DOTALL) is not None


def is_pattern(url: str) -> bool:
    """True if an address is a pattern. An existing file with such a name is not."""
    begin = _begin(url)
    scheme = url[:begin].partition(":")[0].lower()
    if scheme == "pipe":
        return False
    if scheme in _WEB:
        return "*" in url[begin:].partition("?")[0]
    if _MAGIC.search(url, begin) is None:
        return False
    return not (not begin and os.path.lexists(url))


def _begin(url: str) -> int:
    match = _SCHEME.match(url)
    is_scheme = match is not None and (match[0].endswith("//") or match[1].lower() in ("file", "pipe"))
    return match.end() if match is not None and is_scheme else 0


def _translated(part: str) -> str:
    out, at = [], 0
    while at < len(part):
        sign, at = part[at], at + 1
        if sign == "*":
            out.append("[^/]*")
        elif sign == "?":
            out.append("[^/]")
        elif sign == "[" and (end := part.find("]", at + 1 + (part[at : at + 1] == "!"))) > 0:
            inside, at = part[at:end], end + 1
            out.append(_class(inside))
        else:
            out.append(re.escape(sign))
    hidden = "" if part.startswith(".") else r"(?!\.)"
    return hidden + "".join(out)


def _class(inside: str) -> str:
    """Translate the content of `[…]`: characters and ranges like a-z, negated by "!"."""
    negated = inside.startswith("!")
    signs, wanted, at = inside[negated:], [], 0
    while at < len(signs):
        if signs[at + 1 : at + 2] == "-" and at + 2 < len(signs):
            if signs[at] <= signs[at + 2]:
                wanted.append(f"{re.escape(signs[at])}-{re.escape(signs[at + 2])}")
            at += 3
        else:
            wanted.append(re.escape(signs[at]))
            at += 1
    if not wanted:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{''.join(wanted)}]"
