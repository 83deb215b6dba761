"""What a loader runs: the chains of its workers, how samples become batches, and the source of each epoch.

It holds the user's data set and functions. It belongs to the loader and its iterators alone: what runs in the engine's
thread must not keep alive what may refer to the loader itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.operators import WINDOW_BYTES, WINDOW_SAMPLES, Pick, Shuffle, Take, ToTuple, is_async
from headrace.datasets.shards import IndexedShards, Shards, Wanted
from headrace.datasets.stream import Files, Pipeline
from headrace.errors import OptionError
from headrace.fetch import Reader
from headrace.fetch.growth import Growth
from headrace.fetch.keys import USERS_OWN, IterSource, KeySource, is_ours
from headrace.fetch.members import Bounds
from headrace.fetch.shards import ShardSource, Window
from headrace.formats.columns import ColumnDecoder
from headrace.formats.compression.decompressor import Decompressor, kind_of
from headrace.formats.limits import Limits
from headrace.formats.tar.scanner import TarScanner
from headrace.formats.values import Decoder
from headrace.machinery import Machinery
from headrace.options import Settings
from headrace.plan import draw, permutation, window_order
from headrace.scheduler.recipe import LoopStage, Recipe, WorkStage
from headrace.tasks import Chain, Failure, Part, Source, Step
from headrace.torch_compat import packing
from headrace.types import Ints, running_charge, running_reader
from headrace.work.workbench import note_origin, open_part

_FINAL = 1  # the number of the chain that makes batches
_PLANNED_AT_ONCE = 4096
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
            inner=tuple(self._inner_stage(stage) for stage in inner),
            chain=_FINAL,
            batch_size=settings.batch_size,
            workers=max(1, settings.num_workers),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            limit=pipeline.limit,
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
        return source.storage_options if isinstance(source, Shards | IndexedShards | Files) else None

    @property
    def ahead_bytes(self) -> int:
        """How many bytes a source must be able to hold: two windows of a shuffle."""
        is_shuffled = any(isinstance(operator, Shuffle) for operator in self._pipeline.order)
        return 2 * WINDOW_BYTES if is_shuffled and self._is_by_shard else 0

    @property
    def _is_by_shard(self) -> bool:
        source = self._pipeline.source
        return isinstance(source, Shards | IndexedShards) and not self._pipeline.is_by_number

    @property
    def opens(self) -> AsyncDataset | AsyncIterableDataset | None:
        """The data set that is opened and closed on the engine's loop, if there is one."""
        source = self._pipeline.source
        return None if isinstance(source, Shards) else source

    def _inner_stage(self, stage: int | tuple[Step, ...]) -> WorkStage | LoopStage:
        return WorkStage(stage) if isinstance(stage, int) else LoopStage(partial(self._through_loop, stage))

    async def _through_loop(
        self, steps: Sequence[Step], part: Part, positions: Sequence[int]
    ) -> tuple[Part, Sequence[int]]:
        """All samples of a part through asynchronous steps, at once."""
        samples: list[Any] = open_part(part)
        part.release()
        kept = [True] * len(samples)

        async def one(k: int) -> None:
            samples[k], kept[k] = await _apply(steps, samples[k], positions[k])

        async with anyio.create_task_group() as group:
            for k in range(len(samples)):
                group.start_soon(one, k)
        left = [k for k, keep in enumerate(kept) if keep]
        return self._wrap([samples[k] for k in left]), [positions[k] for k in left]

    async def prepare(self, machinery: Machinery) -> None:
        """Teach the workers their chains, and open the data set; on the engine's loop, before the first epoch."""
        for number, chain in self.chains.items():
            machinery.learn(number, chain)
        machinery.read_ahead(self.ahead_bytes)
        if self.opens is not None:
            await machinery.open(self.opens)

    def source(self, epoch: int, reader: Reader, caller: asyncio.AbstractEventLoop | None) -> Source:
        """The samples of an epoch.

        Args:
            reader: reads bytes.
            caller: the loop of an `async for`.
        """
        source, settings = self._pipeline.source, self._settings
        if isinstance(source, Shards | IndexedShards) and self._is_by_shard:
            return self._shard_source(source, epoch, reader)
        assert not isinstance(source, Shards)
        chunk = self.recipe.chunk(settings.batch_size)
        if isinstance(source, AsyncDataset):
            return self._key_source(source, epoch, chunk)
        samples = source.aiter
        if source.loop == "caller":
            if caller is None:
                raise OptionError(f"{type(source).__name__}.loop is 'caller': it can be used with `async for` only")
            samples = partial(_from_caller, source.aiter, caller)
        if self._prefix:
            samples = partial(_iterate_through, samples, self._prefix)
        return IterSource(
            samples,
            take=_taken(self._pipeline.order),
            batch_size=settings.batch_size,
            chunk=chunk,
            pack_error=packing.pack_error,
        )

    def _key_source(self, source: AsyncDataset, epoch: int, chunk: int) -> KeySource:
        settings, pipeline = self._settings, self._pipeline
        get, numbers = source.aget, None
        if isinstance(source, IndexedShards):
            get = partial(source.get, wanted=pipeline.wanted)
            numbers = source.passing(pipeline.keeps) if pipeline.keeps else None
        count = len(source) if numbers is None else len(numbers)
        order = _Order(pipeline.order, count, settings.seed, epoch, numbers)
        many = getattr(source, "aget_many", None) if not self._prefix else None
        get = get if not self._prefix else partial(_get_through, get, self._prefix)
        keys = source.keys()
        if len(keys) != len(source):
            raise OptionError(f"{type(source).__name__} has {len(source)} samples, but its keys() are {len(keys)}")
        left_out = order.count % settings.batch_size if settings.drop_last and self.recipe.keeps_count else 0
        return KeySource(
            order.count - left_out,
            lambda start, stop: [keys[k] for k in order.at(start, stop)],
            get,
            many,
            growth=self._growth,
            batch_size=settings.batch_size,
            chunk=chunk,
            pack_error=packing.pack_error,
        )

    def _shard_source(self, source: Shards | IndexedShards, epoch: int, reader: Reader) -> ShardSource:
        settings, urls = self._settings, list(source.urls)
        window, shards = None, np.arange(len(urls))
        for operator in self._pipeline.order:
            if isinstance(operator, Shuffle):
                seed = settings.seed if operator.seed is None else operator.seed
                shards = permutation(np.arange(len(urls)), len(urls), draw("shards", seed, epoch))
                urls = [urls[k] for k in shards]
                samples = operator.window or WINDOW_SAMPLES
                window = Window(samples, WINDOW_BYTES, lambda n, k, seed=seed: window_order(n, seed, epoch, k))  # type: ignore[misc]
        members = expected = None
        wanted, keeps, limits = self._pipeline.wanted, self._pipeline.keeps, source.limits
        if isinstance(source, IndexedShards):
            # to look for members first, where the index does not tell them, would be to read them twice
            if not any(kind_of(url) for url in urls) and (keeps or source.has_members):
                members = lambda ordinal: source.members(int(shards[ordinal]), wanted, keeps)
            else:
                expected = lambda ordinal: source.expected(int(shards[ordinal]))
        return ShardSource(
            urls,
            reader,
            partial(TarScanner, limits=limits),
            partial(_unpacks, limits),
            members=members,
            expected=expected,
            bounds=Bounds(settings.fetch.gap_bytes, settings.fetch.range_bytes),
            chosen=reader.meter.count_shard,
            range_bytes=settings.fetch.range_bytes,
            window=window,
            take=_taken(self._pipeline.order),
            pack_error=packing.pack_error,
        )


