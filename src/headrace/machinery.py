"""Everything of one loader that runs: its engine, workers and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from headrace.deliver.ahead import ahead_of, mover_of
from headrace.deliver.channel import thread_channel
from headrace.deliver.iterator import BatchIterator, Opener
from headrace.deliver.journey import Journey
from headrace.deliver.slabs import HELD_SLABS, Slabs, Views
from headrace.errors import LoaderClosedError
from headrace.fetch import Meter, Reader
from headrace.fetch.keys import is_ours
from headrace.memory import Arena
from headrace.observe.stats import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats
from headrace.options import Settings
from headrace.scheduler.budget import Budget
from headrace.scheduler.cuts import Cuts, EvenCuts, ToldCuts
from headrace.scheduler.engine import Engine, is_exiting
from headrace.scheduler.epoch import Epoch
from headrace.scheduler.recipe import Recipe
from headrace.scheduler.skips import Skips
from headrace.scheduler.track import Track
from headrace.tasks import Chain, Failure, KeyPart, ListPart, PackedPart, Part, Source
from headrace.torch_compat import packing
from headrace.types import Opens, running_reader
from headrace.work.pool import ProcessWorkers, Workers
from headrace.work.starter import Helper
from headrace.work.thread import ThreadWorkers


class Machinery:
    """The running parts of a loader.

    It knows neither the loader nor the user's functions: it lives as long as its thread does, and so would they.

    Args:
        settings: what the loader was told.
        in_threads: whether its workers are threads of this process, also where there are several.
    """

    def __init__(self, settings: Settings, *, in_threads: bool = False) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._helper = Helper.acquire() if settings.num_workers and not in_threads else None
        self._engine: Engine | None = None
        self._is_closed = False
        self._is_ready = False
        self._ready_lock = asyncio.Lock()
        self._opened: Opens | None = None
        self.meters = LoaderMeters()
        self._fetch_meter = Meter()
        self._reader: Reader | None = None
        self._arena = Arena(forget=self._forget, budget=settings.memory_budget)
        self._slabs = Slabs(forget=self._forget, may_grow=self._may_grow)
        self._mover = mover_of(settings)
        if self._mover is not None:
            self._slabs.unlock_pages = self._mover.unlock_pages
        self._budget = Budget(settings.memory_budget, self._in_use, lambda: self._arena.leased_bytes)
        self._workers = self._make_workers()

    def reader(self, storage_options: Mapping[str, Any] | None) -> Reader:
        """The loader's reader."""
        if self._reader is None:
            settings = self._settings
            self._reader = Reader(
                settings.fetch,
                concurrency=settings.fetch_concurrency,
                storage_options=storage_options,
                meter=self._fetch_meter,
            )
        return self._reader

    def iterate(
        self,
        owner: Any,
        source: Source,
        recipe: Recipe,
        key: int,
        prepare: Callable[[Machinery], Awaitable[None]],
        exhausted: Callable[[], None],
        name: str,
        count: int | None = None,
        opener: Callable[[Views], Opener] = Opener,
        cuts: Cuts | None = None,
        track: Track | None = None,
        limit: int | None = None,
        skips: Skips | None = None,
        journey: Journey | None = None,
        pass_count: int | None = None,
    ) -> BatchIterator[Any]:
        """An iterator over the batches of an epoch.

        Args:
            owner: kept alive as long as the iterator.
            source: gives the epoch's samples.
            recipe: how they become batches.
            key: from which, with their positions, the samples' random numbers are made.
            prepare: called on the engine's loop before the first epoch: it teaches the chains, and opens the data set.
            exhausted: called once, when the last batch was given on.
            name: what a profiler calls `next`.
            count: how many batches the epoch has, where that is known.
            opener: makes batches of what the engine delivers.
            cuts: where samples are cut into batches; None: where the source says, or evenly.
            track: where in the epoch samples are; None: as the source counts them.
            limit: how many samples are cut into batches at most.
            journey: told what the trainer has received; None: nobody asks for its state.
            skips: says which failed samples are left out; None: none is.
            pass_count: samples of one pass, where the source begins again without end; None: it ends, or not known.

        Raises:
            LoaderClosedError: the loader was closed, or the process was forked since.
        """
        engine = self._running()
        mailbox = engine.mailbox
        sender, receiver = thread_channel(self._settings.prefetch_factor, mailbox.post)
        slabs = self._slabs
        ahead = ahead_of(self._settings, self._mover)
        give_back, retire = partial(mailbox.post, slabs.returned), partial(mailbox.post, slabs.retire)
        views = Views(slabs.segments, give_back, retire, ahead.lock_pages, ahead.depth)
        run = Epoch(
            source,
            recipe,
            key,
            self._workers,
            self._slabs,
            self._arena,
            self._budget,
            sender,
            self.meters,
            self.part_of,
            1 if self._helper is None else 2,
            packing.pack_error,
            cuts or (ToldCuts() if recipe.batch_size is None else EvenCuts(recipe.batch_size)),
            track or Track(),
            limit,
            skips,
            pass_count,
        )

        running = weakref.ref(run)  # whose source may refer to the iterator

        def end() -> None:
            ahead.close()
            for delivery in receiver.close():
                mailbox.post(slabs.returned, delivery.segment)
            epoch = running()
            if epoch is not None:
                mailbox.post(epoch.stop)

        def refused() -> None:
            sender.fail(packing.pack_error(LoaderClosedError("the loader was closed")))

        engine.start(partial(self._run, run, prepare, sender.fail, ahead.depth - 1), refused)
        return BatchIterator(
            owner,
            receiver,
            opener(views),
            ahead,
            end,
            exhausted,
            self.meters,
            name,
            self._settings.timeout_s,
            count,
            journey,
        )

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Have the engine's loop call `call(*args)` soon; calls are made in the order in which they were posted.

        Raises:
            LoaderClosedError: the loader was closed, or the process was forked since.
        """
        self._running().mailbox.post(call, *args)

    def check(self) -> None:
        """Raise LoaderClosedError where there is nothing to iterate over any more."""
        if self._pid != os.getpid():
            raise LoaderClosedError("the loader belongs to the process that this one was forked from; make a new one")
        if self._is_closed:
            raise LoaderClosedError("the loader is closed; make a new one")

    def learn(self, number: int, chain: Chain) -> None:
        """Make a chain known to the workers; on the engine's loop."""
        self._workers.learn(number, self._workers.pack(chain))

    def teach(self, number: int, chain: Chain) -> None:
        """The same from the trainer's thread, in which the chain is packed now; an older one is forgotten.

        Raises:
            Exception: whatever pickling the functions raises.
        """
        self.post(self._workers.learn, number, self._workers.pack(chain))

    def forget_spec(self, number: int) -> None:
        """Have the workers ask anew in which form the samples of a chain are written into slots."""
        self.post(self._workers.learn_spec, number, b"")

    async def open(self, dataset: Opens) -> None:
        """Open a data set, to be closed with the loader."""
        await dataset.aopen()
        self._opened = dataset

    def read_ahead(self, nbytes: int) -> None:
        """Let sources hold at least so many bytes."""
        self._budget.widen(nbytes)

    def part_of(self, samples: list[Any]) -> Part:
        """Samples as a part that workers can be given; what cannot be sent to them becomes a Failure."""
        if self._helper is None:
            return ListPart(samples)
        try:
            parts = packing.pack(samples)
        except Exception:
            parts = packing.pack([_sendable(sample) for sample in samples])
        lease = self._arena.lease(packing.packed_size(parts))
        return PackedPart(lease, packing.write(parts, lease.view), 0, len(samples))

    def key_part_of(self, keys: list[Any]) -> Part:
        """Keys as a part that workers can be given; one that cannot be sent to them becomes a Failure."""
        if self._helper is None:
            return ListPart(keys)
        if all(type(key) in (int, str) for key in keys):
            return KeyPart(keys, None, 0, len(keys))
        try:
            packing.pack(keys)
        except Exception:
            keys = [_sendable(key) for key in keys]
        return KeyPart(keys, packing.pack_bytes, 0, len(keys))

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
                hedges=fetch.hedges,
                hedges_won=fetch.hedges_won,
                throttled=fetch.throttled,
                lowest_level=fetch.lowest_level,
                coalesced=fetch.coalesced,
                shards_whole=fetch.shards_whole,
                shards_in_part=fetch.shards_in_part,
                cached=fetch.cached,
                bytes=fetch.bytes,
                in_flight=fetch.in_flight,
                active_s=fetch.waiting_s,
                reading_s=meters.reading_s,
                input_bytes=self._arena.leased_bytes,
                claimed_bytes=self._budget.claimed,
            ),
            work=WorkStats(
                workers=max(1, self._settings.num_workers),
                busy_s=dict(meters.busy_s),
                deaths=meters.deaths,
                batches_at_once=meters.batches_at_once,
                collations_at_once=meters.collations_at_once,
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
            skipped=meters.skipped,
            skipped_samples=tuple(meters.skipped_samples),
            repeated=meters.repeated,
            left_out=meters.left_out,
        )

    def _running(self) -> Engine:
        self.check()
        self.meters.begin()
        if self._engine is None:
            self._engine = Engine(self._workers.open, self._end, self._release_helper)
        return self._engine

    def _held(self) -> int:
        return self._arena.segment_bytes + self._slabs.nbytes

    def _may_grow(self, size: int) -> bool:
        room = self._settings.memory_budget - size
        if self._budget.in_use > room:
            return False
        self._arena.shrink(room - self._slabs.nbytes - self._budget.claimed)
        return True

    def _in_use(self) -> int:
        return self._held() - self._arena.spare_bytes

    def _forget(self, number: int) -> None:
        self._workers.forget_segment(number)

    def _release_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.release()

    def _make_workers(self) -> Workers:
        if self._helper is None:
            return ThreadWorkers(max(1, self._settings.num_workers), self.meters)
        return ProcessWorkers(self._settings.num_workers, self._helper, self.meters)

    # On the engine's loop.

    async def _end(self) -> None:
        async with contextlib.AsyncExitStack() as ends:  # each in its turn, whatever the ones before it raise
            if not is_exiting():  # then a daemon thread may be taking a batch
                ends.callback(self._slabs.close)
            ends.callback(self._arena.close)
            if self._reader is not None:
                ends.push_async_callback(self._reader.aclose)
            opened, self._opened = self._opened, None
            if opened is not None:
                ends.push_async_callback(opened.aclose)
            ends.push_async_callback(self._workers.close)

    async def _run(
        self,
        epoch: Epoch,
        prepare: Callable[[Machinery], Awaitable[None]],
        fail: Callable[[bytes], None],
        ahead: int,
    ) -> None:
        running_reader.set(self._reader)
        try:
            async with self._ready_lock:
                if not self._is_ready:
                    await prepare(self)
                    self._is_ready = True
        except BaseException as error:  # also a cancellation: whoever waits for the first batch must not wait for ever
            if is_ours(error):
                fail(packing.pack_error(LoaderClosedError("the loader was closed before its first batch")))
                raise
            fail(packing.pack_error(error))
            return
        slabs = max(1, self._settings.prefetch_factor) + HELD_SLABS + ahead
        self._slabs.limit += slabs
        try:
            await epoch.run()
        finally:
            self._slabs.limit -= slabs


def _sendable(sample: Any) -> Any:
    try:
        packing.pack(sample)
    except Exception as error:
        error.add_note(f"stage: fetch; a sample of type {type(sample).__name__} cannot be sent to a worker")
        return Failure(packing.pack_error(error))
    return sample
