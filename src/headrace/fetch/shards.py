"""Samples of shards: ranges are read ahead, workers find the samples in them where no index tells, order is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from headrace.errors import not_as_indexed
from headrace.fetch.members import Bounds, MemberReads, Members, PackedError
from headrace.fetch.shard_ranges import ShardRanges
from headrace.fetch.unpack import UNPACKED_MOST, Unpacks, unpacked
from headrace.memory import Lease
from headrace.tasks import Failure, Flow, ListPart, Part, RawPart
from headrace.types import Ints, Reads, Rows, Version

SHARDS_AT_ONCE = 8
SHARDS_AT_FIRST = 2  # until one size is known: what is read of the next shards is missing at the first
_BLOCK = 512


class Scanner(Protocol):
    """Finds samples in successive buffers of a shard; see `headrace.formats.tar.scanner.TarScanner`."""

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


class Expected(NamedTuple):
    """What is known of a shard whose samples must be looked for: its version, and how many samples it has."""

    version: Version
    samples: int


class ShardSource:
    """Gives the samples of shards, in the order of the shards.

    Args:
        urls: the shards, in the order of the plan.
        reader: reads their bytes.
        scanner: makes a scanner for a shard.
        unpacks: makes a decompressor for a shard; None where it is not compressed.
        members: gives the samples of the shard with this number in `urls`; None: they must be looked for.
        expected: what an index says of that shard otherwise; None: there is none.
        bounds: what requests for members may get.
        chosen: called, for a shard whose samples are known, with the bytes that are read of it, and its size.
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
        unpacks: Callable[[str], Unpacks | None],
        *,
        members: Callable[[int], Awaitable[Members]] | None,
        expected: Callable[[int], Awaitable[Expected]] | None,
        bounds: Bounds,
        chosen: Callable[[int, int], None],
        range_bytes: int,
        window: Window | None,
        take: int | None,
        pack_error: Callable[[BaseException], bytes],
    ) -> None:
        self._urls, self._reader, self._scanner, self._unpacks = urls, reader, scanner, unpacks
        self._members, self._expected, self._bounds, self._chosen = members, expected, bounds, chosen
        self._range_bytes, self._window, self._take = range_bytes, window, take
        self._pack_error = pack_error
        self._next_address = 0
        self._largest = 0  # bytes of the largest shard seen
        self._position = 0
        self._windows = 0
        self._pending: list[RawPart] = []

    async def run(self, flow: Flow) -> None:
        if self._take == 0:
            return
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
            while todo and len(ahead) < (SHARDS_AT_ONCE if self._largest or self._members else SHARDS_AT_FIRST):
                ordinal, url = todo.popleft()
                send, receive = anyio.create_memory_object_stream[Part](float("inf"))
                ahead.append(receive)
                group.start_soon(self._read_shard, flow, ordinal, url, send)
            async for part in ahead[0]:
                yield part
            ahead.popleft().close()

    async def _read_shard(self, flow: Flow, ordinal: int, url: str, send: MemoryObjectSendStream[Part]) -> None:
        """Send the samples of a shard; what ends them early is sent in the place of the next one."""
        failure: Failure | None = None
        async with send:
            group = anyio.create_task_group()
            ranges: ShardRanges | None = None
            try:
                async with group:
                    members = None if self._members is None else await self._members(ordinal)
                    expected = None if self._expected is None else await self._expected(ordinal)
                    version = members.version if members else expected.version if expected else None
                    unpacks = self._unpacks(url)
                    ranges = ShardRanges(
                        self._reader, flow, group, ordinal, url, version, are_packed=unpacks is not None
                    )
                    if members is not None:
                        await self._send_members(flow, ranges, ordinal, url, members, send)
                    else:
                        failure = await self._scan_shard(flow, ranges, ordinal, url, unpacks, expected, send)
                    group.cancel_scope.cancel()
            except Exception as error:
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                failure = first.failure if isinstance(first, PackedError) else Failure(self._pack_error(first))
            finally:
                if ranges is not None:
                    ranges.release()  # not before the last read has ended: it would write into what is others' by then
            if failure is not None:
                send.send_nowait(ListPart([failure]))

    async def _send_members(
        self,
        flow: Flow,
        ranges: ShardRanges,
        ordinal: int,
        url: str,
        members: Members,
        send: MemoryObjectSendStream[Part],
    ) -> None:
        reads = MemberReads(flow, ranges, url, ordinal, members, self._bounds, self._pack_error)
        self._chosen(reads.nbytes, members.size)
        end = int((members.rows.offset + members.rows.size).max(initial=0))
        async with aclosing(reads.parts(self._address(end))) as parts:
            async for part in parts:
                send.send_nowait(part)

    async def _scan_shard(
        self,
        flow: Flow,
        ranges: ShardRanges,
        ordinal: int,
        url: str,
        unpacks: Unpacks | None,
        expected: Expected | None,
        send: MemoryObjectSendStream[Part],
    ) -> Failure | None:
        scanner: Any = self._scanner(url)
        base, count, spans = 0, 0, dict[int, Lease]()
        buffers = ranges.all(partial(self.range_bytes, ordinal))
        if unpacks is not None:
            buffers = unpacked(buffers, unpacks, flow, self._range_bytes, ordinal)
        try:
            async with aclosing(buffers) as each:
                async for offset, lease, is_last in each:
                    if offset == 0:
                        self._largest = max(self._largest, ranges.size)
                        base = self._address(UNPACKED_MOST if unpacks is not None else ranges.size)
                    spans[offset] = lease
                    rows, scanner = await flow.scan(scanner, lease, offset, is_last, ordinal)
                    if isinstance(scanner, Failure):
                        return scanner
                    if len(rows):
                        leased = [(base + start, held.retain()) for start, held in sorted(spans.items())]
                        send.send_nowait(RawPart(rows.shifted(base), np.zeros(len(rows), np.int64), (url,), leased))
                    count += len(rows)
                    if (scanner.done or scanner.error is not None) and unpacks is None:
                        break  # what follows in a compressed one is read: its checksums lie there
                    for start in [start for start, held in spans.items() if start + held.size <= scanner.low]:
                        spans.pop(start).release()
            if scanner.error is not None:
                return Failure(self._pack_error(scanner.error))
            if expected is not None and count != expected.samples:
                raise not_as_indexed(url, f"it had {expected.samples} samples then, and has {count}")
            return None
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
            total = np.cumsum(part.sizes())
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
