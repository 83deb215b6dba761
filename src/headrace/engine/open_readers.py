"""Producers of each epoch's samples: by number, by shard, or from an iterator."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from headrace._util.context import RunningSample, is_ours, part_position, running_charge, running_reader, running_sample
from headrace._util.sample_ranges import Scanner
from headrace.dataset.asynchronous import (
    Asked,
    AsyncDataset,
    AsyncIterableDataset,
    LoopSession,
    ShardInfo,
    is_built_in,
    running_shard,
)
from headrace.engine.epoch_plan import EpochPlan
from headrace.errors import LoaderClosedError, OptionError
from headrace.fetch import Reader
from headrace.options import Settings, Skip
from headrace.order.cursor import Cursor
from headrace.order.orders import ENDLESS, Rounds
from headrace.order.permutation import draw, sample_seed, window_order
from headrace.order.steps import Steps
from headrace.pipeline.pipeline import Ordering, Pipeline
from headrace.readers.by_key import ChunkSizes, KeyProducer
from headrace.torch_compat import serialize
from headrace.types import Ints
from headrace.workers.failures import Failure
from headrace.workers.tasks import NO_STEP, Step

if TYPE_CHECKING:
    from headrace.engine.epoch_builder import EpochBuilder
    from headrace.formats.compression import Decompressor
    from headrace.order.packed_rows import PackedRows
    from headrace.readers.from_iterator import IterProducer, Resumable
    from headrace.readers.indexed_shards import IndexedShardProducer, Members
    from headrace.readers.sequential import Expected, ShardProducer, ShuffleBuffer

WINDOW_SAMPLES = 2048  # for shards without an index
_PLANNED_MOST = 20_000  # documents of packed rows: more than a window, so that two are read at once
WINDOW_BYTES = 64 * 2**20
_BUFFER_SAMPLES = 4096
_PLANNED_AT_ONCE = 4096
_AHEAD = 1024  # positions computed at once
_LOOK_S = 0.5  # interval of checks for a closed loop, which sends no notification
_END = object()

running_settings: ContextVar[Settings] = ContextVar("headrace_running_settings")
"""Options of the loader whose iterable data set is running. Set where `aiter` runs."""


class EpochIO:
    """Ways to read the samples of one epoch. A source of samples uses one of them.

    Args:
        gathered: Estimated number of samples made per batch.
        chunk: Number of samples passed on together.
        rows: Determine the samples to read next, if documents are packed row by row.
    """

    def __init__(
        self,
        builder: EpochBuilder,
        plan: EpochPlan,
        reader: Reader,
        calls: TrainerCalls,
        gathered: int,
        chunk: int,
        rows: PackedRows | None,
    ) -> None:
        self.pipeline, self._settings, self.planning = builder.pipeline, builder.settings, builder.planning
        self._prefix, self._meter, self._adaptive = builder.prefix, builder.meter, builder.adaptive
        self._plan, self._reader, self._calls, self._gathered, self._chunk = plan, reader, calls, gathered, chunk
        self._steps: Steps | PackedRows = rows or plan.steps
        self._planned_at_once = 0 if rows else _PLANNED_AT_ONCE  # rows determine the next document late

    def iterated(self, data: AsyncIterableDataset) -> IterProducer:
        from headrace.readers.from_iterator import IterProducer

        plan = self._plan
        begin, take = plan.begin.cursor.position, _left_to_take(self.pipeline.order, plan)
        meter, pipeline, settings = self._meter, self.pipeline, self._settings
        of_caller = self._calls.samples_of(data) if data.loop == "caller" else None
        resumable: Resumable | None = None

        def make() -> AsyncIterator[object]:
            from headrace.fetch.meter import WatchedIterator
            from headrace.readers.from_iterator import Resumable

            nonlocal resumable
            running_settings.set(settings)
            mine = LoopSession(data).data  # opened on the engine's loop
            sharing = Sharing(pipeline, plan, of_caller or mine.aiter)
            resumable = Resumable(mine, sharing.open, plan.begin.mark if plan.is_resumed else None, take, begin)
            opened: AsyncIterator[object] = resumable.open()  # now, as snapshots need an open iterator
            if data.loop != "caller" and not is_built_in(data):
                opened = WatchedIterator(opened, meter.held(f"{type(data).__name__}.aiter"))
            return opened

        return IterProducer(
            make,
            snapshot=lambda: resumable and resumable.snapshot(),
            take=take,
            buffer=self._buffer(),
            begin=begin,
            done=plan.begin.received,
            batch_size=plan.batch_size,
            chunk=self._chunk,
            pack_error=serialize.pack_error,
        )

    def keys(
        self,
        data: AsyncDataset,
        get: Callable[[Any], Awaitable[object]],
        many: Callable[[Sequence[Any]], Awaitable[Sequence[object]]] | None,
    ) -> KeyProducer:
        """Read samples by the keys of `data`: one at a time, or several at once with `many`."""
        order, steps, planning = self._plan.order, self._steps, self.planning
        name = type(data).__name__
        many = many if not self._prefix else None
        if not is_built_in(data):
            get = self._meter.held(f"{name}.aget").watched(get)
            many = many and self._meter.held(f"{name}.aget_many").watched(many)
        get = get if not self._prefix else partial(get_through, get, self._prefix)
        keys = data.keys()
        if len(keys) != len(data):
            raise OptionError(f"{name} has {len(data)} samples, but its keys() are {len(keys)}")
        assert order is not None
        assert planning is not None
        by_number = planning.keys(keys)

        def some(start: int, stop: int) -> tuple[list[int], list[int]]:
            positions = steps.positions(start, stop)
            return positions.tolist(), planning.numbers(order, positions).tolist()

        some_ahead = _Ahead(some, steps.count, self._planned_at_once)

        def keys_of(start: int, stop: int) -> tuple[list[object], Sequence[int]]:
            positions, numbers = some_ahead.at(start, stop)
            return [by_number[k] for k in numbers], positions

        return KeyProducer(
            steps.count,
            keys_of,
            get,
            many,
            adaptive=self._adaptive,
            chunks=ChunkSizes(self._gathered, self._chunk, many is None and self._gathered > self._plan.batch_size),
            pack_error=serialize.pack_error,
            again=is_built_in(data) or self._gathered > self._plan.batch_size,
        )

    def ranges(self, members: Callable[[int, Ints], Awaitable[Members]]) -> IndexedShardProducer:
        """Read shard by shard, at byte ranges known from an index."""
        from headrace.readers.indexed_shards import Bounds, IndexedShardProducer

        fetch, plan = self._settings.fetch, self._plan
        assert plan.order is not None
        assert self.planning is not None
        return IndexedShardProducer(
            self.planning.reads(plan.order, self._steps),
            self._reader,
            members,
            bounds=Bounds(fetch.gap_bytes, fetch.range_bytes),
            chosen=self._reader.meter.count_shard,
            pack_error=serialize.pack_error,
            planned_most=None if self._steps.first_window is None else _PLANNED_MOST,
        )

    def shards(
        self,
        scanner: Callable[[str], Scanner],
        unpacks: Callable[[str], Decompressor | None],
        expected: Callable[[int], Awaitable[Expected]] | None,
    ) -> ShardProducer:
        """Read shards sequentially.

        Args:
            scanner: Finds the samples of the shard at a URL.
            unpacks: Decompresses the shard at a URL. None for an uncompressed shard.
            expected: Index entry of the shard with a number. None without an index.
        """
        from headrace.readers.sequential import ResumeToken, ShardPlan, ShardProducer, ShardReading, ShuffleWindow

        pipeline, settings, plan, shuffle = self.pipeline, self._settings, self._plan, self.pipeline.order.shuffle
        mark = ResumeToken() if plan.begin.mark is None else ResumeToken(*plan.begin.mark)
        seed = None if shuffle is None else shuffle.seed_or(settings.seed)
        window = None
        if shuffle is not None and seed is not None and shuffle.by in ("auto", "window"):
            order = partial(window_order, seed=seed, epoch=plan.number)
            window = ShuffleWindow(shuffle.window or WINDOW_SAMPLES, WINDOW_BYTES, lambda n, k: order(n, window=k))
        times, _ = pipeline.passes
        urls, rank, world = pipeline.source.urls, plan.rank, plan.world
        if plan.counts is not None:
            rank, world = 0, 1
        rounds = Rounds(urls, seed, plan.number, times, rank, world, may_be_empty=plan.is_uneven and times is not None)
        stop: tuple[int, int] | None = None
        if plan.counts is not None and plan.share is not None:
            first, count = plan.share.before, plan.share.whole
            stop = rounds.at(first + count, plan.counts)
            if plan.begin.mark is None:
                mark = ResumeToken(*rounds.at(first, plan.counts))
        return ShardProducer(
            ShardReading(
                reader=self._reader,
                scanner=scanner,
                unpacks=unpacks,
                expected=None if expected is None else lambda turn: expected(rounds.shard(turn)),
                range_bytes=settings.fetch.range_bytes,
            ),
            ShardPlan(
                shards=rounds.from_turn(mark.shard, stop),
                window=window,
                buffer=self._buffer(),
                take=_left_to_take(pipeline.order, plan),
                in_round=rounds.count,
                is_endless=times is None,
                begin=mark,
                done=plan.begin.received,
                stop=stop,
            ),
            serialize.pack_error,
        )

    def _buffer(self) -> ShuffleBuffer | None:
        from headrace.readers.sequential import ShuffleBuffer

        shuffle, plan = self.pipeline.order.shuffle, self._plan
        if shuffle is None or shuffle.by != "buffer":
            return None
        key = draw("buffer", shuffle.seed_or(self._settings.seed), plan.number, plan.rank)
        return ShuffleBuffer(shuffle.buffer or _BUFFER_SAMPLES, key)


def described_as_read(order: Ordering) -> list[str]:
    """Describe the order of samples without numbers, or raise OptionError if it needs numbers."""
    shuffle, text = order.shuffle, ""
    if shuffle is not None:
        shuffle.check_as_read()
        by, size = "window" if shuffle.by == "auto" else shuffle.by, ""
        if by == "window":
            size = f", samples={shuffle.window or WINDOW_SAMPLES}, bytes={WINDOW_BYTES}"
        elif by == "buffer":
            size = f", samples={shuffle.buffer or _BUFFER_SAMPLES}"
        text = shuffle.in_words(by, size)
    return order.described(text)


class _Ahead:
    """Computes positions and numbers of a plan in blocks."""

    def __init__(self, some: Callable[[int, int], tuple[list[int], list[int]]], count: int, at_once: int) -> None:
        self._some, self._count, self._at_once = some, count, at_once
        self._start, self._positions, self._numbers = 0, list[int](), list[int]()

    def at(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        if not self._start <= start <= stop <= self._start + len(self._numbers):
            self._start = start
            self._positions, self._numbers = self._some(start, min(self._count, max(stop, start + self._at_once)))
        here = slice(start - self._start, stop - self._start)
        return self._positions[here], self._numbers[here]


def _left_to_take(order: Ordering, plan: EpochPlan) -> int | None:
    """Return the maximum number of samples to read from the plan's start, on this rank."""
    most = order.most
    if plan.share is not None and plan.keeps_count:
        most = plan.begin.resplit.rank_samples + plan.share.whole
    return None if most is None else most - plan.begin.cursor.position


