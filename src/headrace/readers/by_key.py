"""Samples by key, read on the event loop or by workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from headrace._util.context import RunningSample, is_ours, running_charge, running_sample
from headrace._util.shared_memory import Claim
from headrace.workers.failures import ErrorPacker, Failure, Origin, PackedError
from headrace.workers.sample_chunks import ListPart, PackedPart, Part

if TYPE_CHECKING:
    from headrace.readers.protocol import Flow

_WORTH = 4.0 / 3.0


class AdaptiveConcurrency:
    """A number of concurrent reads, doubled as long as that adds a third of throughput.

    Remote storage supports hundreds of concurrent reads. Near storage, or a saturated machine, gets no faster by them,
    and each costs a connection and memory. A round lasts for as many responses as the level. It counts if more reads
    were wanted during a good part of this round and of the one before.
    """

    def __init__(self, first: int, most: int) -> None:
        self.level = min(first, most)
        self._most = most
        self._rate = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Start a round. Earlier results are kept."""
        self._count = self._full = 0
        self._since, self._was_full = now, False

    def answered(self, now: float, samples: int, *, is_full: bool) -> bool:
        """Count samples of a response. True if the level has grown. `is_full`: the level limited the reads."""
        self._count += samples
        self._full += samples * is_full
        if self._count < self.level or self.level >= self._most:
            return False
        rate, was_full = self._count / max(1e-9, now - self._since), self._was_full
        is_full = self._full * 4 >= self._count
        self.begin(now)
        self._was_full = is_full
        counts = is_full and (was_full or not self._rate)
        if not counts:
            return False
        if rate < _WORTH * self._rate:
            self._most = self.level
            return False
        self._rate = rate
        self.level = min(self._most, 2 * self.level)
        return True


_NO_WAIT_S = 0.002
_NOT_YET = object()


class ChunkSizes(NamedTuple):
    """Number of samples per chunk. Chunks end where batches end.

    `grows`: sizes start with 1, 1, 2, 4, …, as the number of samples in the first batch is not known.
    """

    batch: int
    most: int
    grows: bool = False

    def at(self, position: int) -> int:
        most = min(self.most, max(1, position)) if self.grows else self.most
        return min(most, self.batch - position % self.batch)


