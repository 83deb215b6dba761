"""Which requests get the wanted byte ranges of one object: pure functions."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headrace.rows import Rows
from headrace.types import Ints

UNWANTED_SHARE = 0.25
"""Of a request at most, where ranges are asked for together."""

_TAR_BLOCK = 512
_HEADERS_BYTES = 4 * _TAR_BLOCK  # of a member, with the extended ones that most writers know


class Requests(NamedTuple):
    """Requests that get wanted ranges of one object.

    Attributes:
        starts, stops: the bytes of each request, in ascending order.
        number: for each wanted range the number of the one request that gets all of it; -1 where none is needed.
    """

    starts: Ints
    stops: Ints
    number: Ints


def coalesce(starts: Ints, stops: Ints, *, gap: int, waste: float, longest: int) -> Requests:
    """The requests to make for the wanted ranges [starts, stops), given in any order; they may overlap.

    A wanted range joins the request before it while no bound is broken. It is never cut: its bytes are of one answer,
    and so of one version of the object. A million ranges take about 0.6 seconds.

    Args:
        gap: how many unwanted bytes cost no more than another request does; latency times bandwidth, at most.
        waste: the share of a request, at most, that is bytes which nobody wants.
        longest: bytes of a request, at most; only a single wanted range makes it longer.
    """
    order = np.lexsort((-stops, starts))  # the longer one first, so that what it holds joins it
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
    """The range [start, stop) in parts of `part` bytes; the last one may be shorter."""
    return [(at, min(at + part, stop)) for at in range(start, stop, part)]


def member_requests(rows: Rows, *, gap: int, longest: int) -> Requests:
    """The requests to make for the members of an archive's samples, which lie in ascending order.

    Members between which no more than `gap` bytes lie, headers or what nobody wants, come by one request: another one
    would cost more. So what is wanted completely is read like a stream, by requests of about `longest` bytes that end
    with a member.

    Args:
        gap: see `coalesce`.
        longest: see `coalesce`.
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
        ends = np.where(np.add.reduceat(rows.size, first) > 0, ends, begins)  # headers alone are not worth a request
    has_bytes = ends > begins
    number = np.repeat(np.where(has_bytes, np.cumsum(has_bytes) - 1, -1), np.diff(runs))
    return Requests(begins[has_bytes], ends[has_bytes], number)
