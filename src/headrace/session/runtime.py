"""The running parts of a loader: engine, workers and memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from anyio import CapacityLimiter

from headrace._util.context import copies_samples, is_ours, running_loop, running_reader, running_threads
from headrace._util.reads import Opens
from headrace._util.shared_memory import Arena, require_descriptors, segments_at_most
from headrace.delivery.channel import open_channel
from headrace.delivery.iterator import BatchIterator, Watcher
from headrace.delivery.slabs import HELD_SLABS, BatchOpener, Slabs, Views
from headrace.delivery.staging import ahead_of, mover_of
from headrace.engine.scheduler.dispatch import Budget
from headrace.engine.scheduler.epoch_run import Epoch
from headrace.engine.scheduler.epoch_spec import EpochSpec, Resources
from headrace.engine.scheduler.event_loop import Engine, is_exiting
from headrace.errors import LoaderClosedError
from headrace.fetch import Meter, Reader
from headrace.observe import DeliverStats, FetchStats, Function, LoaderMeters, Stats, WorkStats
from headrace.options import Settings
from headrace.torch_compat import serialize
from headrace.workers.failures import PackedError
from headrace.workers.forkserver.client import ForkServer
from headrace.workers.process_workers import ProcessExecutor
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import PartPacker
from headrace.workers.tasks import CHAINS, StreamChains

if TYPE_CHECKING:
    from headrace.workers.executor import Executor


running_runtime: ContextVar[Runtime] = ContextVar("headrace_running_runtime")
"""Runtime of the epoch that the code runs for. Set on the engine's loop."""


