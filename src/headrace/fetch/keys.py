"""Samples by their keys, and of iterators: got on the event loop, or left to the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from headrace.fetch.growth import Growth
from headrace.fetch.shuffle_buffer import ShuffleBuffer
from headrace.memory import Claim
from headrace.tasks import Failure, Flow, PackedPart, Part, nobodys
from headrace.types import Ranges, RunningSample, running_charge, running_sample

_EXPECTED_BYTES = 65536  # of a sample, before any has been seen
_NO_WAIT_S = 0.002


# What a user's coroutine may raise, to be raised again in the trainer; out of a task the last two would end the loop.
USERS_OWN = (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit)


def is_ours(error: BaseException) -> bool:
    """Whether this task itself was cancelled; what a user's coroutine waits for may be cancelled without that."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class _Expectation:
    """The mean size of samples so far."""

    def __init__(self) -> None:
        self._samples, self._nbytes = 1, _EXPECTED_BYTES

    def of(self, count: int) -> int:
        return count * self._nbytes // self._samples

    def learn(self, part: Part, charged: int) -> None:
        """Samples take as many bytes as their part has, or as were charged while they were read."""
        nbytes = part.lease.size if isinstance(part, PackedPart) else charged
        if nbytes:
            if self._samples == 1:
                self._nbytes = 0
            self._samples += part.count
            self._nbytes += nbytes


class _Charge:
    """What the samples of a chunk may hold: as much as was expected of them, and more once reads tell their sizes."""

    def __init__(self, flow: Flow, claim: Claim, expected: int, position: int) -> None:
        self._flow, self.claim, self._granted, self._position = flow, claim, expected, position
        self.charged = 0

    def __call__(self, nbytes: int) -> Awaitable[None] | None:
        self.charged += nbytes
        missing = self.charged - self._granted
        # What goes on after its sample was given, or was begun by it, reads without us.
        if missing <= 0 or not self.claim.holders:
            return None
        self._granted = self.charged  # asked for now, so that nobody asks for it again
        return self._enlarge(missing)

    async def _enlarge(self, missing: int) -> None:
        try:
            await self._flow.enlarge(self.claim, missing, self._position)
        except BaseException:
            self._granted -= missing
            raise


