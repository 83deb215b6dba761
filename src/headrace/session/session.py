"""The headrace regime: loaders over headrace's data sets."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from headrace._util import check
from headrace.dataset.operators import Operators
from headrace.dataset.stream import Stream
from headrace.delivery.iterator import BatchIterator, Watcher
from headrace.delivery.loop_lookahead import TrainingLoop
from headrace.delivery.progress import Progress
from headrace.engine.epoch_builder import EpochBuilder
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.open_readers import TrainerCalls
from headrace.errors import LoaderBusyError, LoaderClosedError
from headrace.observe import LoaderMeters, Stats
from headrace.options import Ranks, Settings
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Pipeline
from headrace.session.epoch_planner import EpochCursor, NextEpoch
from headrace.session.rank_sharing import count_share
from headrace.session.runtime import Runtime
from headrace.torch_compat.ranks import RankShare
from headrace.workers.chains import may_use_torch

log = logging.getLogger("headrace")


class Position(NamedTuple):
    """Progress of the trainer in an epoch.

    Attributes:
        batch: Number of batches received on this rank.
        samples: Number of samples in these batches.
        global_samples: Number of samples received by all ranks together, if ranks receive the same steps.
    """

    batch: int
    samples: int
    global_samples: int


class Streaming:
    """A stream with the runtime that runs it.

    Args:
        dataset: Data set given to the loader. Its `set_epoch` may have been called.
        stream: The data set, shuffled and batched by the loader's options.
        name: Name of `next` in profiles.
    """

    def __init__(
        self,
        dataset: Operators,
        stream: Stream,
        settings: Settings,
        *,
        workers: Any,
        ranks: Callable[[], RankShare],
        name: str,
    ) -> None:
        self._settings, self._name = settings, name
        self._lock = threading.RLock()  # any thread may request states, also before an epoch has started
        self._dataset = dataset
        self._heard: tuple[int] | None = None
        self._next = NextEpoch(stream, settings, ranks)
        self._progress: Progress | None = None
        self._current: EpochPlan | None = None  # plan of the current epoch
        self._iterators = weakref.WeakSet[BatchIterator[Any]]()  # returned to users
        self._peeked: _Opened | None = None
        self._runtime = Runtime(
            replace(settings, collate=None, init=None, skips=None),
            workers=workers,
            with_torch=workers != "process" or _may_use_torch(stream.pipeline(), settings),
        )
        self._builder: EpochBuilder | None = None
        self._built_for: tuple[Stream | None, Planning | None] = None, None
        self._finalizer = weakref.finalize(self, self._runtime.close_soon)
        self._finalizer.atexit = False

    @property
    def options(self) -> dict[str, object]:
        settings, planning, share = self._settings, self._next.planning, self._next.ranks
        options: dict[str, object] = {
            "prefetch_factor": settings.prefetch_factor,
            "memory_budget": settings.memory_budget,
            "seed": settings.seed,
            "fetch": replace(settings.fetch, concurrency=settings.fetch_concurrency),
            "ranks": settings.ranks
            if share is None
            else replace(settings.ranks, rank=share.rank, world_size=share.world),
            "errors": settings.skips,
        }
        return options if planning is None else options | {"order": planning.described()}

    def iterate(self, loader: Any, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        """Return an iterator over the next epoch's batches. `caller` is the loop of an `async for`."""
        del loader
        with self._lock:
            self._hear()
            self._next.turn.leave()
            opened, self._peeked = self._peeked, None
            if opened is None or opened.plan.number != self._next.turn.number:  # another epoch has ended since
                opened = self._open(caller)
            iterator, self._current, self._progress = opened
            self._iterators.add(iterator)
            self._next.started(self._progress)
        return iterator

    def length(self) -> int:
        return self._next.length()

    def check_even(self, ranks: Ranks | None) -> None:
        """Raise OptionError if ranks' batches of a step may differ in size and `last_batch` is not set."""
        if (ranks is None or ranks.last_batch is None) and self._current is not None and not self._current.is_even:
            raise check.lacking(
                "Accelerate's gather",
                f"batches of one size on all {self._current.world} ranks, also at the end of an epoch: give "
                "hr.Ranks(last_batch='drop'), which skips that step, or 'pad', which repeats samples; or 'short', and "
                "gather by gather_for_metrics(…, use_gather_object=True), or pad_across_processes",
            )

    def is_in(self, epoch: int) -> bool:
        return self._is_in_use and self._current is not None and self._current.number == epoch

    @property
    def goes_on(self) -> bool:
        return self._next.goes_on

    @property
    def epoch(self) -> int:
        with self._lock:
            self._hear()
            return self._next.turn.number

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iterate` start this epoch, or resume it if its state was loaded."""
        with self._lock:
            self._hear()
            if self._next.set_epoch(epoch, is_in_use=self._is_in_use):
                self._peeked = None

    def _hear(self) -> None:
        """Apply `set_epoch` calls made on the data set."""
        announced = self._dataset.announced_epoch
        if announced is not None and announced is not self._heard:
            self._heard = announced
            self.set_epoch(*announced)

    def skip(self, batches: int) -> None:
        check.whole("skip(): batches", batches)
        with self._lock:
            self._hear()
            self._check_at_rest("skip()")
            self._next.turn.leave()
            self._peeked, self._progress = None, None
            self._next.skip += batches

    @property
    def position(self) -> Position:
        with self._lock:
            return self._position()

    def _position(self) -> Position:
        progress = self._followed
        if progress is not None and self._current is not None:
            received = progress.received
            if received.is_over:
                return Position(0, 0, 0)
            everywhere = self._current.after(received).samples if self._current.is_shared else received.samples
            return Position(received.batches, received.samples, everywhere)
        if self._next.is_whole:
            return Position(0, 0, 0)
        plan = self._next.plan()
        received = plan.received()
        return Position(received.batches, received.samples, plan.begin.samples)

    def state_dict(self, loader: Any, batches: int | None, loop: TrainingLoop) -> dict[str, object]:
        """Return the state after the batches that the trainer has received, or after `batches`."""
        del loader
        with self._lock:
            self._hear()
            progress = self._followed
            if progress is None:
                return self._next.state(batches)
        if batches is not None:
            return progress.state(batches)
        received = progress.received
        held = loop.prefetched(knows_end=received.is_over)
        return progress.state(received.batches - held.batches if held.batches else None, is_over=held.is_over)

    def load_state_dict(self, loader: Any, state: Mapping[str, object], force: bool = False) -> None:
        """Make the next `iterate` resume from a state. An empty state is the start."""
        del loader
        with self._lock:  # held until a refused state is undone
            self._hear()
            self._check_at_rest("load_state_dict()")
            self._next.load(state, force=force)
            self._peeked, self._progress = None, None

    def peek(self) -> Any:
        """Return the first batch of the next `iterate` without consuming it."""
        with self._lock:
            self._hear()
            if self._next.stream.pipeline().source.traits.iterated:
                self._check_at_rest("peek()")
            if not self._is_in_use or self._settings.tail != "carry":  # the loop may end and carry samples over
                self._next.turn.leave()
            if self._peeked is None or self._peeked.plan.number != self._next.turn.number:
                self._peeked = self._open(None)
            iterator = self._peeked.iterator
        return iterator.peek()

    def stats(self) -> Stats:
        stats, progress = self._runtime.stats(self._next.turn.number), self._progress
        packing = self._next.stream.pipeline().packing
        rows = None if progress is None else progress.received.rows
        if rows is None or packing is None or packing.mixing is None:
            return stats
        return replace(stats, tokens=dict(zip(packing.mixing.names, rows.tokens, strict=True)))

    def close(self) -> None:
        self._peeked = None
        self._runtime.close()
        self._finalizer.detach()

    @property
    def _followed(self) -> Progress | None:
        """The progress that states describe. None: states are of the start of the next epoch."""
        return None if self._next.turn.is_announced and not self._is_in_use else self._progress

    @property
    def _is_in_use(self) -> bool:
        return any(not iterator.is_over for iterator in self._iterators)

    def _check_at_rest(self, what: str) -> None:
        if self._is_in_use:
            raise LoaderBusyError(f"{what} while an iterator of this loader is in use: close it first, or delete it")

    def _open(self, caller: asyncio.AbstractEventLoop | None) -> _Opened:
        """Start an epoch."""
        runtime = self._runtime
        runtime.check()
        ranks, plan, builder = self._next.find_out(), self._next.plan(), self._current_builder()
        if runtime.renew(builder.chains, is_in_use=self._is_in_use):
            builder.forget_form()
        runtime.read_ahead(2 * builder.window_bytes(plan))
        progress = Progress(plan.received(), plan.save)
        iterator = runtime.iterate(
            self,
            builder.spec(
                plan,
                runtime.reader(builder.storage_options, builder.data_set),
                TrainerCalls(self._settings.skips, caller),
                runtime.meters,
            ),
            Watcher(
                name=self._name,
                count=plan.batches,
                exhausted=partial(_use_up, self._next.turn, runtime.meters, plan, progress),
                progress=progress,
            ),
            _weakly(builder.prepare),
            waits=self._next.stream.pipeline().source.traits.iterated,
        )
        iterator.leave_out = plan.leave_out
        if ranks.is_torch:
            iterator.before = partial(ranks.agree, "the plan of an epoch", plan.digest())
        return _Opened(iterator, plan, progress)

    def _current_builder(self) -> EpochBuilder:
        """Return the builder of epochs. It is replaced if ranks or orders have changed."""
        stream, planning = self._next.stream, self._next.planning
        if self._builder is None or self._built_for[0] is not stream or self._built_for[1] is not planning:
            runtime, ranks = self._runtime, self._next.ranks or RankShare()
            self._builder = EpochBuilder(
                stream.pipeline(),
                self._settings,
                planning,
                (ranks.world, ranks.rank),
                runtime.parts.of_samples,
                runtime.fetch_meter,
            )
            self._built_for = stream, planning
        return self._builder


class _Opened(NamedTuple):
    iterator: BatchIterator[Any]
    plan: EpochPlan
    progress: Progress


def _use_up(turn: EpochCursor, meters: LoaderMeters, plan: EpochPlan, progress: Progress) -> None:
    """Update counters and the next epoch after the last batch."""
    plan.check_end(progress.received)
    turn.advance(plan, progress)
    if plan.share is not None:
        count_share(plan, progress.received, meters)
    if plan.batches is not None:
        meters.repeated += plan.steps.repeated
        meters.left_out += plan.steps.left_out


def _may_use_torch(pipeline: Pipeline, settings: Settings) -> bool:
    traits = pipeline.source.traits
    is_known = (traits.sharded or traits.objects) and not pipeline.regroups and settings.init is None
    if not is_known or not settings.num_workers:
        return True
    collate = None if settings.use_slots else settings.collate
    return may_use_torch((*pipeline.steps, *pipeline.after), (collate,))


def _weakly(prepare: Callable[[Runtime], Awaitable[None]]) -> Callable[[Runtime], Awaitable[None]]:
    """Wrap a method without keeping its object alive."""
    method = weakref.WeakMethod(prepare)

    async def call(runtime: Runtime) -> None:
        found = method()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        await found(runtime)

    return call
