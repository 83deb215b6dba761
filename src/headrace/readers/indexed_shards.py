"""Reads chosen samples of indexed shards, window by window, and checks each member."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from headrace._util.reads import Reads, Version, crc32c_of
from headrace._util.sample_ranges import BlockNumbers, Rows
from headrace._util.shared_memory import Lease
from headrace.errors import ChecksumError, StorageError, masked, not_as_indexed
from headrace.fetch.coalescer import Requests, member_requests
from headrace.formats.tar.member_check import MemberNames, misplaced
from headrace.readers.protocol import Flow
from headrace.readers.shard_ranges import ShardRanges
from headrace.types import Ints
from headrace.workers.failures import ErrorPacker, Failure, first_of
from headrace.workers.sample_chunks import ListPart, Part, RawPart


class Members(NamedTuple):
    """The samples to read from a shard.

    Attributes:
        rows: Their byte ranges, in the order of the shard.
        crc: CRC-32C of each member. None: not known.
        size: Bytes of the shard.
        has_headers: True if tar headers before the members contain the keys and fields as names.
    """

    rows: Rows
    crc: NDArray[np.uint32] | None
    size: int
    version: Version
    has_headers: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one request, see `member_requests`."""

    gap: int
    longest: int


class Checker:
    """Compares members of a range with checksums and headers, in a worker.

    Attributes:
        wrong: Numbers of members that differ, with the reason from their headers. None if the bytes differ.
    """

    def __init__(self, url: str, members: Members, chosen: Ints) -> None:
        self.url = url
        self.wrong: dict[int, str | None] = {}
        rows, crc = members.rows, members.crc
        names = MemberNames.of(rows, chosen) if members.has_headers else None
        checks = None if crc is None else crc[chosen], names
        self._todo: tuple[Any, ...] = (rows.offset[chosen], rows.size[chosen], *checks)

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows:
        """Check the members in `buffer`, the part of the shard at `offset`."""
        offsets, sizes, crc, names = self._todo
        self._todo = ()  # this object is sent back
        bodies = offsets - offset
        self.wrong = {} if names is None else dict(misplaced(buffer, names, bodies, sizes))
        if crc is not None:
            places = zip(bodies.tolist(), sizes.tolist(), crc.tolist(), strict=True)
            bad = [k for k, (at, size, wanted) in enumerate(places) if crc32c_of(buffer[at : at + size]) != wanted]
            self.wrong |= dict.fromkeys(bad)
        return Rows.empty()


