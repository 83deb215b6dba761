"""The source of each epoch's samples: by number, shard by shard, or as an iterator gives them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.operators import EpochOf, Shuffle, Take
from headrace.datasets.shards import IndexedShards, Shards
from headrace.datasets.stream import Pipeline
from headrace.errors import OptionError
from headrace.fetch import Reader
from headrace.fetch.growth import Growth
from headrace.fetch.keys import IterSource, KeySource
from headrace.fetch.members import Bounds
from headrace.fetch.resumable import Resumable
from headrace.fetch.shards import Mark, ShardSource, Window
from headrace.fetch.shuffle_buffer import ShuffleBuffer
from headrace.fetch.visits import VisitSource
from headrace.formats.compression.decompressor import Decompressor, kind_of
from headrace.formats.limits import Limits
from headrace.formats.tar.scanner import TarScanner
from headrace.options import Settings
from headrace.plan import Rounds, draw, window_order
from headrace.streaming.async_steps import get_through, iterate_through
from headrace.streaming.epoch_plan import EpochPlan
from headrace.streaming.planning import Planning
from headrace.tasks import Source, Step
from headrace.torch_compat import packing
from headrace.types import running_charge, running_reader

WINDOW_SAMPLES = 2048  # of shards without an index
WINDOW_BYTES = 64 * 2**20
_BUFFER_SAMPLES = 4096
_PLANNED_AT_ONCE = 4096


class Sources:
    """Makes the sources of a pipeline's epochs.

    Args:
        prefix: asynchronous steps that the source does itself, behind reading a sample.
        chunk: for a batch size, how many samples are handed on together.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, prefix: Sequence[Step], chunk: Callable[[int], int]
    ) -> None:
        self._pipeline, self._settings, self._prefix, self._chunk = pipeline, settings, prefix, chunk
        self._growth = Growth(settings.first_reads, settings.fetch_concurrency)

    def window_bytes(self, plan: EpochPlan, planning: Planning | None) -> int:
        """How many bytes of samples lie ready on this rank before any of them is used; 0: it is not known."""
        if planning is not None:
            return planning.window_bytes // plan.steps.world
        is_by_shard = isinstance(self._pipeline.source, Shards | IndexedShards)
        return WINDOW_BYTES if is_by_shard and self._pipeline.shuffle is not None else 0

    def of(
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
        if isinstance(source, IndexedShards) and not self._pipeline.is_by_number:
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
            return opened if not self._prefix else iterate_through(opened, self._prefix, begin)

        return IterSource(
            make,
            snapshot=resumable.snapshot,
            take=take,
            buffer=self._buffer(plan),
            begin=begin,
            done=plan.begin.done,
            batch_size=plan.batch_size,
            chunk=self._chunk(plan.batch_size),
            pack_error=packing.pack_error,
        )

    def _key_source(self, source: AsyncDataset, plan: EpochPlan, planning: Planning) -> KeySource:
        pipeline, order, steps = self._pipeline, plan.order, plan.steps
        get = source.aget
        if isinstance(source, IndexedShards):
            get = partial(source.get, wanted=pipeline.wanted)
        many = getattr(source, "aget_many", None) if not self._prefix else None
        get = get if not self._prefix else partial(get_through, get, self._prefix)
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
            chunk=self._chunk(plan.batch_size),
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
            is_endless=times is None,
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
    takes += [operator.samples for operator in operators if isinstance(operator, EpochOf)]
    if plan.share is not None:
        takes = [plan.begin.since.here + plan.share.whole]
    return min(takes) - plan.begin.cursor.position if takes else None


def _unpacks(limits: Limits, url: str) -> Decompressor | None:
    kind = kind_of(url)
    return None if kind is None else Decompressor(kind, url, limits)


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
