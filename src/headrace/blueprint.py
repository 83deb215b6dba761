"""What a loader runs: the chains of its workers, how samples become batches, and the source of each epoch.

It holds the user's data set and functions. It belongs to the loader and its iterators alone: what runs in the engine's
thread must not keep alive what may refer to the loader itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.mixture import Mixture
from headrace.datasets.operators import EpochOf, Shuffle, Take, ToTuple, is_async
from headrace.datasets.shards import IndexedShards, Shards
from headrace.datasets.stream import Files, Pipeline
from headrace.epoch_plan import EpochPlan
from headrace.errors import OptionError
from headrace.fetch import Reader
from headrace.fetch.growth import Growth
from headrace.fetch.keys import USERS_OWN, IterSource, KeySource, is_ours
from headrace.fetch.members import Bounds
from headrace.fetch.resumable import Resumable
from headrace.fetch.shards import Mark, ShardSource, Window
from headrace.fetch.shuffle_buffer import ShuffleBuffer
from headrace.fetch.visits import VisitSource
from headrace.formats.columns import ColumnDecoder
from headrace.formats.compression.decompressor import Decompressor, kind_of
from headrace.formats.limits import Limits
from headrace.formats.tar.scanner import TarScanner
from headrace.formats.values import Decoder
from headrace.machinery import Machinery
from headrace.options import Settings
from headrace.plan import Rounds, draw, window_order
from headrace.planning import Planning
from headrace.scheduler.recipe import LoopStage, Recipe, WorkStage
from headrace.tasks import Chain, Failure, Part, Source, Step
from headrace.torch_compat import packing
from headrace.types import RunningSample, running_charge, running_reader, running_sample
from headrace.work.workbench import note_origin, open_part, stage_key

_FINAL = 1  # the number of the chain that makes batches
_PLANNED_AT_ONCE = 4096
WINDOW_SAMPLES = 2048  # of shards without an index
WINDOW_BYTES = 64 * 2**20
_BUFFER_SAMPLES = 4096
_LOOK_AHEAD = 2  # as many samples as may be on their way, times this, may lie ready beyond what may be sent


class Blueprint:
    """A pipeline with its settings.

    Args:
        wrap: makes a part of Python objects.

    Attributes:
        chains: what workers do, by number.
        recipe: how samples become batches.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings, wrap: Callable[[list[Any]], Part]) -> None:
        self._pipeline, self._settings, self._wrap = pipeline, settings, wrap
        self._growth = Growth(settings.first_reads, settings.fetch_concurrency)
        self._prefix, self.chains, inner = _stages(pipeline, settings)
        self.recipe = Recipe(
            inner=tuple(self._inner_stage(number, stage) for number, stage in enumerate(inner, _FINAL + 1)),
            chain=_FINAL,
            batch_size=settings.batch_size,
            workers=max(1, settings.num_workers),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            look_ahead=_LOOK_AHEAD * settings.first_reads,
            in_order=settings.in_order,
            use_slots=settings.use_slots,
            is_adaptive=not inner,  # what the inner stages take is not what is learned
            depth=settings.prefetch_factor,
        )

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """What the source's store is told."""
        source = self._pipeline.source
        return source.storage_options if isinstance(source, Shards | IndexedShards | Files | Mixture) else None

    @property
    def _is_by_shard(self) -> bool:
        source = self._pipeline.source
        return isinstance(source, Shards | IndexedShards) and not self._pipeline.is_by_number

    @property
    def opens(self) -> AsyncDataset | AsyncIterableDataset | None:
        """The data set that is opened and closed on the engine's loop, if there is one."""
        source = self._pipeline.source
        return None if isinstance(source, Shards) else source

    @property
    def window_bytes(self) -> int:
        """How many bytes a source must be able to hold: two windows of a shuffle."""
        return 2 * WINDOW_BYTES if self._is_by_shard else 0

    def _inner_stage(self, number: int, stage: int | tuple[Step, ...]) -> WorkStage | LoopStage:
        return WorkStage(stage) if isinstance(stage, int) else LoopStage(partial(self._through_loop, number, stage))

    async def _through_loop(
        self, number: int, steps: Sequence[Step], part: Part, positions: Sequence[int], key: int
    ) -> tuple[Part, Sequence[int]]:
        """All samples of a part through asynchronous steps, at once; which of them are left."""
        samples: list[Any] = open_part(part)
        part.release()
        kept = [True] * len(samples)

        async def one(k: int) -> None:
            running_sample.set(RunningSample(stage_key(key, number), positions[k]))
            samples[k], kept[k] = await _apply(steps, samples[k], positions[k])

        async with anyio.create_task_group() as group:
            for k in range(len(samples)):
                group.start_soon(one, k)
        left = [k for k, keep in enumerate(kept) if keep]
        return self._wrap([samples[k] for k in left]), left

    async def prepare(self, machinery: Machinery) -> None:
        """Teach the workers their chains, and open the data set; on the engine's loop, before the first epoch."""
        for number, chain in self.chains.items():
            machinery.learn(number, chain)
        if self.opens is not None:
            await machinery.open(self.opens)

    def source(
        self, plan: EpochPlan, planning: Planning | None, reader: Reader, caller: asyncio.AbstractEventLoop | None
    ) -> Source:
        """The samples of an epoch.

        Args:
            plan: the epoch's.
            planning: knows where the samples at its positions lie; None: they have no numbers.
            reader: reads bytes.
            caller: the loop of an `async for`.
        """
        source = self._pipeline.source
        if planning is None:
            if isinstance(source, Shards | IndexedShards):
                return self._shard_source(source, plan, reader)
            assert isinstance(source, AsyncIterableDataset)
            return self._iter_source(source, plan, caller)
        assert isinstance(source, AsyncDataset)
        assert plan.order is not None
        if isinstance(source, IndexedShards) and self._is_by_shard:
            fetch = self._settings.fetch
            return VisitSource(
                planning.reads(plan.order, plan.steps),
                reader,
                partial(source.members, wanted=self._pipeline.wanted),
                bounds=Bounds(fetch.gap_bytes, fetch.range_bytes),
                chosen=reader.meter.count_shard,
                pack_error=packing.pack_error,
            )
        return self._key_source(source, plan, planning)

    def _iter_source(
        self, source: AsyncIterableDataset, plan: EpochPlan, caller: asyncio.AbstractEventLoop | None
    ) -> IterSource:
        samples = source.aiter
        if source.loop == "caller":
            if caller is None:
                raise OptionError(f"{type(source).__name__}.loop is 'caller': it can be used with `async for` only")
            samples = partial(_from_caller, source.aiter, caller)
        begin, take = plan.begin.cursor.position, _left_to_take(self._pipeline.order, plan)
        resumable = Resumable(source, samples, plan.begin.mark if plan.is_resumed else None, take)

        def make() -> AsyncIterator[Any]:
            opened = resumable.open()  # now: snapshots are of what is open
            return opened if not self._prefix else _iterate_through(opened, self._prefix, begin)

        return IterSource(
            make,
            snapshot=resumable.snapshot,
            take=take,
            buffer=self._buffer(plan),
            begin=begin,
            done=plan.begin.done,
            batch_size=plan.batch_size,
            chunk=self.recipe.chunk(plan.batch_size),
            pack_error=packing.pack_error,
        )

    def _key_source(self, source: AsyncDataset, plan: EpochPlan, planning: Planning) -> KeySource:
        pipeline, order, steps = self._pipeline, plan.order, plan.steps
        get = source.aget
        if isinstance(source, IndexedShards):
            get = partial(source.get, wanted=pipeline.wanted)
        many = getattr(source, "aget_many", None) if not self._prefix else None
        get = get if not self._prefix else partial(_get_through, get, self._prefix)
        keys = source.keys()
        if len(keys) != len(source):
            raise OptionError(f"{type(source).__name__} has {len(source)} samples, but its keys() are {len(keys)}")
        assert order is not None

        def some(start: int, stop: int) -> tuple[list[int], list[int]]:
            positions = steps.positions(start, stop)
            return positions.tolist(), planning.numbers(order, positions).tolist()

        some_ahead = _Ahead(some, steps.count)

        def keys_of(start: int, stop: int) -> tuple[list[Any], Sequence[int]]:
            positions, numbers = some_ahead.at(start, stop)
            return [keys[k] for k in numbers], positions

        return KeySource(
            steps.count,
            keys_of,
            get,
            many,
            growth=self._growth,
            batch_size=plan.batch_size,
            chunk=self.recipe.chunk(plan.batch_size),
            pack_error=packing.pack_error,
        )

    def _shard_source(self, source: Shards | IndexedShards, plan: EpochPlan, reader: Reader) -> ShardSource:
        pipeline, settings, shuffle = self._pipeline, self._settings, self._pipeline.shuffle
        mark = Mark() if plan.begin.mark is None else Mark(*plan.begin.mark)
        seed = None if shuffle is None else shuffle.seed_or(settings.seed)
        window = None
        if shuffle is not None and seed is not None and shuffle.by in ("auto", "window"):
            order = partial(window_order, seed=seed, epoch=plan.number)
            window = Window(shuffle.window or WINDOW_SAMPLES, WINDOW_BYTES, lambda n, k: order(n, window=k))
        limits, expected = source.limits, None
        times, _ = pipeline.passes
        rounds = Rounds(source.urls, seed, plan.number, times, plan.rank, plan.world)
        if isinstance(source, IndexedShards):
            expected = lambda turn: source.expected(rounds.shard(turn))
        return ShardSource(
            rounds.from_turn(mark.shard),
            reader,
            partial(TarScanner, limits=limits),
            partial(_unpacks, limits),
            expected=expected,
            range_bytes=settings.fetch.range_bytes,
            window=window,
            buffer=self._buffer(plan),
            take=_left_to_take(pipeline.order, plan),
            in_round=rounds.count,
            begin=mark,
            done=plan.begin.done,
            pack_error=packing.pack_error,
        )

    def _buffer(self, plan: EpochPlan) -> ShuffleBuffer | None:
        shuffle = self._pipeline.shuffle
        if shuffle is None or shuffle.by != "buffer":
            return None
        key = draw("buffer", shuffle.seed_or(self._settings.seed), plan.number, plan.rank)
        return ShuffleBuffer(shuffle.buffer or _BUFFER_SAMPLES, key)


