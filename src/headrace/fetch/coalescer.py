"""Reads as requests: adjacent reads are merged, long reads are split."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from headrace.errors import ObjectChangedError, StorageError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.range_request import RangeRequest, room_for
from headrace.fetch.ranges import UNWANTED_SHARE, coalesce, split
from headrace.options import FetchOptions
from headrace.protocols import Span
from headrace.running import Charges

_PARTS_AT_ONCE = 4
_LONG_PART = 4  # times `range_bytes`; with shorter parts of a very long object most time would be spent on first bytes


class Coalescer:
    """Merges and splits reads of any length into requests of an efficient length.

    Adjacent ranges of one object that are requested in the same turn of the event loop are merged into one request, and
    share its error. The request is cancelled when all its readers are. A single range is requested in its caller's
    task, one turn later. A read longer than two `range_bytes` is split into several requests, all of one version of the
    object.
    """

    def __init__(self, fetch: Callable[[RangeRequest], Awaitable[None]], options: FetchOptions, meter: Meter) -> None:
        self._fetch, self._options, self._meter = fetch, options, meter
        self._asked: dict[tuple[str, str | None], list[_WantedRange]] = {}

    async def read(
        self,
        url: str,
        start: int | None,
        stop: int | None,
        charge: Charges | None = None,
        etag: str | None = None,
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
        starts, stops, number = coalesce(
            np.array([wanted.start for wanted in turn]),
            np.array([wanted.stop for wanted in turn]),
            gap=self._options.gap_bytes,
            waste=UNWANTED_SHARE,
            longest=self._options.range_bytes,
        )
        by_request: dict[int, list[_WantedRange]] = {}
        for wanted, k in zip(turn, number.tolist(), strict=True):
            by_request.setdefault(k, []).append(wanted)
        for k, sharers in by_request.items():
            if len(sharers) > 1:
                request = RangeRequest(url, int(starts[k]), int(stops[k]), etag=etag)
                shared = _SharedRead(request, asyncio.create_task(self._fetch_data(request)), len(sharers))
                for wanted in sharers:
                    wanted.shared = shared
                self._meter.coalesced += len(sharers) - 1

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
        await _paid(request.charge, len(first))  # if the answer did not report its length
        size = request.size if stop is not None else request.span().size
        end = min(end for end in (stop, size) if end is not None)
        if request.position >= end:
            return first, request
        await _paid(charge, end - request.position)
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
                request = RangeRequest(first.url, begin, end, target=room[start:stop], etag=first.etag, told=first.told)
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
        await _paid(charge, len(part))
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
    about = type(error)(
        error.reason,
        url=url,
        start=start,
        stop=stop,
        attempts=error.attempts,
        status=error.status,
        retry_after_s=error.retry_after_s,
    )
    about.__cause__ = error.__cause__
    return about


async def _paid(charge: Charges | None, nbytes: int) -> None:
    admitted = None if charge is None else charge(nbytes)
    if admitted is not None:
        await admitted
