"""Samples of shards without an index: ranges are read ahead and decompressed, and workers scan them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Scanner
from headrace._util.shared_memory import Lease
from headrace.errors import FormatError, LimitError, OptionError, StateMismatchError, masked, not_as_indexed
from headrace.formats.compression import Decompressor
from headrace.readers.indexed_shards import Reading, ReadingAhead, ReadsInto
from headrace.readers.protocol import Flow
from headrace.readers.shard_ranges import ShardRanges
from headrace.types import Ints, Ranges
from headrace.workers.failures import ErrorPacker, Failure
from headrace.workers.sample_chunks import ListPart, Part, RawPart


@dataclass(frozen=True, slots=True)
class ShuffleWindow:
    """Consecutive samples that are permuted. Their number depends on the data only.

    Attributes:
        samples, nbytes: A window ends with the sample that reaches either.
        order: Maps (number of samples, window number) to a permutation.
    """

    samples: int
    nbytes: int
    order: Callable[[int, int], Ints]


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """A point from which reading shards repeats the same samples.

    Attributes:
        shard: Number of the shard in the order of the plan.
        row: Number of its samples before the point.
        window: Number of the window that starts there.
        failures: Numbers of samples after the point that shards failed at. A failure ends a window, and the numbers of
            later samples depend on the missing rest of that shard.
    """

    shard: int = 0
    row: int = 0
    window: int = 0
    failures: Sequence[int] = ()

    def described(self) -> list[object]:
        token: list[object] = [self.shard, self.row, self.window]
        return [*token, list(self.failures)] if self.failures else token


class Expected(NamedTuple):
    """Known version and number of samples (None: not known) of a shard that must be scanned."""

    version: Version
    samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReading:
    """How shards are read.

    Attributes:
        unpacks: Makes a decompressor for a shard. None: not compressed.
        expected: Returns properties from an index or a listing. None: there is neither.
        range_bytes: Bytes per request.
    """

    reader: Reads
    scanner: Callable[[str], Scanner]
    unpacks: Callable[[str], Decompressor | None]
    expected: Callable[[int], Awaitable[Expected]] | None
    range_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The samples of shards to emit.

    Attributes:
        shards: Numbers and addresses in the order of the plan, starting with the shard of `begin`.
        window: Shuffle by windows.
        buffer: Shuffle by a buffer instead.
        take: Maximum number of samples, skipped ones included.
        in_round: Number of shards per round. Samples are not exchanged between rounds.
        is_endless: True if rounds repeat without end.
        begin: Resume point.
        done: Samples after that point to skip.
        stop: (number of a shard, row) of the first sample not emitted. None: no such limit.
    """

    shards: Iterable[tuple[int, str]]
    window: ShuffleWindow | None
    buffer: ShuffleBuffer | None
    take: int | None
    in_round: int
    is_endless: bool
    begin: ResumeToken
    done: Ranges
    stop: tuple[int, int] | None = None


class ShuffleBuffer:
    """Determines the sample that leaves a full buffer when another one comes.

    Samples are represented by numbers: waiting ones are 0, 1, …, and new ones follow.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._random = np.random.Generator(np.random.Philox(key=key))
        self.waiting = 0

    def slot(self) -> int | None:
        """Return the slot of the sample replaced by a new one. None if there is room."""
        if self.waiting < self._size:
            self.waiting += 1
            return None
        return int(self._random.integers(0, self._size))

    def come(self, count: int) -> tuple[Ints, Ints]:
        """Add `count` samples: (numbers of those that leave, in order; of those that stay)."""
        stay = list(range(self.waiting))
        room = max(0, min(count, self._size - self.waiting))
        stay += range(self.waiting, self.waiting + room)
        leave = []
        drawn = self._random.integers(0, self._size, count - room)
        for k, number in enumerate(drawn.tolist(), self.waiting + room):
            leave.append(stay[number])
            stay[number] = k
        self.waiting = len(stay)
        return np.array(leave, np.int64), np.array(stay, np.int64)

    def end(self) -> Ints:
        """Empty the buffer and return the numbers of its samples in order of leaving."""
        waiting, self.waiting = self.waiting, 0
        return self._random.permutation(waiting)


_BLOCK = 512

UNPACKED_MOST = 2**40
"""Maximum bytes of a decompressed shard, reserved in the epoch's address space."""


