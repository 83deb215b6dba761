"""Reads the ranges of one shard in order, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

from anyio.abc import TaskGroup

from headrace._util.reads import Reads, ReportedVersion, Span, Version
from headrace._util.shared_memory import Lease
from headrace.errors import ObjectChangedError, not_as_known, not_as_listed
from headrace.fetch.web.connection import Rest
from headrace.readers.protocol import Flow
from headrace.types import Buffer


class ShardRanges:
    """Reads ranges of one shard into leases. The first range determines `size`.

    Args:
        ordinal: Number of the shard in the order of the epoch. Earlier shards get memory first.
        are_packed: True for compressed ranges, which are useless until memory for their content is admitted.
    """

    def __init__(
        self,
        reader: Reads,
        flow: Flow,
        group: TaskGroup,
        ordinal: int,
        url: str,
        version: Version | None = None,
        *,
        are_packed: bool = False,
    ) -> None:
        self._reader, self._flow, self._group = reader, flow, group
        self._ordinal, self._url, self._are_packed = ordinal, url, are_packed
        self._version = version or Version()
        self._etag = self._version.etag
        self._reported: ReportedVersion | None = None  # version in the first response
        self.size = 0
        self._got: dict[int, Lease | BaseException] = {}
        self._arrived = asyncio.Event()
        self._leased: set[Lease] = set()
        self._rest: Rest | None = None
        self._in_order = False  # the server sends the whole object for each range

    async def all(self, length: Callable[[int], int]) -> AsyncGenerator[tuple[int, Lease, bool], None]:
        """Yield (offset, bytes, True if the last) of consecutive ranges, to the shard's end."""
        self._rest = Rest()
        first = await self._lease(0, length(0))
        self.size = (await self._read(0, first)).size
        self._group.start_soon(self._request, self._after(first.size, length))
        offset, lease = 0, first
        while True:
            self._leased.discard(lease)
            stop = offset + lease.size
            yield offset, lease, stop >= self.size
            if stop >= self.size:
                return
            offset, lease = stop, await self._next(stop)

    async def some(self, ranges: Sequence[tuple[int, int]]) -> AsyncGenerator[tuple[int, Lease], None]:
        self._group.start_soon(self._request, ranges)
        for offset, size in ranges:
            lease = await self._next(offset)
            self._leased.discard(lease)
            if lease.size < size:
                self._flow.drop(lease)
                raise self._another(f"bytes {offset} to {offset + size} are wanted, {lease.size} of them are there")
            yield offset, lease

    async def again(self, offset: int, lease: Lease) -> None:
        """Repeat the read of a range with wrong bytes, without the cache."""
        wrong, stop = bytes(lease.view), offset + lease.size
        checks = 0

        def are_others(data: Buffer) -> bool:
            nonlocal checks
            checks += 1
            return checks > 1 or data != wrong

        data = await self._reader.read(self._url, offset, stop, check=are_others, version=self._version)
        if len(data) < lease.size:
            raise self._another(f"bytes {offset} to {stop} are wanted, {len(data)} of them are there")
        lease.view[:] = data

    def release(self) -> None:
        if self._rest is not None:
            self._rest.release()
        for lease in self._leased:
            self._flow.drop(lease)
        self._leased.clear()

    def _after(self, offset: int, length: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        while offset < self.size:
            size = min(length(offset), self.size - offset)
            yield offset, size
            offset += size

    async def _next(self, offset: int) -> Lease:
        while offset not in self._got:
            self._arrived = asyncio.Event()
            await self._arrived.wait()
        got = self._got.pop(offset)
        if isinstance(got, BaseException):
            raise got
        return got

    async def _request(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request ranges in order, as memory is admitted."""
        for offset, size in ranges:
            lease = await self._lease(offset, size)
            if self._in_order:
                if not await self._fetch(offset, lease):
                    return
            else:
                self._group.start_soon(self._fetch, offset, lease)

    async def _fetch(self, offset: int, lease: Lease) -> bool:
        """Read a range into `_got`. False if that failed."""
        try:
            await self._read(offset, lease)
            got: Lease | Exception = lease
        except Exception as error:
            got = error
        self._got[offset] = got
        self._arrived.set()
        if self._are_packed:
            asyncio.get_running_loop().call_soon(self._flow.loaded, lease)  # after the consumer has resumed
        return got is lease

    async def _lease(self, offset: int, size: int) -> Lease:
        lease = await self._flow.lease(size, (self._ordinal, offset))
        self._leased.add(lease)
        return lease

    async def _read(self, offset: int, lease: Lease) -> Span:
        try:
            span = await self._reader.read_into(self._url, offset, lease.view, etag=self._etag, rest=self._rest)
        except ObjectChangedError as error:
            if self._etag != self._version.etag or self._version.known_by == "indexed":
                raise
            raise not_as_listed(self._url, error.reason) from error
        self._in_order = self._in_order or span.in_order
        if self._version.size not in (None, span.size):
            raise self._another(f"it had {self._version.size} bytes then, and has {span.size}")
        if span.reported is not None and self._reported is not None:
            self._reported.check(span.reported, self._url)
        self._reported = self._reported or span.reported
        self._etag = self._etag or span.etag
        if span.etag not in (None, self._etag):  # both were requested before either version was known
            raise ObjectChangedError(f"the object changed: its ETag was {self._etag}, now {span.etag}", url=self._url)
        self._flow.trim(lease, span.stop - span.start)
        return span

    def _another(self, why: str) -> ObjectChangedError:
        return not_as_known(self._url, why, self._version.known_by)