def _unpacks(limits: Limits, url: str) -> Decompressor | None:
    kind = kind_of(url)
    return None if kind is None else Decompressor(kind, url, limits)


class _Order:
    """The keys' numbers in the order of an epoch; planned some thousand positions at a time."""

    def __init__(
        self,
        operators: Sequence[Shuffle | Take | Pick],
        count: int,
        seed: int,
        epoch: int,
        numbers: Ints | None = None,
    ) -> None:
        self._looks: list[Callable[[Ints], Ints]] = [] if numbers is None else [numbers.__getitem__]
        for number, operator in enumerate(operators):
            if isinstance(operator, Take):
                count = min(count, operator.count)
            elif isinstance(operator, Pick):
                picked = operator.numbers(count)
                count = len(picked)
                self._looks.append(picked.__getitem__)
            else:
                own = seed if operator.seed is None else operator.seed
                self._looks.append(partial(permutation, n=count, key=draw("keys", own, epoch, number)))
        self.count = count
        self._start, self._block = 0, list[int]()

    def at(self, start: int, stop: int) -> list[int]:
        """The numbers at positions [start, stop)."""
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._start = start
            positions = np.arange(start, min(self.count, max(stop, start + _PLANNED_AT_ONCE)))
            for look in reversed(self._looks):
                positions = look(positions)
            self._block = positions.tolist()
        return self._block[start - self._start : stop - self._start]


def _taken(operators: Sequence[Shuffle | Take | Pick]) -> int | None:
    return min((operator.count for operator in operators if isinstance(operator, Take)), default=None)


def _stages(
    pipeline: Pipeline, settings: Settings
) -> tuple[tuple[Step, ...], dict[int, Chain], list[int | tuple[Step, ...]]]:
    """(asynchronous steps that the source does itself, the workers' chains, the stages before the last one)."""
    all_steps = _narrowed(pipeline.steps, pipeline.wanted)
    groups = [(color, tuple(steps)) for color, steps in itertools.groupby(all_steps, lambda s: is_async(s.fn))]
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


def _narrowed(steps: Sequence[Step], wanted: Wanted | None) -> list[Step]:
    """The same steps, but nothing is decoded that is not asked for afterwards."""
    if wanted is None:
        return list(steps)
    names = frozenset().union(*wanted)
    first = next((k for k, step in enumerate(steps) if not isinstance(step.fn, Decoder)), len(steps))
    narrow = [replace(step, fn=step.fn.only(names)) for step in steps[:first] if isinstance(step.fn, Decoder)]
    return [*narrow, *steps[first:]]  # behind the selection there may be other fields of these names


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


async def _iterate_through(samples: Callable[[], AsyncIterator[Any]], steps: Sequence[Step]) -> AsyncIterator[Any]:
    position = 0
    async for sample in samples():
        made, _ = await _apply(steps, sample, position)  # one that fails does not end the others
        yield made
        position += 1


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