async def unpacked(
    ranges: AsyncGenerator[tuple[int, Lease, bool], None], unpacks: Decompressor, flow: Flow, size: int, ordinal: int
) -> AsyncGenerator[tuple[int, Lease, bool], None]:
    """Yield (offset, bytes, True if they are the last) of a compressed shard's content.

    Threads decompress without the GIL. The last lease may be empty. The shard counts as active only during
    decompression: a compressed range, or a lease that is half full, makes no progress alone, so the memory it waits for
    must be admitted.

    Args:
        size: Bytes of each lease, a multiple of 512.
        ordinal: Number of the shard in the order of the epoch.
    """
    offset, filled = 0, 0
    target: Lease | None = None
    worker = object()

    async def room() -> Lease:
        # before later reads of this shard, which are useless without memory for their content
        flow.pause(worker)
        lease = await flow.lease(size, (ordinal, -1))
        flow.go_on(worker)
        flow.loaded(lease)
        return lease

    try:
        async with aclosing(ranges) as each:
            async for _, packed, _ in each:
                flow.go_on(worker)
                flow.loaded(packed)
                try:
                    unpacks.feed(packed.view)
                    while True:
                        if target is None:
                            target, filled = await room(), 0
                        filled += await anyio.to_thread.run_sync(unpacks.read_into, target.view[filled:])
                        if filled < size:
                            break  # more input is needed
                        full, target = target, None
                        yield offset, full, False
                        offset += size
                finally:
                    packed.release()
                flow.pause(worker)
        unpacks.finish()
    except FormatError:
        whole = filled // _BLOCK * _BLOCK
        if target is not None and whole:  # emit the content before the damage
            flow.trim(target, whole)
            before, target = target, None
            yield offset, before, False
        raise
    else:
        if target is None:
            target, filled = await room(), 0
        flow.trim(target, filled)
        last, target = target, None
        yield offset, last, True
    finally:
        flow.pause(worker)
        if target is not None:
            target.release()


SHARDS_AT_ONCE = 8
SHARDS_AT_FIRST = 2  # until one size is known: reads of later shards slow down the first


