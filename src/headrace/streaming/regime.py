"""The headrace regime: what is behind a loader whose data set is one of ours."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from headrace.datasets.base import Operators
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.planning import Planning
from headrace.datasets.stream import Stream
from headrace.deliver.iterator import BatchIterator, Watcher
from headrace.deliver.progress import Progress
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.job import Job
from headrace.errors import LoaderBusyError, OptionError
from headrace.holding import Holder
from headrace.observe.stats import LoaderMeters, Stats
from headrace.options import Settings
from headrace.runtime import Runtime
from headrace.streaming.callers import DirectCalls
from headrace.streaming.counted import count_share
from headrace.streaming.epoch_cursor import EpochCursor
from headrace.streaming.next_epoch import NextEpoch
from headrace.streaming.thread_host import ThreadHost
from headrace.torch_compat.ranks import Ranks
from headrace.work.uses_torch import may_use_torch

log = logging.getLogger("headrace")


class Position(NamedTuple):
    """How far the trainer is in an epoch.

    Attributes:
        batch: how many batches it has received, on this rank.
        samples: how many samples they had.
        global_samples: how many samples all ranks together have received, as far as they receive the same steps.
    """

    batch: int
    samples: int
    global_samples: int


class Streaming:
    """A stream with the runtime that runs it.

    Args:
        dataset: what the loader was given; it may be told epochs.
        stream: the same, shuffled and cut as the loader was told.
        settings: what the loader was told.
        workers: "process" or "thread", or who starts them.
        ranks: finds out which rank this is.
        name: what a profiler calls `next`.
    """

    def __init__(
        self,
        dataset: Operators,
        stream: Stream,
        settings: Settings,
        *,
        workers: Any,
        ranks: Callable[[], Ranks],
        name: str,
    ) -> None:
        self._settings, self._name = settings, name
        self._lock = threading.RLock()  # states may be asked for by any thread, also before an epoch has begun
        self._dataset = dataset
        self._heard: tuple[int] | None = None
        self._next = NextEpoch(stream, settings, ranks)
        self._progress: Progress | None = None
        self._current: EpochPlan | None = None  # what it goes through
        self._iterators = weakref.WeakSet[BatchIterator[Any]]()  # that were given away
        self._peeked: _Opened | None = None
        self._runtime = Runtime(
            replace(settings, collate=None, init=None, skips=None),
            workers=workers,
            with_torch=workers != "process" or _may_use_torch(stream.pipeline(), settings),
        )
        self._host = ThreadHost(self._runtime)
        self._hosted: tuple[Stream, Planning | None] | None = None  # of what its job is
        self._finalizer = weakref.finalize(self, self._runtime.close_soon)
        self._finalizer.atexit = False

    @property
    def options(self) -> dict[str, object]:
        """What every "auto" has become."""
        names = ("prefetch_factor", "fetch_concurrency", "memory_budget", "seed", "fetch", "tail")
        skips, planning, ranks = self._settings.skips, self._next.planning, self._next.ranks
        options: dict[str, object] = {"on_error": "raise" if skips is None else skips.decide or "skip"}
        if skips is not None:
            options["max_skips"] = skips.in_all, skips.in_a_row
        if planning is not None:
            options["order"] = planning.described()
        if ranks is not None:
            options |= {"rank": ranks.rank, "world_size": ranks.world}
        return {name: getattr(self._settings, name) for name in names} | options

    def iterate(self, loader: Any, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        """The next epoch's batches.

        Args:
            loader: not kept.
            caller: the loop of an `async for`.
        """
        del loader
        with self._lock:
            self._hear()
            self._next.turn.leave()
            opened, self._peeked = self._peeked, None
            if opened is None or opened.plan.number != self._next.turn.number:  # another epoch has ended since
                opened = self._open(caller)
            iterator, self._current, self._progress = opened
            self._iterators.add(iterator)
            self._next.begun(self._progress)
        return iterator

    def length(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        return self._next.length()

    def check_even(self, tail: object) -> None:
        """Whether ranks' batches of a step have as many samples as each other, as collectives over them need.

        Args:
            tail: what the user has said of a short last step; that is accepted.

        Raises:
            OptionError: they have not, and the user did not say so.
        """
        if tail is None and self._current is not None and not self._current.is_even:
            raise OptionError(
                f"{self._current.world} ranks have batches of different sizes at the end of an epoch, over which "
                "accelerator.gather and gather_for_metrics break: say tail='drop', which leaves that step out, or "
                "tail='pad', which fills it with samples that come twice; or tail='short', and gather such batches by "
                "gather_for_metrics(…, use_gather_object=True), or pad_across_processes"
            )

    def is_in(self, epoch: int) -> bool:
        """Whether an iterator goes through this epoch."""
        return self._is_in_use and self._current is not None and self._current.number == epoch

    @property
    def goes_on(self) -> bool:
        """Whether the next `iterate` goes on from a state."""
        return self._next.goes_on

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iterate` begins."""
        with self._lock:
            self._hear()
            return self._next.turn.number

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iterate` begin this epoch; where a state of it was loaded, it goes on from that."""
        with self._lock:
            self._hear()
            if self._next.tell(epoch, is_in_use=self._is_in_use):
                self._peeked = None

    def _hear(self) -> None:
        """Do as the data set was told meanwhile."""
        announced = self._dataset.announced_epoch
        if announced is not None and announced is not self._heard:
            self._heard = announced
            self.set_epoch(*announced)

    def skip(self, batches: int) -> None:
        """Have the next `iterate` begin so many batches further on."""
        if batches < 0:
            raise OptionError(f"skip({batches}): 0 or more")
        with self._lock:
            self._hear()
            self._check_at_rest("skip()")
            self._next.turn.leave()
            self._peeked, self._progress = None, None
            self._next.skip += batches

    @property
    def position(self) -> Position:
        """How far the trainer is in the epoch."""
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

    def state_dict(self, loader: Any, batches: int | None, holder: Holder) -> dict[str, object]:
        """The state after what the trainer has received, or after so many batches of the epoch.

        Args:
            loader: not kept.
            holder: the loop that receives them.
        """
        del loader
        with self._lock:
            self._hear()
            progress = self._followed
            if progress is None:
                return self._next.state(batches)
        if batches is not None:
            return progress.state(batches)
        received = progress.received
        held = holder.held(knows_end=received.is_over)
        return progress.state(received.batches - held.batches if held.batches else None, is_over=held.is_over)

    def load_state_dict(self, loader: Any, state: Mapping[str, object], force: bool = False) -> None:
        """Have the next `iterate` go on from a state; an empty one is the begin.

        Raises:
            LoaderBusyError: an iterator is in use.
            StateMismatchError: the state belongs to another plan; not with `force`.
        """
        del loader
        with self._lock:  # also until a state was refused: nobody sees it half loaded
            self._hear()
            self._check_at_rest("load_state_dict()")
            self._next.load(state, force=force)
            self._peeked, self._progress = None, None

    def peek(self) -> Any:
        """The first batch that `iterate` would give now, which is not consumed by that.

        Raises:
            LoaderBusyError: an iterator of an iterable data set is in use; that has one state for all of them.
        """
        with self._lock:
            self._hear()
            if self._next.stream.pipeline().source.traits.iterated:
                self._check_at_rest("peek()")
            if (
                not self._is_in_use or self._settings.tail != "carry"
            ):  # its loop may come to its end, and carry samples on
                self._next.turn.leave()
            if self._peeked is None or self._peeked.plan.number != self._next.turn.number:
                self._peeked = self._open(None)
            iterator = self._peeked.iterator
        return iterator.peek()

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        stats, progress = self._runtime.stats(self._next.turn.number), self._progress
        packing = self._next.stream.pipeline().packing
        lanes = None if progress is None else progress.received.lanes
        if lanes is None or packing is None or packing.mixing is None:
            return stats
        return replace(stats, tokens=dict(zip(packing.mixing.names, lanes.tokens, strict=True)))

    def close(self) -> None:
        """End everything that runs, and wait until nothing of it is left."""
        self._peeked = None
        self._runtime.close()
        self._finalizer.detach()

    @property
    def _followed(self) -> Progress | None:
        """The progress that states are of; None: they are of the begin of the next epoch."""
        return None if self._next.turn.is_announced and not self._is_in_use else self._progress

    @property
    def _is_in_use(self) -> bool:
        return any(not iterator.is_over for iterator in self._iterators)

    def _check_at_rest(self, what: str) -> None:
        if self._is_in_use:
            raise LoaderBusyError(f"{what} while an iterator of this loader is in use: close it first, or let go of it")

    def _open(self, caller: asyncio.AbstractEventLoop | None) -> _Opened:
        """An iterator of the next epoch."""
        self._runtime.check()
        ranks = self._next.find_out()
        plan = self._next.plan()
        self._host_job()
        progress = Progress(plan.received(), plan.save)
        iterator = self._host.iterate(
            self,
            plan,
            DirectCalls(self._settings.skips, caller),
            Watcher(
                name=self._name,
                count=plan.batches,
                exhausted=partial(_use_up, self._next.turn, self._runtime.meters, plan, progress),
                progress=progress,
            ),
            is_in_use=self._is_in_use,
        )
        iterator.leave_out = plan.leave_out
        if ranks.is_torch:
            iterator.before = partial(ranks.agree, "the plan of an epoch", plan.digest())
        return _Opened(iterator, plan, progress)

    def _host_job(self) -> None:
        """Have the engine know what it is to do, where that has become something else."""
        stream, planning = self._next.stream, self._next.planning
        if self._hosted is None or self._hosted[0] is not stream or self._hosted[1] is not planning:
            ranks = self._next.ranks or Ranks()
            self._host.take(Job.of(stream.pipeline(), self._settings, planning, (ranks.world, ranks.rank)))
            self._hosted = stream, planning


class _Opened(NamedTuple):
    """An iterator, what it goes through, and how far the trainer is in it."""

    iterator: BatchIterator[Any]
    plan: EpochPlan
    progress: Progress


def _use_up(turn: EpochCursor, meters: LoaderMeters, plan: EpochPlan, progress: Progress) -> None:
    """The last batch of an epoch was given on.

    Raises:
        OptionError: this rank has fewer batches than the others.
    """
    plan.check_end(progress.received)
    turn.advance(plan, progress)
    if plan.share is not None:
        count_share(plan, progress.received, meters)
    if plan.batches is not None:
        meters.repeated += plan.steps.repeated
        meters.left_out += plan.steps.left_out


def _may_use_torch(pipeline: Pipeline, settings: Settings) -> bool:
    """Whether the workers of a stream may come to need torch."""
    traits = pipeline.source.traits
    is_known = (traits.sharded or traits.objects) and not pipeline.regroups and settings.init is None
    if not is_known or not settings.num_workers:
        return True
    collate = None if settings.use_slots else settings.collate
    return may_use_torch((*pipeline.steps, *pipeline.after), (collate,))
