"""Everything of one loader that runs: its engine, workers and memory, wired from the four stages."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import numpy as np

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.operators import WINDOW_BYTES, WINDOW_SAMPLES, Shuffle, Take, is_async
from headrace.datasets.stream import Files, Pipeline, Shards
from headrace.deliver.channel import thread_channel
from headrace.deliver.iterator import BatchIterator, Opener
from headrace.deliver.slabs import HELD_SLABS, Slabs, Views
from headrace.errors import LoaderClosedError, OptionError
from headrace.fetch import Meter, Reader
from headrace.fetch.keys import IterSource, KeySource
from headrace.fetch.shards import ShardSource, Window
from headrace.formats.tar import TarScanner
from headrace.memory import Arena
from headrace.observe.stats import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats
from headrace.options import FetchOptions
from headrace.plan import draw, permutation, sample_seed, window_order
from headrace.scheduler.budget import Budget
from headrace.scheduler.engine import Engine
from headrace.scheduler.epoch import Epoch, LoopStage, Recipe, WorkStage
from headrace.tasks import Chain, Failure, ListPart, PackedPart, Part, Source, Step
from headrace.torch_compat import packing
from headrace.types import running_reader
from headrace.work.pool import ProcessWorkers, Workers
from headrace.work.starter import Helper
from headrace.work.thread import ThreadWorker
from headrace.work.workbench import note_origin, open_part

_FINAL = 1  # the number of the chain that makes batches
_PLANNED_AT_ONCE = 4096
_MAX_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a loader was told, with every "auto" resolved."""

    batch_size: int
    drop_last: bool
    num_workers: int
    prefetch_factor: int
    collate: Callable[[list[Any]], Any] | None
    use_slots: bool
    init: Callable[[int], Any] | None
    seed: int
    in_order: bool
    timeout_s: float
    fetch_concurrency: int
    memory_budget: int
    fetch: FetchOptions
    finish: Callable[[Any], Any]