class KeyProducer:
    """Reads samples by key, many at once. Each chunk is pushed when all its samples are there.

    Args:
        keys: Returns (keys, positions in the epoch) of samples [start, stop).
        again: True to read samples one by one after `get_many` has failed, so that only the bad ones fail.
    """

    def __init__(
        self,
        count: int,
        keys: Callable[[int, int], tuple[Sequence[object], Sequence[int]]],
        get: Callable[[object], Awaitable[object]],
        get_many: Callable[[Sequence[object]], Awaitable[Sequence[object]]] | None,
        *,
        adaptive: AdaptiveConcurrency,
        chunks: ChunkSizes,
        pack_error: ErrorPacker,
        again: bool = False,
    ) -> None:
        self._count, self._keys, self._get, self._get_many = count, keys, get, get_many
        self._adaptive, self._chunks, self._chunk = adaptive, chunks, chunks.most
        self._pack_error, self._again = pack_error, again
        self._expected = Expectation()
        self._todo: deque[tuple[_Chunk, int]] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # wake idle getters
        self._outstanding = self._getters = 0
        self._less = asyncio.Event()
        self._under_way: dict[int, _Chunk] = {}  # by position
        # Samples before this position are not read, and get this failure.
        self._spoilt: tuple[int, Failure] = 0, Failure(PackedError(b""))

    def mark(self, position: int) -> None:
        return None

    async def run(self, flow: Flow) -> None:
        self._now = asyncio.get_running_loop().time
        self._adaptive.begin(self._now())
        async with anyio.create_task_group() as group:
            self._staff(flow, group)
            position = 0
            while position < self._count:
                count = min(self._chunks.at(position), self._count - position)
                end, failure = self._spoilt
                if position < end:
                    flow.put(position, ListPart([failure] * min(count, end - position)))
                    position += min(count, end - position)
                    continue
                expected = self._expected.of(count)
                asked_at = self._now()
                charge = Charge(flow, await flow.turn(expected, position), expected, position)
                if self._now() - asked_at > _NO_WAIT_S:
                    self._adaptive.begin(self._now())  # the memory limit, not the level, has slowed reads
                try:
                    keys, positions = self._keys(position, position + count)
                except Exception as error:
                    error.add_note(f"stage: plan; keys of the samples from {position} of the epoch on")
                    failures = [Failure(self._pack_error(error).widened())] * count
                    flow.put(position, flow.part_of(failures, charge.claim))
                else:
                    self._add(_Chunk(position, keys, positions, charge))
                    self._let_go(flow, position, *self._spoilt)  # may have changed in the meantime
                position += count
                while self._outstanding > self._adaptive.level + self._chunk:
                    self._less = asyncio.Event()
                    await self._less.wait()
            while self._outstanding:
                self._less = asyncio.Event()
                await self._less.wait()
            group.cancel_scope.cancel()

    def _staff(self, flow: Flow, group: TaskGroup) -> None:
        level = self._adaptive.level
        for _ in range(self._getters, min(self._count, level if self._get_many is None else level // self._chunk or 1)):
            self._getters += 1
            group.start_soon(self._serve, flow, group)

    def _add(self, chunk: _Chunk) -> None:
        self._outstanding += len(chunk.keys)
        calls = 1 if self._get_many is not None else len(chunk.keys)
        chunk.missing = calls
        self._under_way[chunk.position] = chunk
        self._todo.extend([(chunk, k) for k in range(calls)])
        for _ in range(min(calls, len(self._idle))):
            idle = self._idle.popleft()
            if not idle.done():  # a cancelled task's future is done
                idle.set_result(None)

    async def _serve(self, flow: Flow, group: TaskGroup) -> None:
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None
        while True:
            while not self._todo:
                idle = loop.create_future()
                self._idle.append(idle)
                await idle
            chunk, k = self._todo.popleft()
            if chunk.let_go and k in chunk.let_go:
                continue
            running_charge.set(chunk.charge)
            running_sample.set(RunningSample(flow.key, chunk.positions[k]))
            chunk.getters[k] = this
            got: Any = None
            try:
                got = await (self._one(chunk, k) if self._get_many is None else self._many(chunk, flow.key))
            except asyncio.CancelledError:
                if k not in chunk.let_go:
                    raise
            if chunk.let_go and k in chunk.let_go:  # the result is not needed
                got = None
                this.uncancel()
                continue
            chunk.missing -= 1
            if self._get_many is None:
                chunk.samples[k] = got
            else:
                chunk.samples = got
                k = next((place for place, sample in enumerate(got) if type(sample) is Failure), 0)
                got = got[k]
            if type(got) is Failure:
                self._spoil(flow, chunk, chunk.position + k, got)
            got = None  # drop the reference: a getter may wait long
            # Full: workers are idle, although the maximum number of samples is being read.
            is_full = self._outstanding >= self._adaptive.level and flow.is_starved
            count = 1 if self._get_many is None else len(chunk.keys)
            if self._adaptive.answered(self._now(), count, is_full=is_full):
                self._staff(flow, group)
                self._less.set()
            if not chunk.missing or chunk.failed is not None:
                self._put(flow, chunk)

    def _put(self, flow: Flow, chunk: _Chunk) -> None:
        """Push a finished chunk, or its samples up to a failure that ends a batch."""
        if chunk.position not in self._under_way:
            return  # already pushed
        if chunk.missing:
            if chunk.failed is not None and all(sample is not _NOT_YET for sample in chunk.samples[: chunk.failed + 1]):
                begin, end = chunk.given, chunk.failed + 1
                chunk.given, chunk.failed = end, None
                flow.put(chunk.position + begin, flow.part_of(chunk.samples[begin:end], None))
            return
        del self._under_way[chunk.position]
        part = flow.part_of(chunk.samples[chunk.given :], chunk.charge.claim)
        self._expected.learn(part, chunk.charge.charged)
        flow.put(chunk.position + chunk.given, part)
        chunk.samples, chunk.getters = [], {}  # a getter may hold the chunk for a long time
        self._outstanding -= len(chunk.keys)
        self._less.set()

    def _spoil(self, flow: Flow, chunk: _Chunk, position: int, failure: Failure) -> None:
        """Handle a failure. If it is raised, the remaining samples of its batch are useless."""
        end = flow.batch_end(position)
        if end is None:
            return
        if chunk.failed is None and position >= chunk.position + chunk.given:
            chunk.failed = position - chunk.position
        if end > max(self._spoilt[0], position + 1):
            self._spoilt = end, failure
        self._let_go(flow, position + 1, end, failure)

    def _let_go(self, flow: Flow, start: int, stop: int, failure: Failure) -> None:
        """Stop reading the samples [start, stop). They get `failure`."""
        over = [c for c in self._under_way.values() if c.position < stop and c.position + len(c.keys) > start]
        for chunk in over if start < stop else ():
            if self._get_many is None:
                calls = range(max(0, start - chunk.position), min(len(chunk.keys), stop - chunk.position))
            else:
                calls = range(start <= chunk.position)
            for k in calls:
                if chunk.samples[k] is _NOT_YET:
                    last = k + 1 if self._get_many is None else len(chunk.keys)
                    chunk.samples[k:last] = [failure] * (last - k)
                    chunk.missing -= 1
                    chunk.let_go.add(k)
                    if k in chunk.getters:
                        chunk.getters.pop(k).cancel()
            if not chunk.missing:
                self._put(flow, chunk)

    async def _one(self, chunk: _Chunk, k: int) -> object:
        try:
            return await self._get(chunk.keys[k])
        except BaseException as error:
            if is_ours(error):
                raise
            origin = Origin("fetch", chunk.positions[k], repr(chunk.keys[k]))
            error.add_note(origin.note)
            return Failure(self._pack_error(error, origin))

    async def _many(self, chunk: _Chunk, key: int) -> list[object]:
        assert self._get_many is not None
        try:
            samples = list(await self._get_many(chunk.keys))
            if len(samples) != len(chunk.keys):
                raise ValueError(f"aget_many gave {len(samples)} samples for {len(chunk.keys)} keys")
            return samples
        except BaseException as error:
            if is_ours(error):
                raise
            if self._again:
                return await self._each(chunk, key)
            error.add_note(
                f"stage: fetch; samples from {chunk.positions[0]} of the epoch on; keys {list(chunk.keys)!r:.200}"
            )
            return [Failure(self._pack_error(error))] * len(chunk.keys)

    async def _each(self, chunk: _Chunk, key: int) -> list[object]:
        async def one(k: int) -> object:
            running_sample.set(RunningSample(key, chunk.positions[k]))
            return await self._one(chunk, k)

        return await asyncio.gather(*map(one, range(len(chunk.keys))))


class _Chunk:
    def __init__(self, position: int, keys: Sequence[object], positions: Sequence[int], charge: Charge) -> None:
        self.position, self.keys, self.positions, self.charge = position, keys, positions, charge
        self.samples: list[object] = [_NOT_YET] * len(keys)
        self.missing = 0  # calls
        self.given = 0  # samples pushed early, up to a failure
        self.failed: int | None = None  # index of a failure, until it is pushed
        self.getters: dict[int, asyncio.Task[object]] = {}  # by their last call
        self.let_go: set[int] = set()  # calls whose samples are not needed any more


class KeyFeed:
    """Keys drawn elsewhere, batch by batch. Workers read the samples."""

    def __init__(self, part_of: Callable[[list[object]], Part]) -> None:
        self._part_of = part_of
        self._waiting: deque[list[object] | None] = deque()
        self._position = 0  # position of the next key
        self._flow: Flow | None = None  # set while running
        self._ended: asyncio.Future[None]

    def add(self, keys: list[object] | None) -> None:
        """Add the keys of the next batch, or None at the end. To be called on the loop."""
        self._waiting.append(keys)
        if self._flow is not None:
            self._put(self._flow)

    def mark(self, position: int) -> None:
        return None

    async def run(self, flow: Flow) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._flow = flow
        try:
            self._put(flow)
            await self._ended
        finally:
            self._flow = None

    def _put(self, flow: Flow) -> None:
        """Push the added keys immediately, as waking a task takes longer."""
        try:
            while self._waiting and not self._ended.done():
                keys = self._waiting.popleft()
                if keys is None:
                    self._ended.set_result(None)
                    return
                part = self._part_of(keys)
                flow.cut(len(keys))
                flow.put(self._position, part)
                self._position += len(keys)
        except Exception as error:
            self._ended.set_exception(error)


_EXPECTED_BYTES = 65536  # of a sample, before the first


class Expectation:
    """Mean size of the samples so far."""

    def __init__(self) -> None:
        self._samples, self._nbytes = 1, _EXPECTED_BYTES

    def of(self, count: int) -> int:
        return count * self._nbytes // self._samples

    def learn(self, part: Part, charged: int) -> None:
        """Add samples. Their size is that of their part, or the bytes charged during the read."""
        nbytes = part.lease.size if isinstance(part, PackedPart) else max(charged, getattr(part, "nbytes", 0))
        if nbytes:
            if self._samples == 1:
                self._nbytes = 0
            self._samples += part.count
            self._nbytes += nbytes


class Charge:
    """The claim of a chunk's samples: the estimated bytes, or more once reads report sizes."""

    def __init__(self, flow: Flow, claim: Claim, expected: int, position: int) -> None:
        self._flow, self.claim, self._granted, self._position = flow, claim, expected, position
        self.charged = 0

    def __call__(self, nbytes: int) -> Awaitable[None] | None:
        self.charged += nbytes
        missing = self.charged - self._granted
        # Reads that continue after the sample was emitted are not charged.
        if missing <= 0 or not self.claim.holders:
            return None
        self._granted = self.charged  # set now, so that no other call requests these bytes
        return self._enlarge(missing)

    async def _enlarge(self, missing: int) -> None:
        try:
            await self._flow.enlarge(self.claim, missing, self._position)
        except BaseException:
            self._granted -= missing
            raise
