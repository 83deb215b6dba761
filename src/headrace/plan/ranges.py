"""Sets of numbers as ranges."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.types import Ranges


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges [start, stop) into ascending ranges that do not touch."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def among_left(start: int, stop: int, gone: Ranges) -> Ranges:
    """Return the `start`-th to `stop`-th of the numbers that are not in `gone`, as ranges."""
    result = []
    shift = 0
    for begin, end in gone:
        first, last = start + shift, min(stop + shift, begin)
        if first < last:
            result.append((first, last))
            start = last - shift
        shift += end - begin
    if start < stop:
        result.append((start + shift, stop + shift))
    return tuple(result)