class ShardProducer:
    """Emits the samples of shards, in the order of the shards."""

    def __init__(self, reading: ShardReading, plan: ShardPlan, pack_error: ErrorPacker) -> None:
        self._shards, self._reader = iter(plan.shards), reading.reader
        self._scanner, self._unpacks = reading.scanner, reading.unpacks
        self._expected, self._range_bytes = reading.expected, reading.range_bytes
        self._window, self._buffer, self._take, self._done = plan.window, plan.buffer, plan.take, plan.done
        self._stop = plan.stop
        self._in_round, self._is_endless, self._pack_error = plan.in_round, plan.is_endless, pack_error
        begin, window, done = plan.begin, plan.window, plan.done
        self._next_address = 0
        self._largest = 0  # bytes of the largest shard so far
        self._first_shard = begin.shard
        self._skip_rows = begin.row  # samples of the first shard to skip
        self._read_before = 0
        self._read = self._position = 0  # numbers of samples read and pushed since `begin`
        self._windows = begin.window
        self._pending: list[RawPart] = []
        self._failures = deque[int]()  # positions of pushed failures
        self._done_end = done[-1][1] if done else 0
        # Without windows, no consumed sample depends on later failures.
        self._failed_before = {k for k in begin.failures if window is not None or k < self._done_end}
        self._shard_starts: deque[tuple[int, int, int]] = deque([(0, begin.shard, begin.row)])
        self._window_starts: deque[tuple[int, int]] = deque([(0, begin.window)])

    def mark(self, position: int) -> tuple[list[object], int]:
        shards, windows = self._shard_starts, self._window_starts
        while len(windows) > 1 and windows[1][0] <= position:
            windows.popleft()
        end = min(position, self._position)  # the last batch may be longer than the remaining samples
        begin, window = windows[0] if self._window is not None else (end, 0)
        while len(shards) > 1 and shards[1][0] <= begin:
            shards.popleft()
        at, shard, row = shards[0]
        while self._failures and self._failures[0] < begin:
            self._failures.popleft()
        return ResumeToken(
            shard, row + begin - at, window, [failed - begin for failed in self._failures]
        ).described(), begin

    async def run(self, flow: Flow) -> None:
        flow = Without(flow, self._done) if self._done else flow
        begun: deque[tuple[int, str]] = deque()

        def readers() -> Iterator[ReadsInto[RawPart]]:
            for ordinal, url in self._shards:
                begun.append((ordinal, url))
                yield partial(self._read_shard, flow, ordinal, url)

        if self._first_shard >= self._in_round:
            flow.begin_again()
        ahead = ReadingAhead(readers(), lambda: SHARDS_AT_ONCE if self._largest else SHARDS_AT_FIRST)
        try:
            async with anyio.create_task_group() as group, aclosing(ahead.readings(group)) as readings:
                async for reading in readings:
                    (shard, url), skip = begun.popleft(), self._skip_rows
                    self._skip_rows = 0
                    if shard % self._in_round == 0:
                        self._flush(flow)
                        self._begin_round(flow, shard, url)
                    self._shard_starts.append((self._read, shard, skip))
                    rows = None if self._stop is None or shard < self._stop[0] else self._stop[1] - skip
                    async for part in reading:
                        left = part
                        if skip:
                            skip, left = _without(part, skip)
                        if rows is not None:
                            rows, left = _first(left, rows)
                        self._give(flow, left)
                        if self._has_all or rows == 0:
                            break
                    if rows == 0:  # the rest of the shard belongs to another rank
                        self._flush(flow)
                        group.cancel_scope.cancel()
                        return
                    if not self._has_all and reading.failure is not None:
                        skip = 0  # no sample follows, and the failure has the reason
                        self._read += 1
                        self._shard_starts.append((self._read, shard + 1, 0))  # a failure is not repeated on resume
                        self._fail(flow, ListPart([reading.failure]), url)
                    if self._has_all:
                        group.cancel_scope.cancel()
                        return
                    if skip:
                        raise _changed(f"{masked(url)} ends {skip} samples before the mark of the state, and did not")
            self._flush(flow)
        finally:
            for part in self._pending:
                part.release()
            ahead.release()

    async def _read_shard(self, flow: Flow, ordinal: int, url: str, reading: Reading[RawPart]) -> None:
        """Read the samples of a shard. An early end becomes a failure in the next sample's place."""
        with reading.ended(self._pack_error), ExitStack() as after_reads:
            async with anyio.create_task_group() as group:
                expected = None if self._expected is None else await self._expected(ordinal)
                version = expected.version if expected else None
                unpacks = self._unpacks(url)
                ranges = ShardRanges(self._reader, flow, group, ordinal, url, version, are_packed=unpacks is not None)
                after_reads.callback(ranges.release)  # earlier, a read would write into reused memory
                reading.failure = await self._scan_shard(flow, ranges, ordinal, url, unpacks, expected, reading)
                group.cancel_scope.cancel()

    async def _scan_shard(
        self,
        flow: Flow,
        ranges: ShardRanges,
        ordinal: int,
        url: str,
        unpacks: Decompressor | None,
        expected: Expected | None,
        reading: Reading[RawPart],
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
                    if unpacks is not None:
                        unpacks.is_past_end = getattr(scanner, "has_ended", False)  # only tar scanners set it
                    if len(rows):
                        leased = [(base + start, held.retain()) for start, held in sorted(spans.items())]
                        own, zeros = rows.shifted(base).as_read(), np.zeros(len(rows), np.int64)
                        reading.put(RawPart(own, zeros, (masked(url),), leased, (base,)))
                    count += len(rows)
                    if (scanner.done or scanner.error is not None) and unpacks is None:
                        break  # a compressed shard is read to its end, which has checksums
                    if type(scanner.error) is LimitError:
                        break  # the rest, which may be a bomb, would exceed another limit
                    for start in [start for start, held in spans.items() if start + held.size <= scanner.low]:
                        spans.pop(start).release()
            if scanner.error is not None:
                return Failure(self._pack_error(scanner.error))
            if expected is not None and expected.samples not in (None, count):
                raise not_as_indexed(url, f"it had {expected.samples} samples then, and has {count}")
            return None
        finally:
            for held in spans.values():
                held.release()

    def _begin_round(self, flow: Flow, shard: int, url: str) -> None:
        """Start a round. Fail if the previous one was empty and rounds repeat without end."""
        if shard >= self._first_shard + self._in_round:
            count = self._read - self._read_before
            if not count and self._is_endless:
                raise OptionError(
                    f".repeat() and .epoch(): {self._in_round} shards, from {masked(url)} on, have no "
                    "samples to begin again with"
                )
            if self._is_endless:
                flow.come_again(count)
            flow.begin_again()
        self._read_before = self._read

    def range_bytes(self, ordinal: int, offset: int) -> int:
        """Return the number of bytes to request at `offset`.

        The epoch's first requests are small, for a fast start. A shard of unknown size is requested up to the size of
        the largest one so far.
        """
        size = self._range_bytes
        if ordinal == self._first_shard and offset < size:
            size = max(size // 4, offset)
        if offset == 0 and self._largest:
            size = min(size, self._largest)
        return -(-size // _BLOCK) * _BLOCK

    def _address(self, size: int) -> int:
        address = self._next_address
        self._next_address += size
        return address

    @property
    def _has_all(self) -> bool:
        return self._take is not None and self._position >= self._take

    def _give(self, flow: Flow, part: RawPart) -> None:
        self._read += part.count
        if self._buffer is not None:
            leave, stay = self._buffer.come(part.count)
            whole = RawPart.concat([*self._pending, part])
            self._pending = [whole.take(stay)]
            self._put(flow, whole.take(leave))
            whole.release()
        elif self._window is None:
            self._check_none_failed(part, part.count)
            self._put(flow, part)
        else:
            self._pending.append(part)
            self._shuffle(flow, self._window)

    def _fail(self, flow: Flow, failure: Part, url: str) -> None:
        """Push a failure. It ends the current window, and a new one starts after it."""
        if self._buffer is not None:
            self._put(flow, failure)
            return
        position = self._position + sum(part.count for part in self._pending)
        if position not in self._failed_before and self._is_begun:
            # If failures are raised, this is the first one.
            flow.put(next((end for start, end in self._done if start <= self._position < end), self._position), failure)
            raise _changed(f"{masked(url)} fails {position} samples after the mark of the state, and did not")
        self._flush(flow)
        self._failures.append(position)
        self._put(flow, failure)
        self._window_starts.append((self._position, self._windows))

    @property
    def _is_begun(self) -> bool:
        """True if samples of the next window were received; without windows, any later sample."""
        return self._position < self._done_end

    def _check_none_failed(self, part: Part, count: int) -> None:
        """Raise StateMismatchError, and release the part, if its samples replace an earlier failure."""
        failed = self._failed_before.intersection(range(self._position, self._position + count))
        if failed and self._is_begun:
            part.release()
            raise _changed(f"no shard fails {min(failed)} samples after the mark of the state, and one did")

    def _shuffle(self, flow: Flow, window: ShuffleWindow) -> None:
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
        if not pending:
            return
        part = RawPart.concat(pending)
        if self._window is not None:
            self._put_window(flow, self._window, part, part.count)
        elif self._buffer is not None:
            self._put(flow, part.take(self._buffer.end()))
            part.release()

    def _put_window(self, flow: Flow, window: ShuffleWindow, part: RawPart, count: int) -> None:
        if not count:  # all samples were before `begin`
            part.release()
            return
        self._check_none_failed(part, count)
        order = window.order(count, self._windows)
        self._windows += 1
        shuffled = part.take(order)
        part.release()
        self._put(flow, shuffled)
        self._window_starts.append((self._position, self._windows))

    def _put(self, flow: Flow, part: Part) -> None:
        if self._take is not None and self._position + part.count > self._take:
            kept = part.cut(0, max(0, self._take - self._position))
            part.release()
            part = kept
        start, self._position = self._position, self._position + part.count
        flow.put(start, part)


def _without(part: RawPart, count: int) -> tuple[int, RawPart]:
    """Remove the first `count` samples: (number still to remove, remaining part)."""
    left = part.cut(min(count, part.count), part.count)
    part.release()
    return max(0, count - part.count), left


def _first(part: RawPart, count: int) -> tuple[int, RawPart]:
    """Keep the first `count` samples: (number still to keep, kept part)."""
    kept = part.cut(0, min(count, part.count))
    part.release()
    return count - kept.count, kept


def _changed(why: str) -> StateMismatchError:
    """Make the error for samples after a mark that have changed, so that their numbers differ."""
    return StateMismatchError(
        f"{why} when that was saved: samples that were in use then have other numbers now; resume from an "
        "earlier state, or from the start of an epoch",
        field="source_state",
    )


class Without:
    """A flow that skips some samples of a source, by source number, and renumbers the others."""

    def __init__(self, flow: Flow, gone: Ranges) -> None:
        self._flow, self._gone = flow, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    def put(self, start: int, part: Part) -> None:
        begin, stop, before = start, start + part.count, 0
        for first, end in (*self._gone, (stop, stop)):
            if begin < min(first, stop):
                kept = part.cut(begin - start, min(first, stop) - start)
                self._flow.put(begin - before, kept)
            begin = max(begin, end)
            before += end - first
        part.release()
