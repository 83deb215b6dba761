"""The samples of a plain tar archive by its headers: bodies are not read where leaving them out is worth a request."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from headrace.formats.tar.scanner import TarScanner
from headrace.indexes.pinned import PinnedObject
from headrace.rows import Rows
from headrace.types import Ints

REQUEST_BYTES = 32 * 1024
"""A request is taken to cost as much as reading so many bytes: archives whose members are shorter are read whole."""

_FIRST_WINDOW = 4096
_LONGEST = 256 * 1024  # of a read that goes on where the last one ended
_WINDOWS = [512 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
_LEARN_FROM, _LEARN_FROM_MOST = 8, 256  # members


async def hop(archive: PinnedObject, scanner: TarScanner) -> Rows | None:
    """All samples, found by reads of a few headers each; None where reading the whole archive costs less.

    How much one read must get, so that the next long body begins behind it, is learned from the members seen so far.

    Raises:
        FormatError: the archive is damaged, as far as that shows in its headers and its end.
    """
    tables: list[Rows] = []
    at, window, length, learn_at, members = 0, _FIRST_WINDOW, _FIRST_WINDOW, _LEARN_FROM, 0
    while not scanner.done:
        data = await archive.read(at, length)
        end = at + len(data)
        rows = scanner.feed(data, at, end == archive.size)
        if scanner.error is not None:
            raise scanner.error
        if len(rows):
            tables.append(rows)
            members += len(rows.offset)
        if members >= learn_at:
            learn_at = min(2 * members, members + _LEARN_FROM_MOST)
            recent = _latest(tables)
            window, rate = best_window(recent.offset, recent.size)
            if rate * (archive.size - end) > archive.size:
                return None
        at, length = end, window
        target = min(scanner.next_header, archive.size)
        if target > end and _skipped(scanner, target):
            at = target
        elif target <= end:
            length = min(max(2 * len(data), window), _LONGEST)  # the end's padding, or a long row of small members
    return Rows.concat(tables) if tables else Rows.empty()


def _skipped(scanner: TarScanner, offset: int) -> bool:
    """Whether the scanner could leave out what lies before `offset`."""
    try:
        scanner.skip(offset)
    except ValueError:  # it is the body of an extended header
        return False
    return True


def best_window(offset: Ints, size: Ints) -> tuple[int, float]:
    """How many bytes to read at each landing, and what a byte of the archive costs so, in bytes.

    Args:
        offset: of two or more members that follow one another.
        size: of the same members.
    """
    stops = offset + size + 511 & -512
    heads: list[int] = stops[:-1].tolist()
    bodies: list[int] = offset[1:].tolist()
    costs = [_cost(heads, bodies, window) for window in _WINDOWS]
    best = int(np.argmin(costs))
    return _WINDOWS[best], costs[best] / int(stops[-1] - stops[0])


def _cost(heads: list[int], bodies: list[int], window: int) -> int:
    """What it costs to see all headers by reads of `window` bytes: a header ends where the body begins."""
    seen, at, cost = 0, heads[0], 0
    while seen < len(heads):
        at += window
        cost += REQUEST_BYTES + window
        seen = bisect_right(bodies, at, lo=seen)
        if seen < len(heads):
            at = max(at, heads[seen])
    return cost


def _latest(tables: list[Rows]) -> Rows:
    """The last few hundred members."""
    count = 0
    for k in range(len(tables) - 1, -1, -1):
        count += len(tables[k].offset)
        if count >= _LEARN_FROM_MOST:
            break
    return Rows.concat(tables[k:])