class Machinery:
    """The running parts of a loader. It knows nothing of the loader, so that the loader can be collected."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._pid = os.getpid()
        self._helper = Helper.acquire() if settings.num_workers else None
        self._engine: Engine | None = None
        self._is_closed = False
        self._is_ready = False
        self._ready_lock = asyncio.Lock()
        self.meters = LoaderMeters()
        self._fetch_meter = Meter()
        source = pipeline.source
        options = source.storage_options if isinstance(source, Shards | Files) else None
        self._reader = Reader(
            settings.fetch, concurrency=settings.fetch_concurrency, storage_options=options, meter=self._fetch_meter
        )
        self._arena = Arena(forget=self._forget)
        self._slabs = Slabs(forget=self._forget, may_grow=lambda size: self._held() + size <= settings.memory_budget)
        self._budget = Budget(settings.memory_budget, self._held, lambda: self._arena.leased_bytes)
        self._workers = self._make_workers()
        self._prefix, self._chains, inner = _stages(pipeline, settings)
        count = math.ceil(settings.batch_size / (2 * max(1, settings.num_workers)))
        self._recipe = Recipe(
            inner=tuple(self._inner_stage(stage) for stage in inner),
            chain=_FINAL,
            batch_size=settings.batch_size,
            chunk=max(1, min(_MAX_CHUNK, count)),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            limit=pipeline.limit,
            in_order=settings.in_order,
            use_slots=settings.use_slots,
        )

    def iterate(
        self, owner: Any, epoch: int, exhausted: Callable[[], None], name: str, caller: asyncio.AbstractEventLoop | None
    ) -> BatchIterator[Any]:
        """An iterator over the batches of an epoch.

        Args:
            owner: kept alive as long as the iterator.
            epoch: the epoch's number.
            exhausted: called once after the last batch.
            name: what a profiler calls `next`.
            caller: the loop of an `async for`.

        Raises:
            LoaderClosedError: the loader was closed, or the process was forked since.
        """
        if self._pid != os.getpid():
            raise LoaderClosedError("the loader belongs to the process that this one was forked from; make a new one")
        if self._is_closed:
            raise LoaderClosedError("the loader is closed; make a new one")
        self.meters.begin()
        if self._engine is None:
            self._engine = Engine(self._open, self._end, self._release_helper)
        mailbox = self._engine.mailbox
        sender, receiver = thread_channel(self._settings.prefetch_factor, mailbox.post)
        views = Views(self._slabs.segments, partial(mailbox.post, self._slabs.returned))
        run = Epoch(
            self._source(epoch, caller),
            self._recipe,
            sample_seed(self._settings.seed, epoch),
            self._workers,
            self._slabs,
            self._arena,
            self._budget,
            sender,
            self.meters,
            self._part_of,
            packing.pack_error,
        )

        def end() -> None:
            for delivery in receiver.close():
                mailbox.post(self._slabs.returned, delivery.segment)
            mailbox.post(run.stop)

        def refused() -> None:
            sender.fail(packing.pack_error(LoaderClosedError("the loader was closed")))

        self._engine.start(partial(self._run, run, sender.fail), refused)
        opener = Opener(views, self._settings.finish)
        return BatchIterator(owner, receiver, opener, end, exhausted, self.meters, name, self._settings.timeout_s)

    def close_soon(self) -> None:
        """Begin to close, without waiting; also from a finalizer."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.close_soon()
        else:
            self._release_helper()

    def close(self) -> None:
        """Close, and wait until no thread, process or descriptor is left."""
        self.close_soon()
        if self._engine is not None and self._pid == os.getpid():
            self._engine.close()

    def stats(self, epoch: int) -> Stats:
        """A snapshot of all counters."""
        meters, fetch = self.meters, self._fetch_meter
        return Stats(
            epoch=epoch,
            elapsed_s=meters.elapsed_s(),
            fetch=FetchStats(
                requests=fetch.requests,
                retries=fetch.retries,
                errors=fetch.errors,
                bytes=fetch.bytes,
                in_flight=fetch.in_flight,
                active_s=fetch.waiting_s,
                input_bytes=self._arena.leased_bytes,
            ),
            work=WorkStats(
                workers=max(1, self._settings.num_workers), busy_s=dict(meters.busy_s), deaths=meters.deaths
            ),
            deliver=DeliverStats(
                batches=meters.batches,
                samples=meters.samples,
                wait_s=meters.wait_s,
                first_wait_s=meters.first_wait_s,
                trainer_s=meters.trainer_s,
                ready=meters.ready,
                begun=meters.begun,
            ),
            shared_bytes=self._held(),
            budget_bytes=self._settings.memory_budget,
            started_s=meters.started_s,
        )

    def _held(self) -> int:
        return self._arena.segment_bytes + self._slabs.nbytes

    def _forget(self, number: int) -> None:
        self._workers.forget_segment(number)

    def _release_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.release()

    def _make_workers(self) -> Workers:
        if self._helper is None:
            return ThreadWorker(self.meters)
        return ProcessWorkers(self._settings.num_workers, self._helper, self.meters)

    # On the engine's loop.

    async def _open(self) -> None:
        await self._workers.open()

    async def _end(self) -> None:
        await self._workers.close()
        source = self._pipeline.source
        try:
            if self._is_ready and isinstance(source, AsyncDataset | AsyncIterableDataset):
                await source.aclose()
        finally:
            await self._reader.aclose()
            self._arena.close()
            self._slabs.close()

    async def _run(self, epoch: Epoch, fail: Callable[[bytes], None]) -> None:
        running_reader.set(self._reader)
        try:
            async with self._ready_lock:
                if not self._is_ready:
                    await self._get_ready()
                    self._is_ready = True
        except Exception as error:
            fail(packing.pack_error(error))
            return
        slabs = max(1, self._settings.prefetch_factor) + HELD_SLABS
        self._slabs.limit += slabs
        try:
            await epoch.run()
        finally:
            self._slabs.limit -= slabs

    async def _get_ready(self) -> None:
        for number, chain in self._chains.items():
            self._workers.learn(number, chain)
        source = self._pipeline.source
        if isinstance(source, AsyncDataset | AsyncIterableDataset):
            await source.aopen()

    def _part_of(self, samples: list[Any]) -> Part:
        """Samples as a part that workers can be given; what cannot be sent to them becomes a Failure."""
        if self._helper is None:
            return ListPart(samples)
        try:
            parts = packing.pack(samples)
        except Exception as error:
            if len(samples) == 1:
                error.add_note(f"stage: fetch; a sample of type {type(samples[0]).__name__} cannot be sent to a worker")
                return ListPart([Failure(packing.pack_error(error))])
            parts = packing.pack([self._sendable(sample) for sample in samples])
        lease = self._arena.lease(packing.packed_size(parts))
        return PackedPart(lease, packing.write(parts, lease.view), 0, len(samples))

    def _sendable(self, sample: Any) -> Any:
        try:
            packing.pack(sample)
        except Exception as error:
            error.add_note(f"stage: fetch; a sample of type {type(sample).__name__} cannot be sent to a worker")
            return Failure(packing.pack_error(error))
        return sample

    def _inner_stage(self, stage: int | tuple[Step, ...]) -> WorkStage | LoopStage:
        return WorkStage(stage) if isinstance(stage, int) else LoopStage(partial(self._through_loop, stage))

    async def _through_loop(self, steps: Sequence[Step], part: Part, start: int) -> Part:
        """All samples of a part through asynchronous steps, at once."""
        samples: list[Any] = open_part(part)
        part.release()
        kept = [True] * len(samples)

        async def one(k: int) -> None:
            samples[k], kept[k] = await _apply(steps, samples[k], start + k)

        async with anyio.create_task_group() as group:
            for k in range(len(samples)):
                group.start_soon(one, k)
        return self._part_of([sample for sample, keep in zip(samples, kept, strict=True) if keep])

    # The plan.

    def _source(self, epoch: int, caller: asyncio.AbstractEventLoop | None) -> Source:
        source, settings = self._pipeline.source, self._settings
        if isinstance(source, Shards):
            return self._shard_source(source, epoch)
        chunk = self._recipe.chunk
        if isinstance(source, AsyncDataset):
            order = _Order(self._pipeline.order, len(source), settings.seed, epoch)
            many = getattr(source, "aget_many", None) if not self._prefix else None
            get = source.aget if not self._prefix else partial(_get_through, source.aget, self._prefix)
            keys = source.keys()
            return KeySource(
                order.count,
                lambda start, stop: [keys[k] for k in order.at(start, stop)],
                get,
                many,
                concurrency=settings.fetch_concurrency,
                batch_size=settings.batch_size,
                chunk=chunk,
                pack_error=packing.pack_error,
            )
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

    def _shard_source(self, source: Shards, epoch: int) -> ShardSource:
        settings, urls = self._settings, list(source.urls)
        window = None
        for operator in self._pipeline.order:
            if isinstance(operator, Shuffle):
                seed = settings.seed if operator.seed is None else operator.seed
                urls = [urls[k] for k in permutation(np.arange(len(urls)), len(urls), draw("shards", seed, epoch))]
                samples = operator.window or WINDOW_SAMPLES
                window = Window(samples, WINDOW_BYTES, lambda n, k, seed=seed: window_order(n, seed, epoch, k))  # type: ignore[misc]
                self._budget.widen(2 * WINDOW_BYTES)
        return ShardSource(
            urls,
            self._reader,
            TarScanner,
            range_bytes=settings.fetch.range_bytes,
            window=window,
            take=_taken(self._pipeline.order),
            pack_error=packing.pack_error,
        )


