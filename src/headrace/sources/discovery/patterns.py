"""Address patterns with `*`: the folder to list, and the matching objects."""

from __future__ import annotations

import os
import re
from functools import cached_property

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