async def apply(steps: Sequence[Step], sample: object, position: int) -> list[object]:
    """Run asynchronous steps on a sample. The result may be empty or have many samples."""
    if isinstance(sample, Failure):
        return [sample]
    at, source = NO_STEP, sample
    try:
        for index, step in enumerate(steps, 1):
            at = step
            result = await step.fn(sample)
            if step.kind == "many":
                return await _each(steps[index:], result, position)
            if step.kind == "map":
                sample = result
            elif not result:
                return []
    except BaseException as error:
        if is_ours(error):
            raise
        from headrace.workers.chain_runner import note_origin

        origin = note_origin(error, at, source, position, None)
        return [Failure(serialize.pack_error(error, origin))]
    return [sample]


async def _each(steps: Sequence[Step], parts: Sequence[object], position: int) -> list[object]:
    """Run the remaining steps on each of the samples that a step made from one."""
    running, made = running_sample.get(), list[object]()
    for number, part in enumerate(parts):
        at = part_position(position, number, len(steps))
        if running is not None:
            running_sample.set(RunningSample(running.key, at))
        made += await apply(steps, part, at)
    return made


async def get_through(get: Callable[[Any], Awaitable[object]], steps: Sequence[Step], key: object) -> object:
    sample = await get(key)
    for step in steps:
        try:
            sample = await step.fn(sample)
        except Exception as error:
            error.add_note(f"stage: {step.told}")
            raise
    return sample


