"""Choice of requests for the wanted byte ranges of one object: pure functions."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headrace.rows import Rows
from headrace.types import Ints

UNWANTED_SHARE = 0.25
"""Maximum share of unwanted bytes in a merged request."""

_TAR_BLOCK = 512
_HEADERS_BYTES = 4 * _TAR_BLOCK  # headers of a member, with the extended headers of most writers


class Requests(NamedTuple):
    """Requests in ascending order, and for each wanted range its request (-1 if it is empty)."""

    starts: Ints
    stops: Ints
    number: Ints


def coalesce(starts: Ints, stops: Ints, *, gap: int, waste: float, longest: int) -> Requests:
    """Merge the wanted ranges [starts, stops), in any order, into requests. They may overlap.

    A wanted range joins the previous request if all bounds hold. It is never split: its bytes come from one answer, and
    so from one version of the object. A million ranges take about 0.6 seconds.

    Args:
        gap: Unwanted bytes that cost no more than another request: at most latency times bandwidth.
        waste: Maximum share of unwanted bytes in a request.
        longest: Maximum bytes of a request. Only a single wanted range may exceed it.
    """
    order = np.lexsort((-stops, starts))  # longer ranges first, so that ranges inside them join
    order = order[starts[order] < stops[order]]
    firsts: list[int] = []  # where in `order` each request begins
    ends: list[int] = []
    begin = end = unwanted = 0
    for k, (start, stop) in enumerate(zip(starts[order].tolist(), stops[order].tolist(), strict=True)):
        hole = start - end if start > end else 0
        farther = max(end, stop)
        length = farther - begin
        fits = length <= longest or farther == end
        if firsts and fits and hole <= gap and unwanted + hole <= waste * length:
            unwanted += hole
            ends[-1] = end = farther
        else:
            begin, end, unwanted = start, stop, 0
            firsts.append(k)
            ends.append(end)
    number = np.full(len(starts), -1, np.int64)
    number[order] = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(order)]))
    return Requests(starts[order[firsts]], np.array(ends, np.int64), number)


def split(start: int, stop: int, part: int) -> list[tuple[int, int]]:
    return [(at, min(at + part, stop)) for at in range(start, stop, part)]


def member_requests(rows: Rows, *, gap: int, longest: int) -> Requests:
    """Return the requests for the archive members of samples, in ascending order of offset.

    Members with at most `gap` bytes between them, or only headers, are merged into one request. So a completely wanted
    archive is read by requests of about `longest` bytes that end with a member.
    """
    starts = rows.offset - max(gap, _HEADERS_BYTES)
    stops = rows.offset + -(-rows.size // _TAR_BLOCK) * _TAR_BLOCK
    is_first = np.ones(len(starts), np.bool_)
    is_first[1:] = starts[1:] > np.maximum.accumulate(stops)[:-1]
    boundaries: list[int] = []
    for begin, end in pairwise([*np.flatnonzero(is_first).tolist(), len(starts)]):
        at = begin
        while at < end:
            boundaries.append(at)
            at = max(at + 1, min(end, int(np.searchsorted(stops, rows.offset[at] + longest, side="right"))))
    runs = np.array([*boundaries, len(starts)])
    first, last = runs[:-1], runs[1:] - 1
    begins, ends = rows.offset[first], rows.offset[last] + rows.size[last]
    if len(first):
        ends = np.where(np.add.reduceat(rows.size, first) > 0, ends, begins)  # headers alone need no request
    has_bytes = ends > begins
    number = np.repeat(np.where(has_bytes, np.cumsum(has_bytes) - 1, -1), np.diff(runs))
    return Requests(begins[has_bytes], ends[has_bytes], number)