class KeySource:
    """Gets samples by key, many at once; each chunk is put as soon as all of its samples are there.

    Args:
        count: how many samples.
        keys: (the keys, the positions in the epoch) of the samples from `start` up to `stop`.
        get: gives the sample of a key.
        get_many: gives the samples of several keys, if the data set can do that better.
        growth: how many samples are got at once.
        batch_size, chunk: chunks of this size, cut where batches are cut.
        pack_error: an exception as bytes.
    """

    def __init__(
        self,
        count: int,
        keys: Callable[[int, int], tuple[Sequence[Any], Sequence[int]]],
        get: Callable[[Any], Awaitable[Any]],
        get_many: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]] | None,
        *,
        growth: Growth,
        batch_size: int,
        chunk: int,
        pack_error: Callable[[BaseException], bytes],
    ) -> None:
        self._count, self._keys, self._get, self._get_many = count, keys, get, get_many
        self._growth, self._batch_size, self._chunk = growth, batch_size, chunk
        self._pack_error = pack_error
        self._expected = _Expectation()
        self._todo: deque[tuple[_Chunk, int]] = deque()
        self._idle: deque[asyncio.Event] = deque()
        self._outstanding = self._getters = 0
        self._less = asyncio.Event()

    def mark(self, position: int) -> None:  # noqa: ARG002 (positions tell it)
        return None

    async def run(self, flow: Flow) -> None:
        self._now = asyncio.get_running_loop().time
        self._growth.begin(self._now())
        async with anyio.create_task_group() as group:
            self._staff(flow, group)
            position = 0
            while position < self._count:
                count = min(self._chunk, self._batch_size - position % self._batch_size, self._count - position)
                expected = self._expected.of(count)
                asked_at = self._now()
                charge = _Charge(flow, await flow.turn(expected, position), expected, position)
                if self._now() - asked_at > _NO_WAIT_S:
                    self._growth.begin(self._now())  # it was not for want of reads that fewer were made
                try:
                    keys, positions = self._keys(position, position + count)
                except Exception as error:
                    error.add_note(f"stage: plan; keys of the samples from {position} of the epoch on")
                    failures = [Failure(nobodys(self._pack_error(error)))] * count
                    flow.put(position, flow.part_of(failures, charge.claim))
                else:
                    self._add(_Chunk(position, keys, positions, charge))
                position += count
                while self._outstanding > self._growth.level + self._chunk:
                    self._less = asyncio.Event()
                    await self._less.wait()
            while self._outstanding:
                self._less = asyncio.Event()
                await self._less.wait()
            group.cancel_scope.cancel()

    def _staff(self, flow: Flow, group: TaskGroup) -> None:
        """Have as many getters as may get samples at once."""
        level = self._growth.level
        for _ in range(self._getters, min(self._count, level if self._get_many is None else level // self._chunk or 1)):
            self._getters += 1
            group.start_soon(self._serve, flow, group)

    def _is_short(self, flow: Flow) -> bool:
        """Whether workers have nothing to do, though as many samples are being got as may be."""
        return self._outstanding >= self._growth.level and flow.is_starved

    def _add(self, chunk: _Chunk) -> None:
        self._outstanding += len(chunk.keys)
        calls = 1 if self._get_many is not None else len(chunk.keys)
        chunk.missing = calls
        self._todo.extend((chunk, k) for k in range(calls))
        for _ in range(min(calls, len(self._idle))):
            self._idle.popleft().set()

    async def _serve(self, flow: Flow, group: TaskGroup) -> None:
        while True:
            while not self._todo:
                event = asyncio.Event()
                self._idle.append(event)
                await event.wait()
            chunk, k = self._todo.popleft()
            running_charge.set(chunk.charge)
            running_sample.set(RunningSample(flow.key, chunk.positions[k]))
            if self._get_many is not None:
                chunk.samples = await self._many(chunk)
            else:
                chunk.samples[k] = await self._one(chunk, k)
            chunk.missing -= 1
            if self._growth.answered(self._now(), is_full=self._is_short(flow)):
                self._staff(flow, group)
                self._less.set()
            if not chunk.missing:
                part = flow.part_of(chunk.samples, chunk.charge.claim)
                self._expected.learn(part, chunk.charge.charged)
                flow.put(chunk.position, part)
                chunk.samples = []  # this getter may hold the chunk for long
                self._outstanding -= len(chunk.keys)
                self._less.set()

    async def _one(self, chunk: _Chunk, k: int) -> Any:
        try:
            return await self._get(chunk.keys[k])
        except USERS_OWN as error:
            if is_ours(error):
                raise
            error.add_note(f"stage: fetch; sample {chunk.positions[k]} of the epoch; key {chunk.keys[k]!r}")
            return Failure(self._pack_error(error))

    async def _many(self, chunk: _Chunk) -> list[Any]:
        assert self._get_many is not None
        try:
            samples = list(await self._get_many(chunk.keys))
            if len(samples) != len(chunk.keys):
                raise ValueError(f"aget_many gave {len(samples)} samples for {len(chunk.keys)} keys")
            return samples
        except USERS_OWN as error:
            if is_ours(error):
                raise
            error.add_note(
                f"stage: fetch; samples from {chunk.positions[0]} of the epoch on; keys {list(chunk.keys)!r:.200}"
            )
            return [Failure(self._pack_error(error))] * len(chunk.keys)


class _Chunk:
    def __init__(self, position: int, keys: Sequence[Any], positions: Sequence[int], charge: _Charge) -> None:
        self.position, self.keys, self.positions, self.charge = position, keys, positions, charge
        self.samples: list[Any] = [None] * len(keys)
        self.missing = 0


class KeyFeed:
    """Keys that are drawn elsewhere, a batch at a time; workers get the samples for themselves.

    Args:
        part_of: keys as a part that workers can be given.
    """

    def __init__(self, part_of: Callable[[list[Any]], Part]) -> None:
        self._part_of = part_of
        self._batches: deque[list[Any] | None] = deque()
        self._arrived = asyncio.Event()

    def add(self, keys: list[Any] | None) -> None:
        """The keys of the next batch, or None where there are no more; on the loop."""
        self._batches.append(keys)
        self._arrived.set()

    def mark(self, position: int) -> None:  # noqa: ARG002 (nobody asks: whoever draws keys knows them)
        return None

    async def run(self, flow: Flow) -> None:
        position = 0
        while True:
            while not self._batches:
                self._arrived = asyncio.Event()
                await self._arrived.wait()
            keys = self._batches.popleft()
            if keys is None:
                return
            part = self._part_of(keys)
            flow.cut(len(keys))
            flow.put(position, part)
            position += len(keys)


class IterSource:
    """Takes samples from an asynchronous iterator, as it gives them.

    None of its snapshots is of the end: what has come to its end may have made itself ready for the next epoch.

    Args:
        samples: makes the iterator.
        snapshot: says how far it has come; None where it cannot.
        take: how many samples to take at most, with those that are done.
        buffer: where samples wait until they are drawn.
        begin: the position in the epoch of the first one.
        done: which samples are left out, by their numbers from there on.
        batch_size, chunk: chunks of this size, cut where batches are cut.
        pack_error: an exception as bytes.
    """

    def __init__(
        self,
        samples: Callable[[], AsyncIterator[Any]],
        *,
        snapshot: Callable[[], Any] | None,
        take: int | None,
        buffer: ShuffleBuffer | None,
        begin: int,
        done: Ranges,
        batch_size: int,
        chunk: int,
        pack_error: Callable[[BaseException], bytes],
    ) -> None:
        self._samples, self._snapshot, self._take, self._buffer = samples, snapshot, take, buffer
        self._begin, self._done = begin, deque(done)
        self._batch_size, self._chunk, self._pack_error = batch_size, chunk, pack_error
        self._expected = _Expectation()
        self._number = 0  # of the next sample, from `begin` on, with those that are done
        self._snapshots: deque[tuple[int, Any]] = deque()
        self._waiting: list[Any] = []  # in the buffer

    def mark(self, position: int) -> tuple[Any, int] | None:
        """The last snapshot before the sample with this number, and the number of the first sample after it."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= position:
            self._snapshots.popleft()
        if not self._snapshots:
            return None
        at, state = self._snapshots[0]
        return None if state is None else (state, at)

    async def run(self, flow: Flow) -> None:
        iterator = self._samples()
        position, is_over = 0, False
        self._take_snapshot()
        try:
            while not is_over:
                count = min(self._chunk, self._batch_size - position % self._batch_size)
                expected = self._expected.of(count)
                charge = _Charge(flow, await flow.turn(expected, position), expected, position)
                running_charge.set(charge)
                samples, is_over = await self._some(iterator, count, flow.key)
                part = flow.part_of(samples, charge.claim)
                self._expected.learn(part, charge.charged)
                flow.put(position, part)
                position += len(samples)
                del samples
                if not is_over:
                    self._take_snapshot()
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                with anyio.CancelScope(shield=True):
                    await close()

    def _take_snapshot(self) -> None:
        is_end = self._number and self._take is not None and self._number >= self._take
        if self._snapshot is not None and not is_end:
            self._snapshots.append((self._number, self._snapshot()))

    async def _some(self, iterator: AsyncIterator[Any], count: int, key: int) -> tuple[list[Any], bool]:
        """(the next samples, whether they are the last)."""
        samples: list[Any] = []
        try:
            while len(samples) < count:
                if self._take is not None and self._number >= self._take:
                    return self._last(samples), True
                running_sample.set(RunningSample(key, self._begin + self._number))
                sample = await anext(iterator)
                if self._counts():
                    self._let_in(sample, samples)
                if self._number == 1:  # what was taken before it may be of the end of the epoch before
                    self._take_snapshot()
        except StopAsyncIteration:
            return self._last(samples), True
        except USERS_OWN as error:
            if is_ours(error):
                raise
            error.add_note(f"stage: fetch; sample {self._begin + self._number} of the epoch")
            self._take_snapshot()
            return [*self._last(samples), Failure(nobodys(self._pack_error(error)))], True
        return samples, False

    def _counts(self) -> bool:
        """Whether the next sample is not done already."""
        number, self._number = self._number, self._number + 1
        while self._done and self._done[0][1] <= number:
            self._done.popleft()
        return not self._done or number < self._done[0][0]

    def _let_in(self, sample: Any, samples: list[Any]) -> None:
        if self._buffer is None:
            samples.append(sample)
            return
        slot = self._buffer.slot()
        if slot is None:
            self._waiting.append(sample)
        else:
            samples.append(self._waiting[slot])
            self._waiting[slot] = sample

    def _last(self, samples: list[Any]) -> list[Any]:
        """Samples and all that still wait."""
        if self._buffer is None:
            return samples
        order = self._buffer.end()
        waiting, self._waiting = self._waiting, []
        return samples + [waiting[k] for k in order.tolist()]