class TrainerCalls:
    """The user's `hr.Skip(when=)`, and the samples of a data set whose `loop` is "caller".

    Args:
        policy: Referenced weakly: the user's function may refer to the loader, and the engine's thread holds this
            object during an epoch.
        loop: Loop of the `async for`, if any.
    """

    def __init__(self, policy: Skip | None, loop: asyncio.AbstractEventLoop | None) -> None:
        self._policy = None if policy is None else weakref.ref(policy)
        self._loop = loop

    def decide(self, error: BaseException) -> object:
        """Return the decision of `hr.Skip(when=)` on a failed sample. False once the loader is gone.

        An exception raised here replaces the batch.
        """
        policy = None if self._policy is None else self._policy()
        return policy is not None and policy.when is not None and policy.when(error)

    def samples_of(self, data: AsyncIterableDataset) -> Callable[[], AsyncIterator[object]]:
        """Return a factory of iterators over a data set whose `loop` is "caller".

        Raises:
            OptionError: the loader was not iterated over with `async for`.
        """
        if self._loop is None:
            raise OptionError(f"{type(data).__name__}.loop is 'caller': it can be used with `async for` only")
        return partial(from_caller, data, self._loop)


async def from_caller(source: AsyncIterableDataset, loop: asyncio.AbstractEventLoop) -> AsyncIterator[object]:
    """Yield the samples of `source.aiter()`, which runs on another loop.

    Raises:
        LoaderClosedError: that loop has ended before the samples.
    """
    iterator = source.aiter()
    asked: Future[object] | None = None
    is_lost = is_users = False

    async def following() -> object:
        nonlocal is_lost, is_users
        leave()
        is_lost = getattr(iterator, "ag_frame", iterator) is None  # a generator closed by its loop
        if is_lost:
            return None
        try:
            return await anext(iterator, _END)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            is_users = task is not None and not task.cancelling()  # `asyncio.run` cancels remaining tasks
            raise

    def leave() -> None:
        running_reader.set(None)  # these belong to the engine's loop
        running_charge.set(None)

    async def close() -> None:
        leave()
        with contextlib.suppress(RuntimeError):  # a cancelled step is still running and ends the generator
            await iterator.aclose()  # type: ignore[attr-defined]

    async def watch() -> None:
        while not loop.is_closed():  # noqa: ASYNC110 (loops have no event for it)
            await asyncio.sleep(_LOOK_S)
        if asked is not None and not asked.done():
            asked.set_exception(RuntimeError("the loop is closed"))  # no other code would set a result

    watching = asyncio.create_task(watch())
    try:
        while True:
            asking, sample = following(), None
            try:
                asked = asyncio.run_coroutine_threadsafe(asking, loop)
                sample = await asyncio.shield(asyncio.wrap_future(asked))  # a closed loop cannot be cancelled
            except asyncio.CancelledError as error:
                if is_ours(error) or is_users:
                    raise
                is_lost = True
            except RuntimeError:
                if not loop.is_closed():
                    raise
                is_lost = True
            finally:
                if loop.is_closed():
                    asking.close()  # it may never have started
                elif asked is not None:
                    asked.cancel()
            if is_lost:
                raise LoaderClosedError(
                    f"{type(source).__name__}.loop is 'caller', and the event loop of the `async for` has ended before "
                    "its samples have: iterate in one loop to their end, or start a new iteration in another one"
                )
            if sample is _END:
                return
            yield sample
    finally:
        watching.cancel()
        if hasattr(iterator, "aclose") and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(lambda: loop.create_task(close()))  # not awaited: it may wait for this task