class MemberReads:
    """Reads the chosen samples of one shard. `numbers` is for blocks that may be read again."""

    def __init__(
        self,
        flow: Flow,
        ranges: ShardRanges,
        url: str,
        ordinal: int,
        members: Members,
        bounds: Bounds,
        pack_error: ErrorPacker,
        numbers: BlockNumbers | None = None,
    ) -> None:
        self._flow, self._ranges, self._url, self._ordinal = flow, ranges, url, ordinal
        self._members, self._pack_error, self._numbers = members, pack_error, numbers
        self._requests: Requests = member_requests(members.rows, gap=bounds.gap, longest=bounds.longest)
        number = self._requests.number
        self._order = np.argsort(number, kind="stable")  # members by request; `_begins` has the first of each request
        self._begins = np.searchsorted(number[self._order], np.arange(len(self._requests.starts) + 1))

    @property
    def nbytes(self) -> int:
        return int((self._requests.stops - self._requests.starts).sum())

    async def parts(self, base: int) -> AsyncGenerator[Part, None]:
        """Yield the samples in order. Offsets in the parts start at `base`."""
        rows, number = self._members.rows, self._requests.number
        starts, sizes = self._requests.starts, self._requests.stops - self._requests.starts
        last = _per_sample(np.maximum, rows, number, -1)
        first = _per_sample(np.minimum, rows, np.where(number < 0, len(starts), number), len(starts))
        last = np.maximum.accumulate(last)  # a sample also waits for earlier ones
        needed = np.minimum.accumulate(first[::-1])[::-1]
        spans: dict[int, Lease] = {}
        bad: dict[int, str | None] = {}
        done = 0
        try:
            done = int(np.searchsorted(last, -1, side="right"))  # members without bytes need no request
            if done:
                yield self._part(0, done, base, [])
            async with aclosing(self._ranges.some(list(zip(starts.tolist(), sizes.tolist(), strict=True)))) as each:
                n = 0
                async for offset, lease in each:
                    spans[offset] = lease
                    bad |= await self._wrong(n, offset, lease)
                    stop = int(np.searchsorted(last, n, side="right"))
                    for part in self._cut(done, stop, bad, base, spans):
                        yield part
                    done, n = stop, n + 1
                    keep = starts[needed[done]] if done < len(rows) and needed[done] < len(starts) else np.inf
                    for start in [start for start in spans if start < keep]:
                        spans.pop(start).release()
        finally:
            for lease in spans.values():
                lease.release()

    async def _wrong(self, n: int, offset: int, lease: Lease) -> dict[int, str | None]:
        """Return the members of a range that still differ from the index after a second read."""
        chosen = self._order[self._begins[n] : self._begins[n + 1]]
        if self._members.crc is None and not (self._members.has_headers and len(chosen) > 1):
            self._flow.loaded(lease)
            return {}
        wrong = await self._compare(chosen, offset, lease)
        if wrong:
            await self._ranges.again(offset, lease)
            wrong = await self._compare(chosen, offset, lease)
        return {int(chosen[k]): said for k, said in wrong.items()}

    async def _compare(self, chosen: Ints, offset: int, lease: Lease) -> dict[int, str | None]:
        _, checked = await self._flow.scan(
            Checker(self._url, self._members, chosen), lease, offset, True, self._ordinal
        )
        if isinstance(checked, Failure):
            raise PackedFailureError(checked)
        wrong: dict[int, str | None] = checked.wrong
        return wrong

    def _cut(self, start: int, stop: int, bad: dict[int, str | None], base: int, spans: dict[int, Lease]) -> list[Part]:
        """Return the samples [start, stop) as parts. Samples with a bad member become errors."""
        rows = self._members.rows
        said = {int(np.searchsorted(rows.starts, m, side="right")) - 1: bad[m] for m in sorted(bad, reverse=True)}
        wrong = sorted(said) if rows.block is None else np.flatnonzero(np.isin(rows.block, list(said))).tolist()
        wrong = [k for k in wrong if start <= k < stop]
        parts: list[Part] = []
        for end in [*wrong, stop]:
            if end > start:
                held = [(base + at, lease.retain()) for at, lease in sorted(spans.items())]
                parts.append(self._part(start, end, base, held))
            if end < stop:
                parts.append(ListPart([Failure(self._pack_error(self._error(end, said.get(end))))]))
            start = end + 1
        return parts

    def _part(self, start: int, stop: int, base: int, spans: list[tuple[int, Lease]]) -> RawPart:
        place = self._url, self._members.version
        rows = self._members.rows.cut(start, stop).as_read(self._numbers, place).shifted(base)
        return RawPart(rows, np.zeros(len(rows), np.int64), (masked(self._url),), spans, (base,))

    def _error(self, sample: int, said: str | None) -> StorageError:
        rows = self._members.rows
        key = rows.keys[sample].decode("utf-8", "surrogateescape")
        if said is not None:
            return not_as_indexed(self._url, said, key)
        block = sample if rows.block is None else int(rows.block[sample])
        members = slice(rows.starts[block], rows.starts[block + 1])
        start, stop = rows.offset[members], rows.offset[members] + rows.size[members]
        error = ChecksumError(
            f"the bytes of sample {key!r} differ from the checksum in its index",
            url=self._url,
            start=int(start.min()),
            stop=int(stop.max()),
            attempts=3,
        )
        error.key = key
        return error