class Runtime:
    """The running parts of a loader.

    A runtime refers to neither the loader nor the user's functions, as its thread would keep them alive.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        workers: Literal["process", "thread"] | Executor = "process",
        with_torch: bool = True,
    ) -> None:
        self._settings = settings
        self._pid = os.getpid()
        processes = settings.num_workers if workers == "process" else 0
        require_descriptors(processes, reads=True)
        self._segments_at_most = segments_at_most(processes)
        self._fork_server = ForkServer.acquire(with_torch=with_torch) if processes else None
        self._engine: Engine | None = None
        self._is_closed = False
        self._is_ready = False
        self._ready_lock = asyncio.Lock()
        self._opened: Opens | None = None
        self.meters = LoaderMeters()
        self.fetch_meter = Meter()
        self._reader: Reader | None = None
        self._threads: CapacityLimiter | None = None
        self._ends: dict[Epoch, asyncio.Event] = {}  # of running epochs, set at their ends
        self._arena = Arena(forget=self._forget, budget=settings.memory_budget, room=self._room)
        self._slabs = Slabs(forget=self._forget, may_grow=self._may_grow)
        self._mover = mover_of(settings.device)
        if self._mover is not None:
            self._slabs.unlock_pages = self._mover.unlocker()
        self._lent = set[int]()  # first chain numbers of running inputs
        self.budget = Budget(settings.memory_budget, self._in_use, lambda: self._arena.leased_bytes)
        modules: dict[str, int] = {}
        if self._fork_server is not None:
            self._executor: Executor = ProcessExecutor(processes, self._fork_server, modules)
        else:
            from headrace.workers.thread_workers import ThreadExecutor

            self._executor = ThreadExecutor() if isinstance(workers, str) or not settings.num_workers else workers
        self.parts = PartPacker(self._arena, shares_objects=self._executor.shares_objects)
        self._workers = TaskQueue(max(1, settings.num_workers), self._executor, self.meters, modules)
        self._chains = self._workers.chains

    def reader(self, storage_options: Mapping[str, object] | None, data_set: Callable[[], str] = str) -> Reader:
        """Return the loader's reader. `data_set` returns an identifier for the read cache."""
        if self._reader is None:
            self._reader = self.new_reader(storage_options, data_set)
        return self._reader

    def new_reader(self, storage_options: Mapping[str, object] | None, data_set: Callable[[], str]) -> Reader:
        settings = self._settings
        return Reader(
            settings.fetch,
            concurrency=settings.fetch_concurrency,
            storage_options=storage_options,
            data_set="" if settings.fetch.cache_dir is None else data_set(),
            meter=self.fetch_meter,
        )

    def resources(self, meters: LoaderMeters) -> Resources:
        return Resources(
            works=self._workers,
            slabs=self._slabs,
            arena=self._arena,
            budget=self.budget,
            meters=meters,
            wrap=self.parts.of_samples,
            copies=1 if self._executor.shares_objects else 2,
            pack_error=serialize.pack_error,
        )

    def iterate(
        self,
        owner: object,
        spec: EpochSpec,
        watch: Watcher,
        prepare: Callable[[Runtime], Awaitable[None]] | None = None,
        *,
        waits: bool = False,
    ) -> BatchIterator[object]:
        """Start an epoch and return an iterator over its batches.

        Args:
            owner: Kept alive as long as the iterator.
            watch: Notified of the batches that the trainer receives.
            prepare: Called on the engine's loop before the first epoch: sends the chains and opens the data set.
            waits: True to wait for the ends of stopped epochs, whose iterators move the same data set.
        """
        engine = self._running()
        mailbox = engine.mailbox
        sender, receiver = open_channel(self._settings.prefetch_factor, mailbox.post)
        slabs = self._slabs
        ahead = ahead_of(self._mover, pin_memory=self._settings.pin_memory)
        give_back, retire = partial(mailbox.post, slabs.returned), partial(mailbox.post, slabs.retire)
        put_back = partial(mailbox.put, slabs.returned)
        views = Views(slabs.segments, give_back, retire, ahead.lock_pages, ahead.depth, put_back)
        run = Epoch(spec, self.resources(self.meters), sender)

        running = weakref.ref(run)  # weak: its source may refer to the iterator

        def end() -> None:
            ahead.close()
            for delivery in receiver.close():
                mailbox.post(slabs.returned, delivery.segment)
            epoch = running()
            if epoch is not None:
                mailbox.post(epoch.stop)

        def refused() -> None:
            sender.fail(serialize.pack_error(LoaderClosedError("the loader was closed")))

        engine.start(partial(self._run, run, prepare, sender.fail, ahead.depth - 1, waits), refused)
        return BatchIterator(
            owner, receiver, BatchOpener(views), ahead, end, self.meters, watch, self._settings.timeout_s
        )

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` on the engine's loop soon. Calls keep their order."""
        self._running().mailbox.post(call, *args)

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` on the engine's loop before the next posted call, without a wakeup."""
        self._running().mailbox.put(call, *args)

    def check(self) -> None:
        """Raise LoaderClosedError if the loader is closed or belongs to a parent process."""
        if self._pid != os.getpid():
            raise LoaderClosedError("the loader belongs to the process that this one was forked from; make a new one")
        if self._is_closed:
            raise LoaderClosedError("the loader is closed; make a new one")

    def learn(self, chains: StreamChains) -> None:
        """Register the chains of a stream with the workers. To be called on the engine's loop."""
        packed = self._chains.pack_changed(chains)  # workers may have them from an earlier epoch of an input
        if packed is not None:
            self._chains.learn(chains.stream, packed)

    def lend_chains(self) -> int:
        """Reserve chain numbers for an input, until they are taken back. Returns the first of them."""
        number = next(k for k in itertools.count(CHAINS + 1, CHAINS) if k not in self._lent)
        self._lent.add(number)
        return number

    def take_back_chains(self, number: int) -> None:
        self._lent.discard(number)

    def teach(self, chains: StreamChains) -> None:
        """Register chains from the trainer's thread, where they are pickled. They replace older ones."""
        self.post(self._chains.learn, chains.stream, self._chains.pack(chains))

    def renew(self, chains: StreamChains, *, is_in_use: bool) -> bool:
        """Update the objects that functions of chains refer to. True if any has changed.

        Args:
            is_in_use: True if an iterator may still request batches of an earlier epoch.
        """
        if not self._is_ready:
            return False  # chains are sent later
        changed = self._chains.pack_changed(chains)
        if changed is None:
            return False
        self.post(partial(self._chains.learn_changed, is_in_use=is_in_use), chains.stream, changed)
        return True

    def forget_spec(self, number: int) -> None:
        """Discard the sample spec of a chain, so that workers determine it again."""
        self.post(self._workers.learn_spec, number, b"")

    async def open(self, dataset: Opens) -> None:
        await dataset.aopen()
        self._opened = dataset

    def read_ahead(self, nbytes: int) -> None:
        self.budget.widen(nbytes)

    def close_soon(self) -> None:
        """Start to close, without waiting. May be called from a finalizer."""
        self._is_closed = True
        if self._engine is not None:
            self._engine.close_soon()
        else:
            self._release_fork_server()

    def close(self) -> None:
        self.close_soon()
        if self._engine is not None and self._pid == os.getpid():
            self._engine.close()

    def stats(self, epoch: int) -> Stats:
        meters, fetch = self.meters, self.fetch_meter
        return Stats(
            epoch=epoch,
            elapsed_s=meters.elapsed_s(),
            fetch=FetchStats(
                **_values(fetch, "requests", "retries", "errors", "hedges", "hedges_won", "throttled", "lowest_level"),
                **_values(fetch, "coalesced", "shards_whole", "shards_in_part", "cached", "bytes", "in_flight"),
                active_s=fetch.waiting_s,
                reading_s=meters.reading_s,
                functions={
                    name: Function(**_values(held, "where", "calls", "seconds", "waited"))
                    for name, held in list(fetch.functions.items())
                    if held.calls
                },
                input_bytes=self._arena.leased_bytes,
                claimed_bytes=self.budget.claimed,
            ),
            work=WorkStats(
                workers=max(1, self._settings.num_workers),
                busy_s=dict(meters.busy_s),
                **_values(meters, "deaths", "batches_at_once", "collations_at_once"),
            ),
            deliver=DeliverStats(
                **_values(meters, "batches", "samples", "wait_s", "first_wait_s", "trainer_s", "ready", "begun")
            ),
            shared_bytes=self._held(),
            budget_bytes=self._settings.memory_budget,
            skipped_samples=tuple(meters.skipped_samples),
            **_values(meters, "started_s", "skipped", "repeated", "left_out", "unread"),
        )

    def _running(self) -> Engine:
        self.check()
        self.meters.begin()
        if self._engine is None:
            self._engine = Engine(self._workers.open, self._end, self._release_fork_server)
            if self._is_closed:  # by another thread, which saw no engine
                self._engine.close()
                self.check()
        return self._engine

    def _held(self) -> int:
        return self._arena.segment_bytes + self._slabs.nbytes

    def _may_grow(self, size: int) -> bool:
        room = self._settings.memory_budget - size
        if self.budget.in_use > room:
            return False
        self._arena.shrink(room - self._slabs.nbytes - self.budget.claimed)
        return True

    def _in_use(self) -> int:
        """Bytes held, or the budget's share that matches the number of segments, if larger."""
        segments = self._arena.count + len(self._slabs.segments)
        by_number = self._settings.memory_budget * segments // self._segments_at_most
        return max(self._held() - self._arena.spare_bytes, by_number)

    def _room(self) -> int:
        return self._settings.memory_budget - self.budget.in_use

    def _forget(self, number: int) -> None:
        self._workers.forget_segment(number)

    def _release_fork_server(self) -> None:
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.release()

    # On the engine's loop.

    async def _end(self) -> None:
        async with contextlib.AsyncExitStack() as ends:  # runs all callbacks, even if some raise
            if not is_exiting():  # then a daemon thread may be taking a batch
                ends.callback(self._slabs.close)
                if self._mover is not None:
                    ends.callback(self._mover.drain)  # transfers hold slabs, and these hold this object
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
        prepare: Callable[[Runtime], Awaitable[None]] | None,
        fail: Callable[[PackedError], None],
        ahead: int,
        waits: bool,
    ) -> None:
        self._threads = self._threads or CapacityLimiter(self._settings.fetch_concurrency)
        running_reader.set(self._reader)
        copies_samples.set(not self._executor.shares_objects)
        running_loop.set(asyncio.get_running_loop())
        running_threads.set(self._threads)
        running_runtime.set(self)
        try:
            async with self._ready_lock:
                if not self._is_ready:
                    if prepare is not None:
                        await prepare(self)
                    self._is_ready = True
            for end in [end for other, end in self._ends.items() if waits and other.is_stopped]:
                await end.wait()
        except BaseException as error:  # also a cancellation: the consumer must not wait for ever
            if is_ours(error):
                fail(serialize.pack_error(LoaderClosedError("the loader was closed before its first batch")))
                raise
            fail(serialize.pack_error(error))
            return
        slabs = max(1, self._settings.prefetch_factor) + HELD_SLABS + ahead
        self._ends[epoch] = asyncio.Event()
        try:
            with self._slabs.serve(slabs):
                await epoch.run()
        finally:
            self._ends.pop(epoch).set()


def _values(meter: object, *names: str) -> dict[str, Any]:
    return {name: getattr(meter, name) for name in names}