class Sharing:
    """Makes the iterators of an iterable data set for one rank and epoch."""

    def __init__(self, pipeline: Pipeline, plan: EpochPlan, samples: Callable[[], AsyncIterator[object]]) -> None:
        source = pipeline.source
        self._source, self._plan, self._samples = source, plan, samples
        self._is_by_position = plan.world > 1 and source.ranks_by == "position"
        self._steps: Steps | None = None
        if self._is_by_position:
            steps, count = plan.share or plan.steps, ENDLESS
            if plan.share is not None and pipeline.keeps_count:
                count = steps.begin.position + steps.left
            self._steps = Steps(Cursor.at(), count, steps.size, steps.tail, plan.rank, plan.world)

    def open(self, number: int, later: int = 0) -> AsyncIterator[object]:
        """Return an iterator over the samples of this rank.

        Args:
            number: Number of the first sample on this rank. The data set is positioned before it.
            later: Number of epochs after the plan's.
        """
        plan, epoch = self._plan, self._plan.number + later
        rank, world = (0, 1) if self._is_by_position else (plan.rank, plan.world)
        asked = Asked(ShardInfo(rank, world, epoch, plan.facts.seed))
        running_shard.set(asked)
        samples = self._samples()
        if self._steps is not None:
            return AtPositions(samples, self._steps, number, sample_seed(plan.facts.seed, epoch))
        return samples if world == 1 else OfItself(samples, asked, name_of(self._source.data))


