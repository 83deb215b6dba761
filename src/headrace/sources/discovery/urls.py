"""Addresses of shards, as users write them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

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
