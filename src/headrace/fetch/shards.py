"""Samples of shards that have no index: ranges are read ahead, workers find the samples in them, order is kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import numpy as np
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from headrace.memory import Lease
from headrace.tasks import Failure, Flow, ListPart, Part, RawPart
from headrace.types import Ints, Reads, Rows, Span

SHARDS_AT_ONCE = 8
SHARDS_AT_FIRST = 2  # until one size is known: what is read of the next shards is missing at the first
_BLOCK = 512


class Scanner(Protocol):
    """Finds samples in successive buffers of a shard; see `headrace.formats.tar.TarScanner`."""

    @property
    def error(self) -> Exception | None: ...

    @property
    def done(self) -> bool: ...

    @property
    def low(self) -> int: ...

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive samples that are put in another order among themselves; their number depends on the data alone.

    Attributes:
        samples, nbytes: a window ends with the sample that reaches either.
        order: (how many samples, the window's number) to the order in which they are used.
    """

    samples: int
    nbytes: int
    order: Callable[[int, int], Ints]


class ShardSource:
    """Gives the samples of shards, in the order of the shards.

    Args:
        urls: the shards, in the order of the plan.
        reader: reads their bytes.
        scanner: makes a scanner for a shard.
        range_bytes: bytes of one request.
        window: how samples are shuffled.
        take: how many samples to give at most.
        pack_error: an exception as bytes.
    """

    def __init__(
        self,
        urls: Sequence[str],
        reader: Reads,
        scanner: Callable[[str], Scanner],
        *,
        range_bytes: int,
        window: Window | None,
        take: int | None,
        pack_error: Callable[[BaseException], bytes],
    ) -> None:
        self._urls, self._reader, self._scanner = urls, reader, scanner
        self._range_bytes, self._window, self._take = range_bytes, window, take
        self._pack_error = pack_error
        self._next_address = 0
        self._largest = 0  # bytes of the largest shard seen
        self._position = 0
        self._windows = 0
        self._pending: list[RawPart] = []

    async def run(self, flow: Flow) -> None:
        ahead: deque[MemoryObjectReceiveStream[Part]] = deque()
        try:
            async with anyio.create_task_group() as group, aclosing(self._in_order(flow, group, ahead)) as parts:
                async for part in parts:
                    self._give(flow, part)
                    if self._take is not None and self._position >= self._take:
                        group.cancel_scope.cancel()
                        return
            self._flush(flow)
        finally:
            for part in self._pending:
                part.release()
            for receive in ahead:  # nobody sends any more
                while receive.statistics().current_buffer_used:
                    receive.receive_nowait().release()
                receive.close()

    async def _in_order(
        self, flow: Flow, group: TaskGroup, ahead: deque[MemoryObjectReceiveStream[Part]]
    ) -> AsyncGenerator[Part, None]:
        """The parts of all shards, in order; some shards ahead are read already."""
        todo = deque(enumerate(self._urls))
        while todo or ahead:
            while todo and len(ahead) < (SHARDS_AT_ONCE if self._largest else SHARDS_AT_FIRST):
                ordinal, url = todo.popleft()
                send, receive = anyio.create_memory_object_stream[Part](float("inf"))
                ahead.append(receive)
                group.start_soon(self._read_shard, flow, ordinal, url, send)
            async for part in ahead[0]:
                yield part
            ahead.popleft().close()

    async def _read_shard(self, flow: Flow, ordinal: int, url: str, send: MemoryObjectSendStream[Part]) -> None:
        async with send:
            group = anyio.create_task_group()
            ranges = _Ranges(self, flow, group, ordinal, url)
            try:
                async with group:
                    await self._scan_shard(flow, ranges, ordinal, url, send)
                    group.cancel_scope.cancel()
            except Exception as error:
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                send.send_nowait(ListPart([Failure(self._pack_error(first))]))
            finally:
                ranges.release()  # not before the last read has ended: it would write into what is others' by then

    async def _scan_shard(
        self, flow: Flow, ranges: _Ranges, ordinal: int, url: str, send: MemoryObjectSendStream[Part]
    ) -> None:
        scanner: Any = self._scanner(url)
        base, spans = 0, dict[int, Lease]()
        try:
            async with aclosing(ranges.read()) as each:
                async for offset, lease, is_last in each:
                    if offset == 0:
                        base = self._address(ranges.size)
                    spans[offset] = lease
                    rows, scanner = await flow.scan(scanner, lease, offset, is_last, ordinal)
                    if isinstance(scanner, Failure):
                        send.send_nowait(ListPart([scanner]))
                        return
                    if len(rows):
                        leased = [(base + start, held.retain()) for start, held in sorted(spans.items())]
                        send.send_nowait(RawPart(rows.shifted(base), np.zeros(len(rows), np.int64), (url,), leased))
                    if scanner.error is not None:
                        send.send_nowait(ListPart([Failure(self._pack_error(scanner.error))]))
                    if scanner.done or scanner.error is not None:
                        return
                    for start in [start for start, held in spans.items() if start + held.size <= scanner.low]:
                        spans.pop(start).release()
        finally:
            for held in spans.values():
                held.release()

    def range_bytes(self, ordinal: int, offset: int) -> int:
        """How much to ask a shard for at `offset`.

        The epoch's first requests are small, so that its first samples come soon; and a shard whose size is not known
        yet is asked for no more than the largest one so far had.
        """
        size = self._range_bytes
        if ordinal == 0 and offset < size:
            size = max(size // 4, offset)
        if offset == 0 and self._largest:
            size = min(size, self._largest)
        return -(-size // _BLOCK) * _BLOCK

    def _address(self, size: int) -> int:
        """A place for a shard in the epoch's address space."""
        self._largest = max(self._largest, size)
        address = self._next_address
        self._next_address += size
        return address

    def _give(self, flow: Flow, part: Part) -> None:
        if self._window is None:
            self._put(flow, part)
        elif isinstance(part, RawPart):
            self._pending.append(part)
            self._shuffle(flow, self._window)
        else:
            self._flush(flow)
            self._put(flow, part)

    def _shuffle(self, flow: Flow, window: Window) -> None:
        """Put every window that is complete."""
        self._pending = [RawPart.concat(self._pending)]
        while True:
            (part,) = self._pending
            total = np.cumsum(part.rows.sizes())
            end = min(window.samples, int(np.searchsorted(total, window.nbytes)) + 1)
            if end > part.count:
                return
            self._pending = [part.cut(end, part.count)]
            self._put_window(flow, window, part, end)

    def _flush(self, flow: Flow) -> None:
        pending, self._pending = self._pending, []
        if self._window is not None and pending:
            part = RawPart.concat(pending)
            self._put_window(flow, self._window, part, part.count)

    def _put_window(self, flow: Flow, window: Window, part: RawPart, count: int) -> None:
        order = window.order(count, self._windows)
        self._windows += 1
        shuffled = part.take(order)
        part.release()
        self._put(flow, shuffled)

    def _put(self, flow: Flow, part: Part) -> None:
        if self._take is not None and self._position + part.count > self._take:
            kept = part.cut(0, max(0, self._take - self._position))
            part.release()
            part = kept
        start, self._position = self._position, self._position + part.count
        flow.put(start, part)


class _Ranges:
    """The ranges of one shard, in order, with some of the next ones under way."""

    def __init__(self, source: ShardSource, flow: Flow, group: TaskGroup, ordinal: int, url: str) -> None:
        self._source, self._flow, self._group = source, flow, group
        self._ordinal, self._url = ordinal, url
        self._etag: str | None = None
        self.size = 0
        self._got: dict[int, Lease | BaseException] = {}
        self._arrived = asyncio.Event()
        self._leased: set[Lease] = set()

    async def read(self) -> AsyncGenerator[tuple[int, Lease, bool], None]:
        """(offset, the bytes, whether they are the last) of each range."""
        first = await self._lease(0, self._source.range_bytes(self._ordinal, 0))
        span = await self._read(0, first)
        self.size, self._etag = span.size, span.etag
        self._group.start_soon(self._request_rest, span.stop)
        offset, lease = 0, first
        while True:
            self._leased.discard(lease)
            stop = offset + lease.size
            yield offset, lease, stop >= self.size
            if stop >= self.size:
                return
            offset = stop
            while offset not in self._got:
                self._arrived = asyncio.Event()
                await self._arrived.wait()
            got = self._got.pop(offset)
            if isinstance(got, BaseException):
                raise got
            lease = got

    def release(self) -> None:
        """Let go of what was read and not used."""
        for lease in self._leased:
            self._flow.drop(lease)
        self._leased.clear()

    async def _request_rest(self, offset: int) -> None:
        """Ask for the other ranges, in order, as fast as there is room for them."""
        while offset < self.size:
            size = min(self._source.range_bytes(self._ordinal, offset), self.size - offset)
            lease = await self._lease(offset, size)
            self._group.start_soon(self._fetch, offset, lease)
            offset += size

    async def _fetch(self, offset: int, lease: Lease) -> None:
        try:
            await self._read(offset, lease)
            self._got[offset] = lease
        except Exception as error:
            self._got[offset] = error
        self._arrived.set()

    async def _lease(self, offset: int, size: int) -> Lease:
        lease = await self._flow.lease(size, (self._ordinal, offset))
        self._leased.add(lease)
        return lease

    async def _read(self, offset: int, lease: Lease) -> Span:
        span = await self._source._reader.read_into(self._url, offset, lease.view, etag=self._etag)
        self._flow.trim(lease, span.stop - span.start)
        return span