class _Around:
    """An iterator wrapper that forwards states."""

    forwards: tuple[str, ...] = ("state_dict", "load_state_dict", "__snapshot__", "aclose")

    def __init__(self, samples: AsyncIterator[object]) -> None:
        self._samples = samples

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> object:
        if name not in self.forwards:
            raise AttributeError(name)
        return getattr(self._samples, name)


class OfItself(_Around):
    """Samples of a data set that divides itself by rank. Checks that it asked for its rank."""

    forwards = (*_Around.forwards, "__next_several__")  # after the first sample, which is checked

    def __init__(self, samples: AsyncIterator[object], asked: Asked, name: str) -> None:
        super().__init__(samples)
        self._asked, self._name = asked, name

    async def __anext__(self) -> object:
        sample = await anext(self._samples)
        if not self._asked.is_asked:
            raise OptionError(
                f"{self._name} has ranks_by='shard_info', but has given its first sample of the epoch without asking "
                "hr.shard_info(): each rank may get the same ones; ask it in aiter(), each time"
            )
        return sample


class AtPositions(_Around):
    """Selects one rank's positions from samples that are equal on all ranks.

    Args:
        samples: Continues after the sample before this rank's `number`-th.
        key: Seed of the data set's random numbers, equal on all ranks.
    """

    def __init__(self, samples: AsyncIterator[object], steps: Steps, number: int, key: int) -> None:
        super().__init__(samples)
        self._steps, self._number, self._key = steps, number, key
        self._at = int(steps.positions(number - 1, number)[0]) + 1 if number else 0  # position of the next sample
        self._mine = list[int]()  # next positions of this rank, in reverse order

    async def __anext__(self) -> object:
        if not self._mine:
            stop = min(self._number + _AHEAD, self._steps.count)
            if stop == self._number:
                raise StopAsyncIteration
            self._mine = self._steps.positions(self._number, stop).tolist()[::-1]
            self._number = stop
        mine, sample = self._mine.pop(), None
        while self._at <= mine:
            running_sample.set(RunningSample(self._key, self._at))
            sample = await anext(self._samples)
            self._at += 1
        return sample


def name_of(source: object) -> str:
    return type(source).__name__.lstrip("_")
