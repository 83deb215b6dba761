"""Reads chosen samples of indexed shards, window by window."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import anyio
import numpy as np

from headrace._util.reads import Reads
from headrace._util.sample_ranges import BlockNumbers
from headrace.readers.indexed_members import Bounds, MemberReads, Members, Reading, ReadingAhead, ReadsInto
from headrace.readers.protocol import Flow
from headrace.readers.shard_ranges import ShardRanges
from headrace.types import Ints
from headrace.workers.failures import ErrorPacker, Failure
from headrace.workers.sample_chunks import ListPart, Part, RawPart

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
    ) -> None:
        self._windows, self._reader, self._members = windows, reader, members
        self._bounds, self._chosen, self._pack_error = bounds, chosen, pack_error
        self._next_address = 0
        self._numbers = BlockNumbers()  # of blocks that several windows may read

    def mark(self, position: int) -> None:
        return None

    async def run(self, flow: Flow) -> None:
        begun: deque[ReadWindow] = deque()
        held: list[Part] = []

        def readers() -> Iterator[ReadsInto[Part]]:
            ordinal = 0
            for window in self._windows:
                begun.append(window)
                for visit in window.visits:
                    yield partial(self._read, flow, ordinal, visit, is_again=window.order is not None)
                    ordinal += 1

        ahead = ReadingAhead(readers(), lambda: _VISITS_AT_ONCE)
        try:
            async with anyio.create_task_group() as group, aclosing(ahead.readings(group)) as readings:
                position, left = 0, 0
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
        finally:
            for part in held:
                part.release()
            ahead.release()

    async def _read(
        self, flow: Flow, ordinal: int, visit: ShardVisit, reading: Reading[Part], *, is_again: bool
    ) -> None:
        """Emit the samples of a visit. `is_again`: other windows may read the same blocks."""
        with closing(reading):
            ranges: ShardRanges | None = None
            try:
                async with anyio.create_task_group() as group:
                    members = await self._members(visit.shard, visit.rows)
                    ranges = ShardRanges(self._reader, flow, group, ordinal, visit.url, members.version)
                    numbers = self._numbers if is_again else None
                    reads = MemberReads(
                        flow, ranges, visit.url, ordinal, members, self._bounds, self._pack_error, numbers
                    )
                    self._chosen(reads.nbytes, members.size)
                    end = int((members.rows.offset + members.rows.size).max(initial=0))
                    address, self._next_address = self._next_address, self._next_address + end
                    async with aclosing(reads.parts(address)) as parts:
                        async for part in parts:
                            reading.put(part)
                    group.cancel_scope.cancel()
            except Exception as error:
                reading.fail(error, self._pack_error)
            finally:
                if ranges is not None:
                    ranges.release()  # after the last read, which would write into reused memory


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