def told_as_read(operators: Sequence[Any]) -> list[str]:
    """The operators that make the order of samples without numbers, as a state names them."""
    told = []
    for operator in operators:
        if not isinstance(operator, Shuffle):
            told.append(f"{type(operator).__name__.lower()}({getattr(operator, operator.__slots__[0])})")
            continue
        seed = "" if operator.seed is None else f", seed={operator.seed}"
        by, size = "window" if operator.by == "auto" else operator.by, ""
        if by == "window":
            size = f", samples={operator.window or WINDOW_SAMPLES}, bytes={WINDOW_BYTES}"
        elif by == "buffer":
            size = f", samples={operator.buffer or _BUFFER_SAMPLES}"
        told.append(f"shuffle({by}{size}{seed})")
    return told


class _Ahead:
    """What a plan says, some thousand positions at a time."""

    def __init__(self, some: Callable[[int, int], tuple[list[int], list[int]]], count: int) -> None:
        self._some, self._count = some, count
        self._start, self._positions, self._numbers = 0, list[int](), list[int]()

    def at(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        if not self._start <= start <= stop <= self._start + len(self._numbers):
            self._start = start
            self._positions, self._numbers = self._some(start, min(self._count, max(stop, start + _PLANNED_AT_ONCE)))
        here = slice(start - self._start, stop - self._start)
        return self._positions[here], self._numbers[here]


def _left_to_take(operators: Sequence[Any], plan: EpochPlan) -> int | None:
    """How many samples there are to give at most, from where a plan begins, on this rank."""
    takes = [operator.count for operator in operators if isinstance(operator, Take)]
    epochs = [operator.samples for operator in operators if isinstance(operator, EpochOf)]
    takes += epochs if plan.share is None else [plan.share.whole]
    return min(takes) - plan.begin.cursor.position if takes else None


def _unpacks(limits: Limits, url: str) -> Decompressor | None:
    kind = kind_of(url)
    return None if kind is None else Decompressor(kind, url, limits)


def _stages(
    pipeline: Pipeline, settings: Settings
) -> tuple[tuple[Step, ...], dict[int, Chain], list[int | tuple[Step, ...]]]:
    """(asynchronous steps that the source does itself, the workers' chains, the stages before the last one)."""
    groups = [
        (color, tuple(steps)) for color, steps in itertools.groupby(pipeline.narrowed_steps, lambda s: is_async(s.fn))
    ]
    prefix: tuple[Step, ...] = ()
    if groups and groups[0][0] and (pipeline.is_by_number or isinstance(pipeline.source, AsyncIterableDataset)):
        is_map = all(step.kind == "map" for step in groups[0][1])
        prefix = groups.pop(0)[1] if is_map else ()
    last: tuple[Step, ...] = ()
    if groups and not groups[-1][0] and pipeline.keeps_count:
        last = groups.pop()[1]
    columns = _columns(last) if settings.use_slots else None
    chains = {_FINAL: Chain(last, settings.collate, pipeline.after, settings.init, columns, settings.skips is not None)}
    inner: list[int | tuple[Step, ...]] = []
    for number, (is_on_loop, steps) in enumerate(groups, _FINAL + 1):
        if is_on_loop:
            inner.append(steps)
        else:
            chains[number] = Chain(steps, init=settings.init)
            inner.append(number)
    return prefix, chains, inner


def _columns(steps: Sequence[Step]) -> ColumnDecoder | None:
    """What decodes whole row tables, where the steps are such that it may."""
    functions = [step.fn for step in steps]
    if len(functions) == 2 and isinstance(functions[0], Decoder) and isinstance(functions[1], ToTuple):
        return ColumnDecoder(functions[0], functions[1].names)
    return None


async def _apply(steps: Sequence[Step], sample: Any, position: int) -> tuple[Any, bool]:
    """A sample through asynchronous steps: (what became of it, whether it is kept)."""
    if isinstance(sample, Failure):
        return sample, True
    name, source = "", sample
    try:
        for step in steps:
            name = step.name
            result = await step.fn(sample)
            if step.kind == "map":
                sample = result
            elif not result:
                return None, False
    except USERS_OWN as error:
        if is_ours(error):
            raise
        note_origin(error, name, source, position, None)
        return Failure(packing.pack_error(error)), True
    return sample, True


async def _get_through(get: Callable[[Any], Any], steps: Sequence[Step], key: Any) -> Any:
    sample = await get(key)
    for step in steps:
        try:
            sample = await step.fn(sample)
        except Exception as error:
            error.add_note(f"stage: {step.name}")
            raise
    return sample


async def _iterate_through(samples: AsyncIterator[Any], steps: Sequence[Step], position: int) -> AsyncIterator[Any]:
    try:
        async for sample in samples:
            made, _ = await _apply(steps, sample, position)  # one that fails does not end the others
            yield made
            position += 1
    finally:
        if hasattr(samples, "aclose"):
            await samples.aclose()


async def _from_caller(
    samples: Callable[[], AsyncIterator[Any]], loop: asyncio.AbstractEventLoop
) -> AsyncIterator[Any]:
    """Samples of an iterator that belongs to another loop."""
    iterator = samples()

    async def following() -> Any:
        leave()
        return await anext(iterator, _END)

    def leave() -> None:
        running_reader.set(None)  # they belong to our loop
        running_charge.set(None)

    async def close() -> None:
        leave()
        with contextlib.suppress(RuntimeError):  # what it is in the middle of was cancelled, and ends it
            await iterator.aclose()  # type: ignore[attr-defined]

    try:
        while (sample := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(following(), loop))) is not _END:
            yield sample
    finally:
        if hasattr(iterator, "aclose") and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), loop)  # not awaited: the caller may be waiting for us


_END = object()
