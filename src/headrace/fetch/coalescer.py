"""Merges and splits reads of byte ranges into requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headrace._util.context import Charges
from headrace._util.reads import Ranges, Span
from headrace._util.sample_ranges import Rows
from headrace.errors import ObjectChangedError, StorageError
from headrace.fetch.meter import UNWANTED_SHARE, Meter
from headrace.fetch.range_request import RangeRequest, room_for
from headrace.options import Fetch
from headrace.types import Ints

_TAR_BLOCK = 512
_HEADERS_BYTES = 4 * _TAR_BLOCK  # headers of a member, with the extended headers of most writers


class Requests(NamedTuple):
    """Requests in ascending order, and for each wanted range its request (-1 if it is empty)."""

    starts: Ints
    stops: Ints
    number: Ints


def coalesce(ranges: Ranges, *, gap: int, waste: float = 1.0, longest: float = math.inf) -> list[list[int]]:
    """Group ranges, in any order, that one request reads. They may overlap. Returns their indices, by ascending start.

    A range joins the previous request if all bounds hold. It is never split: its bytes come from one answer, and so
    from one version of the object.

    Args:
        gap: Unwanted bytes that cost no more than another request: at most latency times bandwidth.
        waste: Maximum share of unwanted bytes in a request.
        longest: Maximum bytes of a request. Only a single range may exceed it.
    """
    groups: list[list[int]] = []
    begin = end = unwanted = 0
    for k in sorted(range(len(ranges)), key=lambda k: (ranges[k][0], -ranges[k][1])):
        start, stop = ranges[k]
        hole, farther = max(0, start - end), max(end, stop)
        length = farther - begin
        fits = length <= longest or farther == end
        if groups and fits and hole <= gap and unwanted + hole <= waste * length:
            groups[-1].append(k)
            end, unwanted = farther, unwanted + hole
        else:
            groups.append([k])
            begin, end, unwanted = start, stop, 0
    return groups


def span_of(ranges: Ranges, group: Sequence[int]) -> tuple[int, int]:
    """Return start and stop of a request for a group of ranges."""
    return ranges[group[0]][0], max(ranges[k][1] for k in group)


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


_PARTS_AT_ONCE = 4
_LONG_PART = 4  # times `range_bytes`; with shorter parts of a very long object most time would be spent on first bytes


class Coalescer:
    """Merges and splits reads of any length into requests of an efficient length.

    Adjacent ranges of one object that are requested in the same turn of the event loop are merged into one request, and
    share its error. The request is cancelled when all its readers are. A single range is requested in its caller's
    task, one turn later. A read longer than two `range_bytes` is split into several requests, all of one version of the
    object.
    """

    def __init__(self, fetch: Callable[[RangeRequest], Awaitable[None]], options: Fetch, meter: Meter) -> None:
        self._fetch, self._options, self._meter = fetch, options, meter
        self._asked: dict[tuple[str, str | None], list[_WantedRange]] = {}

    async def read(
        self, url: str, start: int | None, stop: int | None, charge: Charges | None = None, etag: str | None = None
    ) -> tuple[bytes, Span | None]:
        """Return bytes [start, stop) of the object, and their span if the object's size is known.

        Args:
            charge: Called and awaited with the number of bytes, before memory is allocated for this range.

        Raises:
            StorageError: the read failed after all attempts. The error names this range, even if the request was
                merged.
        """
        begin = start or 0
        try:
            if stop is not None and stop - begin <= self._options.range_bytes:
                data, request = await self._read_with_others(url, begin, stop, charge, etag)
            else:
                data, request = await self._read_long(url, begin, stop, charge, etag)
        except (StorageError, ExceptionGroup) as error:
            raise _about(error, url, start, stop)  # noqa: B904 - the cause is set
        if request.size is None:
            return data, None
        begin = min(begin, request.size)
        return data, Span(begin, begin + len(data), request.size, request.etag)

    async def _read_with_others(
        self, url: str, start: int, stop: int, charge: Charges | None, etag: str | None
    ) -> tuple[bytes, RangeRequest]:
        wanted, version = _WantedRange(start, stop), (url, etag)
        turn = self._asked.setdefault(version, [])
        turn.append(wanted)
        try:
            await asyncio.sleep(0)  # collect the other ranges of this turn
        except asyncio.CancelledError:
            if wanted.shared is not None:
                await wanted.shared.leave()
            elif self._asked.get(version) is turn:
                turn.remove(wanted)
            raise
        if self._asked.get(version) is turn:
            del self._asked[version]
            if len(turn) > 1:
                self._share(url, etag, turn)
        if wanted.shared is not None:
            return await wanted.shared.read(start, stop, charge)
        request = RangeRequest(url, start, stop, etag=etag, charge=charge)
        await self._fetch(request)
        return request.result(), request

    def _share(self, url: str, etag: str | None, turn: list[_WantedRange]) -> None:
        ranges = [(wanted.start, wanted.stop) for wanted in turn]
        gap, longest = self._options.gap_bytes, self._options.range_bytes
        for group in coalesce(ranges, gap=gap, waste=UNWANTED_SHARE, longest=longest):
            if len(group) > 1:
                request = RangeRequest(url, *span_of(ranges, group), etag=etag)
                shared = _SharedRead(request, asyncio.create_task(self._fetch_data(request)), len(group))
                for k in group:
                    turn[k].shared = shared
                self._meter.coalesced += len(group) - 1

    async def _read_long(
        self, url: str, start: int, stop: int | None, charge: Charges | None, etag: str | None
    ) -> tuple[bytes, RangeRequest]:
        most = start + 2 * self._options.range_bytes
        if stop is None and not start:
            request = RangeRequest(url, None, None, etag=etag, charge=charge, most=most)
        else:
            request = RangeRequest(url, start, most if stop is None else min(stop, most), etag=etag, charge=charge)
        await self._fetch(request)
        first = request.result()
        await paid(request.charge, len(first))  # if the answer did not report its length
        size = request.size if stop is not None else request.span().size
        end = min(end for end in (stop, size) if end is not None)
        if request.position >= end:
            return first, request
        await paid(charge, end - request.position)
        whole = room_for(end - start, url)
        whole.write(first)
        with whole.getbuffer() as room:
            await self._fill_rest(request, room[len(first) :])
        return whole.getvalue(), request

    async def _fill_rest(self, first: RangeRequest, room: memoryview) -> None:
        part, quarter = self._options.range_bytes, -(-len(room) // _PARTS_AT_ONCE)
        todo = iter(split(0, len(room), min(max(part, quarter), _LONG_PART * part)))

        async def fill_parts() -> None:
            for start, stop in todo:
                begin, end = first.position + start, first.position + stop
                request = RangeRequest(
                    first.url, begin, end, target=room[start:stop], etag=first.etag, reported=first.reported
                )
                await self._fetch(request)
                if request.size != first.size:
                    reason = f"the object changed: its size was {first.size}, now {request.size}"
                    raise ObjectChangedError(reason, url=first.url)

        async with asyncio.TaskGroup() as group:
            for _ in range(_PARTS_AT_ONCE):
                group.create_task(fill_parts())

    async def _fetch_data(self, request: RangeRequest) -> bytes:
        await self._fetch(request)
        return request.result()


class _WantedRange:
    """A range requested in this turn. `shared` is set if its request was merged with others."""

    __slots__ = ("shared", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.shared: _SharedRead | None = None


class _SharedRead:
    __slots__ = ("_request", "_task", "_waiting")

    def __init__(self, request: RangeRequest, task: asyncio.Task[bytes], waiting: int) -> None:
        self._request, self._task, self._waiting = request, task, waiting

    async def read(self, start: int, stop: int, charge: Charges | None) -> tuple[bytes, RangeRequest]:
        try:
            data = await asyncio.shield(self._task)
        except asyncio.CancelledError:
            await self.leave()
            raise
        first = self._request.start or 0
        part = memoryview(data)[start - first : stop - first]
        await paid(charge, len(part))
        return bytes(part), self._request

    async def leave(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._task.cancel()
            await asyncio.wait([self._task])


def _about(error: Exception, url: str, start: int | None, stop: int | None) -> Exception:
    if isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, StorageError):
        return error
    about = error.about(url, start, stop, error.attempts)
    about.__cause__ = error.__cause__
    return about


async def paid(charge: Charges | None, nbytes: int) -> None:
    admitted = None if charge is None else charge(nbytes)
    if admitted is not None:
        await admitted
