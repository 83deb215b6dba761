"""The headrace regime: what is behind a loader whose data set is one of ours."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headrace.blueprint import Blueprint, told_as_read
from headrace.datasets.base import Operators
from headrace.datasets.operators import Pick
from headrace.datasets.shards import IndexedShards, Shards
from headrace.datasets.stream import Stream, with_built_index
from headrace.deliver.iterator import BatchIterator
from headrace.deliver.journey import Journey
from headrace.epoch_plan import EpochPlan, as_ranges
from headrace.errors import LoaderBusyError, LoaderClosedError, OptionError, StateMismatchError
from headrace.machinery import Machinery
from headrace.observe.stats import LoaderMeters, Stats
from headrace.options import Settings
from headrace.plan import Cursor, Order, Steps, draw, sample_seed
from headrace.plan.order import ENDLESS
from headrace.planning import Planning, data_digest
from headrace.scheduler.skips import Skips
from headrace.state import Facts, State, merged
from headrace.torch_compat import packing
from headrace.torch_compat.ranks import Ranks
from headrace.types import Ints, Tail

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
    """A stream with the machinery that runs it.

    Args:
        dataset: what the loader was given; it may be told epochs.
        stream: the same, shuffled and cut as the loader was told.
        settings: what the loader was told.
        in_threads: whether workers are threads of this process.
        ranks: finds out which rank this is.
        name: what a profiler calls `next`.
    """

    def __init__(
        self,
        dataset: Operators,
        stream: Stream,
        settings: Settings,
        *,
        in_threads: bool,
        ranks: Callable[[], Ranks],
        name: str,
    ) -> None:
        self._stream, self._settings, self._find_ranks, self._name = stream, settings, ranks, name
        self._lock = threading.RLock()  # states may be asked for by any thread, also before an epoch has begun
        self._ranks: Ranks | None = None
        self._kept_step: int | None = None  # samples of a global batch, as the state said that was loaded
        self._epochs = _Epochs()
        self._dataset, self._heard = dataset, dataset.told_epoch
        self._loaded: _Loaded | None = None
        self._skip = 0
        self._journey: Journey | None = None
        self._current: EpochPlan | None = None
        self._live: weakref.ref[BatchIterator[Any]] | None = None
        self._peeked: BatchIterator[Any] | None = None
        self._machinery = Machinery(replace(settings, collate=None, init=None, skips=None), in_threads=in_threads)
        self._use(stream)
        self._finalizer = weakref.finalize(self, self._machinery.close_soon)
        self._finalizer.atexit = False

    def _use(self, stream: Stream) -> None:
        self._stream = stream
        self._blueprint = Blueprint(stream.pipeline(), self._settings, self._machinery.part_of)
        self._planning: Planning | None = None
        self._facts: Facts | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What every "auto" has become."""
        names = ("prefetch_factor", "fetch_concurrency", "memory_budget", "seed", "fetch", "tail")
        skips = self._settings.skips
        told: dict[str, Any] = {"on_error": "raise" if skips is None else skips.decide or "skip"}
        if skips is not None:
            told["max_skips"] = skips.in_all, skips.in_a_row
        if self._planning is not None:
            told["order"] = self._planning.told()
        if self._ranks is not None:
            told |= {"rank": self._ranks.rank, "world_size": self._ranks.world}
        return {name: getattr(self._settings, name) for name in names} | told

    def iterate(self, loader: Any, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        """The next epoch's batches.

        Args:
            loader: not kept.
            caller: the loop of an `async for`.
        """
        del loader
        with self._lock:
            self._hear()
            peeked, self._peeked = self._peeked, None
            iterator = peeked if peeked is not None else self._new_iterator(caller)
            self._loaded, self._skip = None, 0
        return iterator

    def length(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        len(self._stream)  # says why it is not known
        pipeline, ranks = self._stream.pipeline(), self._find_ranks()
        if not pipeline.has_numbers and ranks.world == 1:
            count, settings = len(Stream(pipeline.source, pipeline.order)), self._settings
            whole, rest = divmod(count, settings.batch_size)
            return whole + bool(rest and settings.tail == "short")
        count = (self._planning or Planning(pipeline, self._settings.seed)).count()
        return Steps(self._epochs.carried, count, self._step(ranks), self._settings.tail, ranks.rank, ranks.world).steps

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iterate` begins."""
        self._hear()
        return self._epochs.number

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iterate` begin this epoch; where a state of it was loaded, it goes on from that."""
        self._hear()
        if epoch != self._epochs.number:
            self._loaded, self._skip, self._peeked = None, 0, None
            self._journey, self._epochs.carried = None, Cursor.at()
        self._epochs.number = epoch

    def _hear(self) -> None:
        """Do as the data set was told meanwhile."""
        told = self._dataset.told_epoch
        if told is not None and told is not self._heard:
            self._heard = told
            self.set_epoch(*told)

    def skip(self, batches: int) -> None:
        """Have the next `iterate` begin so many batches further on."""
        if batches < 0:
            raise OptionError(f"skip({batches}): 0 or more")
        self._hear()
        self._check_at_rest("skip()")
        self._peeked, self._journey = None, None
        self._skip += batches

    @property
    def position(self) -> Position:
        """How far the trainer is in the epoch."""
        if self._journey is not None and self._current is not None:
            received = self._journey.received
            if received.is_over:
                return Position(0, 0, 0)
            everywhere = self._current.after(received).samples if self._current.is_shared else received.samples
            return Position(received.batches, received.samples, everywhere)
        if self._loaded is None and not self._skip:
            return Position(0, 0, 0)
        plan = self._plan()
        received = plan.received()
        return Position(received.batches, received.samples, plan.begin.samples)

    def state_dict(self, loader: Any, batches: int | None = None) -> dict[str, Any]:
        """The state after what the trainer has received, or after so many batches of the epoch."""
        del loader
        with self._lock:
            self._hear()
            journey = self._journey
            if journey is None:
                return self._state_of_begin(batches)
        return journey.state(batches)

    def _state_of_begin(self, batches: int | None) -> dict[str, Any]:
        self._find_out()
        plan = self._plan()
        received = plan.received()
        if batches not in (None, received.batches):
            raise OptionError(f"state_dict(batches={batches}): none has been given since batch {received.batches}")
        if self._loaded is not None and self._skip == 0:
            return copy.deepcopy(self._loaded.packed)
        return plan.save(received)

    def load_state_dict(self, loader: Any, state: Mapping[str, Any], force: bool = False) -> None:
        """Have the next `iterate` go on from a state; an empty one is the begin.

        Raises:
            LoaderBusyError: an iterator is in use.
            StateMismatchError: the state belongs to another plan; not with `force`.
        """
        del loader
        self._hear()
        self._check_at_rest("load_state_dict()")
        self._peeked, self._journey, self._skip = None, None, 0
        if not state:
            self._loaded, self._epochs, self._kept_step = None, _Epochs(), None
            return
        loaded = State.unpack(state)
        self._find_out()
        facts = self._known_facts()
        if not force:
            facts.compare(state)
        order = None if self._planning is None else self._planning.order(loaded.epoch)
        packed = copy.deepcopy(dict(state))
        before = self._loaded, self._epochs, self._kept_step
        self._loaded, self._epochs = _Loaded(loaded, packed, order), _Epochs(loaded)
        try:
            plan = self._plan()
            if not force:
                plan.check(packed)
        except BaseException:
            self._loaded, self._epochs, self._kept_step = before
            raise

    def peek(self) -> Any:
        """The first batch of the next epoch, which is not consumed by that."""
        self._hear()
        if self._peeked is None:
            self._peeked = self._new_iterator(None)
        return self._peeked.peek()

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        return self._machinery.stats(self._epochs.number)

    def close(self) -> None:
        """End everything that runs, and wait until nothing of it is left."""
        self._peeked = None
        self._machinery.close()
        self._finalizer.detach()

    def _check_at_rest(self, what: str) -> None:
        iterator = None if self._live is None else self._live()
        if iterator is not None and not iterator.is_over and iterator is not self._peeked:
            raise LoaderBusyError(f"{what} while an iterator of this loader is in use: close it first, or let go of it")

    def _new_iterator(self, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        self._machinery.check()
        ranks = self._find_out()
        plan = self._plan()
        left_out = 0 if self._stream.pipeline().keeps_count else self._skip
        if self._planning is not None:
            self._machinery.read_ahead(2 * self._planning.window_bytes // plan.steps.world)
        elif self._stream.pipeline().shuffle is not None:
            self._machinery.read_ahead(self._blueprint.window_bytes)
        recipe = self._blueprint.recipe
        recipe.batch_size = plan.batch_size
        reader = self._machinery.reader(self._blueprint.storage_options)
        source = self._blueprint.source(plan, self._planning, reader, caller)
        journey = Journey(plan.received(), plan.save)
        iterator = self._machinery.iterate(
            self,
            source,
            recipe,
            self._key(plan),
            _weakly(self._blueprint.prepare),
            partial(_use_up, self._epochs, self._machinery.meters, plan, journey),
            self._name,
            plan.batches,
            cuts=plan.cuts(),
            track=plan.track(source.mark if self._planning is None else None),
            limit=self._limit(plan),
            skips=self._skips(plan),
            journey=journey,
        )
        iterator.leave_out = left_out
        if ranks.is_torch:
            iterator.before = partial(ranks.agree, "the plan of an epoch", plan.digest())
        self._journey, self._current, self._live = journey, plan, weakref.ref(iterator)
        return iterator

    # Planning an epoch.

    def _find_out(self) -> Ranks:
        """Which rank this is now, and how samples are divided among that many."""
        ranks = self._find_ranks()
        if ranks != self._ranks:
            self._ranks, self._planning, self._facts = ranks, None, None
            try:
                self._prepare_for(ranks)
            except BaseException:
                self._ranks = None
                raise
        return ranks

    def _prepare_for(self, ranks: Ranks) -> None:
        """Find out how samples can be divided among ranks, the first time that is needed."""
        pipeline = self._stream.pipeline()
        times, samples = pipeline.passes
        if ranks.world > 1 and samples is None:
            source = pipeline.source
            if isinstance(source, Shards) and not source.is_compressed:
                log.warning(
                    "%d ranks share shards without an index: one is made first, of the headers of their members: a "
                    "request for every few of them. `headrace index` makes it once for all",
                    ranks.world,
                )
                self._use(with_built_index(self._stream))
                pipeline = self._stream.pipeline()
            if not self._has_numbers:
                raise OptionError(
                    f"{ranks.world} ranks cannot share the samples of {self._stream!r}, which are counted while they "
                    "are read: make an index (headrace index URL…; compressed shards cannot have one of members), or "
                    ".epoch(samples=N), or shard=False, which gives every rank all samples"
                )
            if not pipeline.keeps_count and (pipeline.limit is None or times is not None):
                raise OptionError(
                    f"{', '.join(pipeline.changing)} leaves samples out, so that {ranks.world} ranks would have "
                    "different numbers of batches: put .epoch(samples=N) behind it, or filter by keys of an index "
                    "(.filter(f, field='__key__')), or shard=False, which gives every rank all samples"
                )

    @property
    def _has_numbers(self) -> bool:
        """Whether samples have numbers, as far as this needs them."""
        pipeline = self._stream.pipeline()
        source = pipeline.source
        if self._ranks is not None and self._ranks.world > 1 and isinstance(source, IndexedShards):
            return not source.is_compressed
        return pipeline.has_numbers

    def _known_facts(self) -> Facts:
        """What states must agree about."""
        if self._facts is None:
            pipeline, settings = self._stream.pipeline(), self._settings
            told: list[str]
            if self._has_numbers:
                self._planning = self._planning or Planning(pipeline, settings.seed)
                data, count, told = self._planning.data, self._planning.count_of_pass, self._planning.told()
                for line in told:
                    if "windows" in line and self._planning.window_bytes:
                        log.info("%s: a window has about %d bytes, over all ranks", line, self._planning.window_bytes)
            else:
                source = pipeline.source
                urls = source.urls if isinstance(source, Shards | IndexedShards) else (type(source).__name__,)
                data, count = data_digest(urls, None), None
                told = told_as_read(pipeline.order)
            self._facts = Facts(seed=settings.seed, data=data, count=count, order=tuple(told), steps=pipeline.changing)
        return self._facts

    def _step(self, ranks: Ranks) -> int:
        """Samples of a global batch."""
        settings = self._settings
        size = self._kept_step or settings.global_batch_size or settings.batch_size * ranks.world
        if size < ranks.world:
            raise OptionError(f"global_batch_size={size} for {ranks.world} ranks: each must have a sample of each step")
        return size

    def _plan(self) -> EpochPlan:
        """The next epoch, from its begin or from the state that was loaded."""
        ranks, settings, pipeline = self._ranks or self._find_ranks(), self._settings, self._stream.pipeline()
        facts = self._known_facts()
        epochs = self._epochs
        begin = State(
            epoch=epochs.number,
            cursor=epochs.carried,
            carried=as_ranges(epochs.carried.holes),
            batch_size=0 if settings.global_batch_size else settings.batch_size,
            world=ranks.world,
            mark=epochs.mark,
        )
        order: Order | None = None
        size = self._step(ranks)
        is_counted = self._planning is not None
        is_known = is_counted and pipeline.keeps_count
        is_shared = is_known and settings.in_order
        if not is_known and settings.tail in ("pad", "carry"):
            raise OptionError(
                f"tail={settings.tail!r} needs to know how many samples there are, and {self._stream!r} does not: "
                "'short' and 'drop' are left"
            )
        if settings.tail == "carry" and any(isinstance(o, Pick) and not o.is_fixed for o in pipeline.order):
            raise OptionError("tail='carry' of .sample(sampler): which samples were left would have to be asked again")
        if self._loaded is not None:
            begin, order = self._loaded.state, self._loaded.order
        if self._planning is not None and order is None:
            order = self._planning.order(begin.epoch)
        if self._loaded is not None:
            begin, size = self._gone_on(begin, ranks, size, is_shared, order)
        steps = Steps(
            begin.cursor,
            ENDLESS if order is None else order.count,
            size,
            settings.tail if is_known else "short",
            ranks.rank if is_counted else 0,
            ranks.world if is_counted else 1,
            1 if order is None else order.lanes,
            np.array(begin.done, np.int64).reshape(-1, 2),
        )
        plan = EpochPlan(
            begin=begin,
            facts=facts,
            order=order,
            numbers=_no_numbers if self._planning is None else self._planning.numbers,
            steps=steps,
            rank=ranks.rank,
            world=ranks.world,
            batch_size=steps.batch if is_known else self._batch_size(ranks),
            keeps_count=pipeline.keeps_count,
            is_shared=is_shared,
            source=type(pipeline.source).__name__,
            is_resumed=self._loaded is not None,
            share=self._share(begin, ranks, size),
            why_no_state=self._why_no_state(),
        )
        return plan if not self._skip or not pipeline.keeps_count else plan.skipped(self._skip)

    def _batch_size(self, ranks: Ranks) -> int:
        whole = self._settings.global_batch_size
        return self._settings.batch_size if whole is None else _part(whole, ranks)

    def _key(self, plan: EpochPlan) -> int:
        """From which, with positions, random numbers are made."""
        key = sample_seed(self._settings.seed, plan.number)
        if plan.order is None and plan.world > 1:  # then each rank counts its own samples
            key ^= draw("rank", plan.rank)
        return key

    def _gone_on(
        self, begin: State, ranks: Ranks, size: int, is_shared: bool, order: Order | None
    ) -> tuple[State, int]:
        """(where to go on, samples of a step) from a state that may be of other ranks, and other batches.

        Raises:
            StateMismatchError: it is of one of several other ranks, or of another global batch.
        """
        settings, keeps_count = self._settings, self._stream.pipeline().keeps_count
        if settings.global_batch_size is None and settings.batch_size == begin.batch_size and size != begin.step:
            size = self._kept_step = begin.step  # on other ranks: the global batch stays, in later epochs too
        if begin.rank is not None:
            is_mine = (begin.rank, begin.world) == (ranks.rank, ranks.world)
            if is_mine and (order is None or begin.step == size or not keeps_count) and not is_shared:
                return begin, begin.step
            if begin.world > 1 or order is None:
                raise StateMismatchError(
                    f"the state is of rank {begin.rank} of {begin.world} alone, and this is rank {ranks.rank} of "
                    f"{ranks.world}" + ("" if order is None else ": merge the states of all ranks by hr.merge_states"),
                    field="world",
                )
            begin = replace(begin, cursor=merged([begin]), done=(), rank=None)
        if settings.global_batch_size is None and size != begin.step and ranks.world != begin.world:
            raise StateMismatchError(
                f"the state is of global batches of {begin.step} samples, and batch_size={settings.batch_size} on "
                f"{ranks.world} ranks makes {size}: global_batch_size= says which of them is meant",
                field="step",
            )
        if size < ranks.world:
            raise StateMismatchError(
                f"global batches of {size} samples cannot be shared by {ranks.world} ranks", field="step"
            )
        begin = replace(begin, batch_size=0 if settings.global_batch_size else settings.batch_size)
        if not is_shared:
            whole, rest = divmod(begin.samples, size)
            begin = replace(begin, rank=ranks.rank, samples=whole * _part(size, ranks) + _part(rest, ranks))
        return begin, size

    def _limit(self, plan: EpochPlan) -> int | None:
        """How many samples that were left over there are to give at most, on this rank."""
        limit = self._stream.pipeline().limit
        if limit is None:
            return None
        return limit - plan.begin.samples if plan.share is None else plan.share.count

    def _share(self, begin: State, ranks: Ranks, size: int) -> Steps | None:
        """This rank's samples of an epoch of so many: ranks have as many batches, whatever number of samples it is."""
        pipeline = self._stream.pipeline()
        samples = pipeline.limit if pipeline.passes[1] is None else pipeline.passes[1]
        if samples is None or ranks.world == 1 or (self._planning is not None and pipeline.keeps_count):
            return None
        tail: Tail = "drop" if self._settings.tail == "drop" else "short"
        done = np.array([[0, begin.samples]] if begin.samples else [], np.int64).reshape(-1, 2)
        return Steps(Cursor.at(), samples, size, tail, ranks.rank, ranks.world, done=done)

    def _why_no_state(self) -> str | None:
        shuffle = self._stream.pipeline().shuffle
        if shuffle is not None and not shuffle.keeps_position:
            return "states of .shuffle(by='buffer') would have to hold the samples in the buffer; 'window' has states"
        return None

    def _skips(self, plan: EpochPlan) -> Skips | None:
        policy = self._settings.skips
        if policy is None:
            return None
        meters = self._machinery.meters
        return Skips(
            weakref.ref(policy),
            plan.number,
            meters,
            packing.unpack_error,
            packing.pack_error,
            plan.begin.skipped,
            needs_batches=plan.world > 1,
        )


class _Loaded(NamedTuple):
    """A state that the next iterator goes on from."""

    state: State
    packed: dict[str, Any]
    order: Order | None


def _part(count: int, ranks: Ranks) -> int:
    """How many of so many samples are this rank's."""
    return (ranks.rank + 1) * count // ranks.world - ranks.rank * count // ranks.world


def _no_numbers(order: Order, positions: Ints) -> Ints:  # noqa: ARG001
    return positions


def _weakly(prepare: Callable[[Machinery], Awaitable[None]]) -> Callable[[Machinery], Awaitable[None]]:
    """The same method, without keeping its object alive."""
    method = weakref.WeakMethod(prepare)

    async def call(machinery: Machinery) -> None:
        found = method()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        await found(machinery)

    return call


def _use_up(epochs: _Epochs, meters: LoaderMeters, plan: EpochPlan, journey: Journey) -> None:
    """The last batch of an epoch was given on."""
    epochs.advance(plan, journey)
    if plan.batches is not None:
        meters.repeated += plan.steps.repeated
        meters.left_out += plan.steps.left_out


class _Epochs:
    """Which epoch is next. The iterators advance it, and must not keep the loader alive by that."""

    def __init__(self, begin: State | None = None) -> None:
        self.number = 0 if begin is None else begin.epoch
        self.carried = Cursor.at()  # where it begins
        self.mark: Any = None
        if begin is not None and begin.carried:
            self.carried = Cursor(0, np.array(begin.carried, np.int64))

    def advance(self, finished: EpochPlan, journey: Journey) -> None:
        if finished.number >= self.number:
            self.number, self.carried = finished.number + 1, finished.carried()
            self.mark = finished.next_mark(journey.received.mark)