class _Order:
    """The keys' numbers in the order of an epoch; planned some thousand positions at a time."""

    def __init__(self, operators: Sequence[Shuffle | Take], count: int, seed: int, epoch: int) -> None:
        self._permutations: list[tuple[int, int]] = []
        for number, operator in enumerate(operators):
            if isinstance(operator, Take):
                count = min(count, operator.count)
            else:
                own = seed if operator.seed is None else operator.seed
                self._permutations.append((count, draw("keys", own, epoch, number)))
        self.count = count
        self._start, self._block = 0, list[int]()

    def at(self, start: int, stop: int) -> list[int]:
        """The numbers at positions [start, stop)."""
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._start = start
            positions = np.arange(start, min(self.count, max(stop, start + _PLANNED_AT_ONCE)))
            for count, key in reversed(self._permutations):
                positions = permutation(positions, count, key)
            self._block = positions.tolist()
        return self._block[start - self._start : stop - self._start]


def _taken(operators: Sequence[Shuffle | Take]) -> int | None:
    return min((operator.count for operator in operators if isinstance(operator, Take)), default=None)


def _stages(
    pipeline: Pipeline, settings: Settings
) -> tuple[tuple[Step, ...], dict[int, Chain], list[int | tuple[Step, ...]]]:
    """(asynchronous steps that the source does itself, the workers' chains, the stages before the last one)."""
    groups = [(color, tuple(steps)) for color, steps in itertools.groupby(pipeline.steps, lambda s: is_async(s.fn))]
    prefix: tuple[Step, ...] = ()
    if groups and groups[0][0] and not isinstance(pipeline.source, Shards):
        is_map = all(step.kind == "map" for step in groups[0][1])
        prefix = groups.pop(0)[1] if is_map else ()
    last: tuple[Step, ...] = ()
    if groups and not groups[-1][0] and pipeline.keeps_count:
        last = groups.pop()[1]
    chains = {_FINAL: Chain(last, settings.collate, pipeline.after, settings.init)}
    inner: list[int | tuple[Step, ...]] = []
    for number, (is_on_loop, steps) in enumerate(groups, _FINAL + 1):
        if is_on_loop:
            inner.append(steps)
        else:
            chains[number] = Chain(steps, init=settings.init)
            inner.append(number)
    return prefix, chains, inner


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
    except Exception as error:
        note_origin(error, name, source, position, None)
        return Failure(packing.pack_error(error)), True
    return sample, True


async def _get_through(get: Callable[[Any], Any], steps: Sequence[Step], key: Any) -> Any:
    sample = await get(key)
    for step in steps:
        sample = await step.fn(sample)
    return sample


async def _iterate_through(samples: Callable[[], AsyncIterator[Any]], steps: Sequence[Step]) -> AsyncIterator[Any]:
    async for sample in samples():
        made = sample
        for step in steps:
            made = await step.fn(made)
        yield made


async def _from_caller(
    samples: Callable[[], AsyncIterator[Any]], loop: asyncio.AbstractEventLoop
) -> AsyncIterator[Any]:
    """Samples of an iterator that belongs to another loop."""
    iterator = samples()

    async def following() -> Any:
        return await anext(iterator, _END)

    while (sample := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(following(), loop))) is not _END:
        yield sample


_END = object()