class PackedFailureError(Exception):
    """Carries a failure that is packed already."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


def _per_sample(choose: np.ufunc, rows: Rows, values: Ints, empty: int) -> Ints:
    """Return the lowest or highest value of each sample's members, or `empty` without members."""
    chosen = np.full(len(rows.starts) - 1, empty, np.int64)
    has_members = np.flatnonzero(np.diff(rows.starts))
    if len(has_members):
        chosen[has_members] = choose.reduceat(values, rows.starts[has_members])
    return chosen if rows.block is None else chosen[rows.block]


P = TypeVar("P", bound=Part)


class Reading(Generic[P]):
    """The parts from one reader, as an iterator, and the failure that ended them early."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[P](float("inf"))
        self.failure: Failure | None = None

    def put(self, part: P) -> None:
        self._send.send_nowait(part)

    @contextmanager
    def ended(self, pack_error: ErrorPacker) -> Iterator[None]:
        """End the parts after the block. An error in the block becomes `failure`."""
        try:
            yield
        except Exception as error:
            first = first_of(error)
            self.failure = first.failure if isinstance(first, PackedFailureError) else Failure(pack_error(first))
        finally:
            self._send.close()

    def __aiter__(self) -> Reading[P]:
        return self

    async def __anext__(self) -> P:
        return await self._receive.__anext__()

    def release(self) -> None:
        while self._receive.statistics().current_buffer_used:
            self._receive.receive_nowait().release()
        self._receive.close()
        self._send.close()  # a reader that never ran has not closed it


ReadsInto = Callable[[Reading[P]], Coroutine[object, object, None]]


class ReadingAhead(Generic[P]):
    """Runs readers ahead of the one whose parts are consumed."""

    def __init__(self, readers: Iterator[ReadsInto[P]], at_once: Callable[[], int]) -> None:
        self._readers, self._at_once = readers, at_once
        self._ahead: deque[Reading[P]] = deque()

    async def readings(self, group: TaskGroup) -> AsyncGenerator[Reading[P], None]:
        is_more = True
        while True:
            while is_more and len(self._ahead) < self._at_once():
                reader = next(self._readers, None)
                if reader is None:
                    is_more = False
                    break
                reading = Reading[P]()
                self._ahead.append(reading)
                group.start_soon(reader, reading)
            if not self._ahead:
                return
            yield self._ahead[0]
            self._ahead.popleft().release()

    def release(self) -> None:
        """Release parts read ahead. To be called after all readers have ended."""
        for reading in self._ahead:
            reading.release()


_VISITS_AT_ONCE = 32


class ShardVisit(NamedTuple):
    url: str
    shard: int
    rows: Ints


class ReadWindow(NamedTuple):
    """Samples that are read together and then put in order (None: as read)."""

    start: int
    visits: Sequence[ShardVisit]
    order: Ints | None


class IndexedShardProducer:
    """Emits the samples chosen by a plan, and reads only their bytes.

    A sample that cannot be read becomes a failure in its place.

    Args:
        members: Returns the byte ranges of a shard's samples.
        chosen: Called for each visit with the bytes to read and the shard's size.
        planned_most: Maximum number of samples that are planned ahead, if that takes long: first windows are then
            planned as their predecessors are delivered. None: no limit.
    """

    def __init__(
        self,
        windows: Iterator[ReadWindow],
        reader: Reads,
        members: Callable[[int, Ints], Awaitable[Members]],
        *,
        bounds: Bounds,
        chosen: Callable[[int, int], None],
        pack_error: ErrorPacker,
        planned_most: int | None = None,
    ) -> None:
        self._planned_most = planned_most
        self._windows, self._reader, self._members = windows, reader, members
        self._bounds, self._chosen, self._pack_error = bounds, chosen, pack_error
        self._next_address = 0
        self._numbers = BlockNumbers()  # of blocks that several windows may read

    def mark(self, position: int) -> None:
        return None

    async def run(self, flow: Flow) -> None:
        begun: deque[ReadWindow] = deque()
        held: list[Part] = []
        position = planned = 0
        is_within = False  # True if a visit of the last planned window comes next

        def readers() -> Iterator[ReadsInto[Part]]:
            nonlocal planned, is_within
            ordinal = 0
            for window in self._windows:
                begun.append(window)
                planned += sum(len(visit.rows) for visit in window.visits)
                for left, visit in zip(range(len(window.visits) - 1, -1, -1), window.visits, strict=True):
                    is_within = left > 0
                    yield partial(self._read, flow, ordinal, visit, is_again=window.order is not None)
                    ordinal += 1

        def at_once() -> int:
            most = self._planned_most
            may_plan = most is None or planned - position < min(most, position + 1)
            return _VISITS_AT_ONCE if is_within or may_plan else 1

        ahead = ReadingAhead(readers(), at_once)
        try:
            async with anyio.create_task_group() as group, aclosing(ahead.readings(group)) as readings:
                left = 0
                async for reading in readings:
                    left = (left or len(begun[0].visits)) - 1
                    window = begun[0]
                    visit = window.visits[-1 - left]
                    async for part in _complete(reading, len(visit.rows)):
                        if window.order is None:
                            flow.put(position, part)
                            position += part.count
                        else:
                            held.append(part)
                    if not left:
                        begun.popleft()
                        if window.order is not None:
                            _put_in_order(flow, position, held, window.order)
                            position += len(window.order)
                            held.clear()
                        if self._planned_most is not None:  # wait until the next window is needed
                            flow.part_of([], await flow.turn(0, position)).release()
        finally:
            for part in held:
                part.release()
            ahead.release()

    async def _read(
        self, flow: Flow, ordinal: int, visit: ShardVisit, reading: Reading[Part], *, is_again: bool
    ) -> None:
        """Emit the samples of a visit. `is_again`: other windows may read the same blocks."""
        with reading.ended(self._pack_error), ExitStack() as after_reads:
            async with anyio.create_task_group() as group:
                members = await self._members(visit.shard, visit.rows)
                ranges = ShardRanges(self._reader, flow, group, ordinal, visit.url, members.version)
                after_reads.callback(ranges.release)  # earlier, a read would write into reused memory
                numbers = self._numbers if is_again else None
                reads = MemberReads(flow, ranges, visit.url, ordinal, members, self._bounds, self._pack_error, numbers)
                self._chosen(reads.nbytes, members.size)
                end = int((members.rows.offset + members.rows.size).max(initial=0))
                address, self._next_address = self._next_address, self._next_address + end
                async with aclosing(reads.parts(address)) as parts:
                    async for part in parts:
                        reading.put(part)
                group.cancel_scope.cancel()


async def _complete(reading: Reading[Part], count: int) -> AsyncIterator[Part]:
    """Yield the parts of a visit. Samples missing at its end get the visit's failure."""
    async for part in reading:
        count -= part.count
        yield part
    if reading.failure is not None:
        yield ListPart([reading.failure] * count)


def _put_in_order(flow: Flow, start: int, parts: Sequence[Part], order: Ints) -> None:
    """Push the samples of a window in order, with failures in their places."""
    raw = [part for part in parts if isinstance(part, RawPart)]
    whole = RawPart.concat(raw) if raw else None
    if whole is not None and len(raw) == len(parts):
        flow.put(start, whole.take(order))
        whole.release()
        return
    failures: list[Failure | None] = []
    for part in parts:
        failures += part.samples if isinstance(part, ListPart) else [None] * part.count
    number = np.cumsum([failure is None for failure in failures]) - 1  # of each sample among the successful ones
    has_failed = np.array([failure is not None for failure in failures])[order]
    edges = [0, *(np.flatnonzero(np.diff(has_failed)) + 1).tolist(), len(order)]
    for begin, end in pairwise(edges):
        some = order[begin:end]
        if has_failed[begin]:
            flow.put(start + begin, ListPart([failures[k] for k in some.tolist()]))
        else:
            assert whole is not None
            flow.put(start + begin, whole.take(number[some]))
    if whole is not None:
        whole.release()
