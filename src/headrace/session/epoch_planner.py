"""Plans the next epoch of a loader, from the start or from a state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace._util import check
from headrace._util.functions import name_of
from headrace.dataset.stream import Stream
from headrace.delivery.progress import Progress
from headrace.engine.epoch_plan import EpochPlan, as_array, as_ranges, levels_of
from headrace.engine.open_readers import described_as_read
from headrace.errors import StateMismatchError
from headrace.options import Balance, Settings
from headrace.order.cursor import Cursor
from headrace.order.orders import ENDLESS, Order
from headrace.order.steps import Deal, Steps, Work, dealt, few_left
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.session.rank_sharing import (
    check_packing,
    check_rows,
    counted_share,
    divided,
    has_counts,
    has_numbers,
    own_rows,
    part_of,
    reindexed,
    why_not_merged,
)
from headrace.state.state import Fingerprint, ResplitBase, State, merged
from headrace.torch_compat.ranks import RankShare
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.session.exclusion import ExclusionFilter

log = logging.getLogger("headrace")


class EpochCursor:
    """The number and start of the next epoch. Must not hold the loader, as iterators advance it."""

    def __init__(self, begin: State | None = None) -> None:
        self.number = 0 if begin is None else begin.epoch
        self.carried = Cursor.at()  # start of the epoch
        self.mark: object = None
        self.is_announced = False  # set while an iterator is in use: that iterator no longer advances the number
        self.is_told = False  # set by set_epoch: a loop that stops early does not advance the number
        self._progress: Progress | None = None
        self._begun_at = 0  # batches received before the last iterator started
        if begin is not None and begin.carried:
            self.carried = Cursor(0, np.array(begin.carried, np.int64))

    def begin(self, progress: Progress) -> None:
        """Register a new iterator, whose end is the end of the epoch. Replaces an earlier one."""
        self._progress, self.is_announced = progress, False
        self._begun_at = progress.received.batches

    def advance(self, finished: EpochPlan, progress: Progress) -> None:
        """Advance at the end of an iterator."""
        if progress is self._progress and not self.is_announced:
            self.number, self.carried = finished.number + 1, finished.carried()
            self.mark = finished.next_mark(progress.received)
            self._progress = None

    def leave(self) -> None:
        """Advance if the last iterator was abandoned after some batches, as torch draws a new order."""
        progress = self._progress
        if progress is None or self.is_told or progress.received.batches <= self._begun_at:
            return
        self.number, self.carried, self._progress = self.number + 1, Cursor.at(), None


class NextEpoch:
    """Plans the next epoch of a stream, for the ranks at that time.

    Attributes:
        stream: With an index, once several ranks have needed one.
        planning: Orders of a stream whose samples have numbers, once needed.
        turn: Number and start of the epoch.
        skip: Number of batches to skip at the start.
    """

    def __init__(self, stream: Stream, settings: Settings, find_ranks: Callable[[], RankShare]) -> None:
        self.stream, self._settings, self._find_ranks = stream, settings, find_ranks
        self.ranks: RankShare | None = None
        self.planning: Planning | None = None
        self.turn, self.skip = EpochCursor(), 0
        self._facts: Fingerprint | None = None
        self._loaded: _Loaded | None = None
        self._kept_step: int | None = None  # samples per global batch in the loaded state
        self._excluded: ExclusionFilter | None = None

    @property
    def is_whole(self) -> bool:
        return self._loaded is None and not self.skip

    @property
    def goes_on(self) -> bool:
        """True if the next epoch resumes from a loaded state."""
        return self._loaded is not None

    def set_epoch(self, epoch: int, *, is_in_use: bool) -> bool:
        """Set the epoch. True if it has changed. A loaded state is kept for its own epoch only."""
        self.turn.is_announced |= is_in_use
        self.turn.is_told = True
        if epoch == self.turn.number:
            return False
        if self._loaded is not None:
            self.skip -= self._loaded.state.skip
        self._loaded = None
        self.turn.number, self.turn.carried, self.turn.is_announced = epoch, Cursor.at(), True
        return True

    def started(self, progress: Progress) -> None:
        """Register an iterator over the epoch. The next epoch starts without loaded state and skip."""
        self._loaded, self.skip = None, 0
        self.turn.begin(progress)

    def length(self) -> int:
        """Return the batches in a complete epoch. TypeError if not known before its end."""
        len(self.stream)  # raises with the reason if not known
        pipeline, ranks = self.stream.pipeline(), self._find_ranks()
        if not pipeline.has_numbers and ranks.world == 1:
            count, settings = len(Stream(pipeline.source.data, pipeline.order.operators)), self._settings
            whole, rest = divmod(count, self._step(ranks))
            return whole + bool(rest and settings.tail == "short")
        planning, size, cursor = (
            self.planning or Planning(pipeline, self._settings.seed),
            self._step(ranks),
            self.turn.carried,
        )
        if self._settings.exclude is not None:
            cursor = self._excluding(planning).remaining(cursor, self.turn.number, size)
        return Steps(cursor, planning.count(), size, self._settings.tail, ranks.rank, ranks.world).batches

    def state(self, batches: int | None) -> dict[str, object]:
        self.find_out()
        plan = self.plan()
        received = plan.received()
        if batches not in (None, received.batches):
            raise check.invalid("state_dict(): batches", batches, f"{received.batches}: no batch was returned since")
        loaded = self._loaded
        if loaded is not None and loaded.packed is not None and self.skip == loaded.state.skip:
            return copy.deepcopy(loaded.packed)
        return plan.save(received)

    def load(self, state: Mapping[str, object], *, force: bool) -> None:
        """Start from a state. An empty state is the start of the first epoch."""
        if not state:
            self._loaded, self.turn, self._kept_step, self.skip = None, EpochCursor(), None, 0
            return
        loaded, ranks = State.from_json(state), self.find_out()
        before = self._loaded, self.turn, self._kept_step, self.skip
        known = self.stream, self.planning, self._facts
        try:
            self.stream = reindexed(self.stream, loaded.fingerprint, ranks.world)
            if self.stream is not known[0]:
                self._facts = None
            facts = self._known_facts()
            if not force:
                facts.compare(loaded.fingerprint)
            order = None if self.planning is None else self.planning.order(loaded.epoch)
            packed = copy.deepcopy(dict(state))
            self._loaded = _Loaded(loaded, None if force else packed, order)
            self.turn, self._kept_step, self.skip = EpochCursor(loaded), None, loaded.skip
            plan = self.plan()
            if not force:
                plan.check(packed)
        except BaseException:
            self._loaded, self.turn, self._kept_step, self.skip = before
            self.stream, self.planning, self._facts = known
            raise

    def find_out(self) -> RankShare:
        """Determine this rank and the division of samples among all ranks."""
        ranks = self._find_ranks()
        if ranks != self.ranks:
            self.ranks, self.planning, self._facts = ranks, None, None
            try:
                if ranks.world > 1:
                    self.stream = divided(self.stream, ranks.world, self._settings.tail)
            except BaseException:
                self.ranks = None
                raise
        return ranks

    def _known_facts(self) -> Fingerprint:
        if self._facts is None:
            pipeline, settings = self.stream.pipeline(), self._settings
            described: list[str]
            if has_numbers(pipeline, 1 if self.ranks is None else self.ranks.world):
                self.planning = self.planning or Planning(pipeline, settings.seed)
                count, described = self.planning.count_of_pass, self.planning.described()
                data = self.planning.fingerprint
                for line in described:
                    if "windows" in line and self.planning.window_bytes:
                        log.info("%s: a window has about %d bytes, over all ranks", line, self.planning.window_bytes)
            else:
                data, count = pipeline.source.at_revision(pipeline.source.fingerprint()), None
                described = described_as_read(pipeline.order)
                if pipeline.source.ranks_by == "position":
                    described.append("ranks by position")
                if self.ranks is not None and has_counts(pipeline, self.ranks.world):
                    sizes = np.diff(pipeline.source.starts)
                    described.append(f"ranks by counts of shards, {pipeline.source.fingerprint_with(sizes)}")
            self._facts = Fingerprint(
                seed=settings.seed, data=data, count=count, order=tuple(described), steps=pipeline.changing
            )
        return self._facts

    def _step(self, ranks: RankShare) -> int:
        settings = self._settings
        size = self._kept_step or settings.global_batch_size or settings.batch_size * ranks.world
        if size < ranks.world:
            things = f"{size} samples in a step by hr.Ranks(global_batch_size={size})"
            raise check.too_few(things, ranks.world, "make it larger")
        return size

    def plan(self) -> EpochPlan:
        """Return the plan of the epoch, from its beginning or from the loaded state."""
        ranks, settings, pipeline = self.ranks or self._find_ranks(), self._settings, self.stream.pipeline()
        facts = self._known_facts()
        is_counted = self.planning is not None
        is_known = is_counted and pipeline.keeps_count
        is_uneven = settings.tail == "uneven" and ranks.world > 1
        is_shared = is_known and settings.in_order and not is_uneven
        self._check_tail(is_known)
        size = self._step(ranks)
        begin, order = (self._begin(ranks), None) if self._loaded is None else (self._loaded.state, self._loaded.order)
        if self.planning is not None and order is None:
            order = self.planning.order(begin.epoch)
        levels = levels_of(pipeline)
        if len(begin.stages) not in (0, len(levels)):
            raise StateMismatchError("the stages of the state are not those of this loader", field="stages")
        if any(one.used and not level.is_grouped for one, level in zip(begin.stages, levels, strict=False)):
            raise StateMismatchError("the state has used inputs of a stage that does not group samples", field="stages")
        if self._loaded is not None:
            begin, size = self._resharded(begin, ranks, size, is_shared, order)
        excluding = None if settings.exclude is None else self._excluding()
        if excluding is not None and pipeline.packing is None:
            begin = excluding.start_of(begin, size, order)
        steps = Steps(
            begin.cursor,
            ENDLESS if order is None else order.count,
            size,
            settings.tail if is_known or is_uneven else "short",
            ranks.rank if is_counted else 0,
            ranks.world if is_counted else 1,
            1 if order is None else order.lanes,
            as_array(begin.received),
            self._deal(order, is_shared=is_shared),
        )
        _check_last_steps(begin, steps)
        if settings.is_single and is_known and max(steps.last, default=0) > ranks.world:
            raise few_left(steps.left % ranks.world or steps.left, ranks.world)
        batch_size, shared, counts = steps.batch, None, None
        if not is_known:
            wanted = self._step(ranks)  # a rank that resumes from its own state may have read with another step size
            batch_size = part_of(wanted, ranks)
            self._check_skip(wanted)
            check_rows(begin, wanted, ranks)
            begin, shared = counted_share(begin, ranks, wanted, size, pipeline, settings.tail)
            if shared is not None and has_counts(pipeline, ranks.world):
                counts = np.diff(pipeline.source.starts)
            check_packing(pipeline, settings, shared, has_numbers=is_counted)
        begin = replace(begin, batch_size=self._announced_batch_size, fingerprint=facts)
        plan = EpochPlan(
            begin=begin,
            order=order,
            numbers=(lambda _, positions: positions) if self.planning is None else self.planning.numbers,
            steps=steps,
            rank=ranks.rank,
            world=ranks.world,
            batch_size=batch_size,
            keeps_count=pipeline.keeps_count,
            is_shared=is_shared,
            source=pipeline.source.name,
            is_resumed=self._loaded is not None,
            levels=levels,
            leave_out=0 if pipeline.keeps_count else self.skip,
            share=shared,
            counts=counts,
            packing=pipeline.packing,
            pass_count=None if shared is None or self.planning is None else _pass_count(pipeline, self.planning),
            is_left_out=None if excluding is None or order is None else partial(excluding.of_document, order),
            why_no_state=_why_no_state(pipeline),
            is_single=settings.is_single,
        )
        return plan if not self.skip or not pipeline.keeps_count else plan.skipped(self.skip)

    def _excluding(self, planning: Planning | None = None) -> ExclusionFilter:
        from headrace.session.exclusion import ExclusionFilter

        planning = planning or self.planning
        if planning is None:
            raise refusal("numbers", "exclude=", repr(self.stream))
        if self._excluded is None or self._excluded.planning is not planning:
            assert self._settings.exclude is not None
            self._excluded = ExclusionFilter(self._settings.exclude, planning, self._settings.tail)
        return self._excluded

    def _deal(self, order: Order | None, *, is_shared: bool) -> Deal | None:
        """Return how steps are assigned to ranks. None: each rank has a contiguous part."""
        balance = self._settings.balance
        if balance is None:
            return None
        if self.planning is None or order is None or not is_shared:
            needed = "samples with numbers, batches in order, and no operator such as a filter that drops samples"
            raise check.lacking("hr.Ranks(balance=)", needed)
        return RankBalancer(balance, self.planning, order)

    def _begin(self, ranks: RankShare) -> State:
        turn = self.turn
        return State(
            fingerprint=self._known_facts(),
            epoch=turn.number,
            cursor=turn.carried,
            carried=as_ranges(turn.carried.holes),
            batch_size=self._announced_batch_size,
            world=ranks.world,
            mark=turn.mark,
        )

    def _check_tail(self, is_known: bool) -> None:
        tail = self._settings.tail
        if not is_known and tail in ("pad", "carry"):
            needed = f"a known number of samples, unlike that of {self.stream!r}: 'short' and 'drop' are left"
            raise check.lacking(f"hr.Ranks(last_batch={tail!r})", needed)
        if tail == "pad" and self._settings.exclude is not None:
            raise check.conflict("hr.Ranks(last_batch='pad')", "exclude=", "'short', 'drop' and 'carry' work")
        if tail == "carry" and not self.stream.pipeline().order.is_fixed:
            raise check.conflict(
                "hr.Ranks(last_batch='carry')",
                ".sample(sampler)",
                "which samples were left would have to be asked again",
            )

    def _check_skip(self, size: int) -> None:
        state = None if self._loaded is None else self._loaded.state
        if state is not None and state.skip and state.step_now != size:
            raise StateMismatchError(
                f"the state is of {state.skip} batches to skip after a filter, of {state.step_now} samples on all "
                f"ranks, while here they have {size}: load it with batches of that size",
                field="global_batch_size",
            )

    def _resharded(
        self, begin: State, ranks: RankShare, size: int, is_shared: bool, order: Order | None
    ) -> tuple[State, int]:
        """Return (start state, samples per step) for a state of other ranks or batch sizes."""
        settings, keeps_count = self._settings, self.stream.pipeline().keeps_count
        # Single samples that are counted as they come have no global batch to keep.
        is_kept = settings.global_batch_size is None and not (settings.is_single and not is_shared)
        if is_kept and settings.batch_size == begin.batch_size:
            size = self._kept_step = begin.step_now  # with other ranks: keep the global batch, in later epochs too
        if begin.rank is not None:
            is_mine = (begin.rank, begin.world) == (ranks.rank, ranks.world)
            if is_mine and (order is None or begin.step == size or not keeps_count) and not is_shared:
                return begin, begin.step
            if begin.world > 1 or order is None:
                raise StateMismatchError(
                    f"the state is of rank {begin.rank} of {begin.world} alone, and this is rank {ranks.rank} of "
                    f"{ranks.world}: {why_not_merged(self.stream, begin.world, has_order=order is not None)}",
                    field="world_size",
                )
            if begin.stages:
                raise StateMismatchError(
                    f"the state is in the middle of what .{self.stream.pipeline().gives_many} made of some samples, "
                    f"which is one rank's own: load it with as many ranks as there were, {begin.world}",
                    field="stages",
                )
            begin = replace(begin, cursor=merged([begin]), received=(), rank=None)
        if is_kept and size != begin.step_now and ranks.world != begin.world:
            raise StateMismatchError(
                f"the state is of global batches of {begin.step_now} samples, and batch_size={settings.batch_size} on "
                f"{ranks.world} ranks makes {size}: set hr.Ranks(global_batch_size=) to one of them",
                field="global_batch_size",
            )
        if size < ranks.world:
            raise StateMismatchError(
                f"global batches of {size} samples cannot be shared by {ranks.world} ranks", field="global_batch_size"
            )
        if not is_shared:
            whole, rest = divmod(begin.samples, size)
            mine = whole * part_of(size, ranks) + part_of(rest, ranks)
            resplit = (
                ResplitBase()
                if order is not None and keeps_count
                else ResplitBase(begin.samples, mine, size, begin.batches)
            )
            begin = own_rows(replace(begin, rank=ranks.rank, samples=mine, resplit=resplit), size, ranks)
        return begin, size

    @property
    def _announced_batch_size(self) -> int:
        """Batch size to record in states. 0 if the loader was given the global batch size."""
        return 0 if self._settings.global_batch_size else self._settings.batch_size


class _Loaded(NamedTuple):
    """A state to resume from. `packed` is None if it was not compared with the loader."""

    state: State
    packed: dict[str, object] | None
    order: Order | None


def _pass_count(pipeline: Pipeline, planning: Planning) -> int | None:
    """Return the samples per pass, if each comes once. None: not known."""
    is_mixed = pipeline.packing is not None and pipeline.packing.mixing is not None
    return None if pipeline.source.is_endless or is_mixed else planning.pass_count


def _check_last_steps(state: State, steps: Steps) -> None:
    """Raise StateMismatchError if this rank received samples of last steps cut differently."""
    if not state.received or state.tail == steps.tail:
        return
    before = Steps(state.cursor, state.end, state.step, state.tail, steps.rank, steps.world)
    is_cut_alike = (before.full, before.last) == (steps.full, steps.last)
    if not is_cut_alike and state.received[-1][1] > min(before.full, steps.full) * steps.batch:
        raise StateMismatchError(
            f"the state is of the last steps of an epoch with last_batch={state.tail!r}, and this loader has "
            f"last_batch={steps.tail!r}: end that epoch with the former, or start another one by set_epoch()",
            field="last_batch",
        )


def _why_no_state(pipeline: Pipeline) -> str | None:
    if pipeline.source.why_no_state is not None:
        return pipeline.source.why_no_state
    if pipeline.order.shuffle is None or pipeline.order.shuffle.keeps_position:
        return None
    return "states of .shuffle(by='buffer') would have to hold the samples in the buffer; 'window' has states"


_POWERS = {"tokens": 1, "tokens^2": 2}


class RankBalancer:
    """Assigns the samples of a step to ranks. The number per rank does not change."""

    def __init__(self, balance: Balance, planning: Planning, order: Order) -> None:
        self._balance, self._planning, self._order = balance, planning, order
        if not isinstance(balance, str):
            return
        try:
            planning.work(np.zeros(0, np.int64), _POWERS[balance])
        except TypeError as error:
            raise check.lacking(
                f"hr.Ranks(balance={balance!r})",
                f"the number of tokens of each sample, which {planning.pipeline.source.name} knows only once they are "
                "read: give a function from an array of sample numbers to an array of work; or .pack() them",
            ) from error

    def __call__(self, positions: Ints, sizes: Sequence[int]) -> Ints:
        """Return the rank of each position of a step. `sizes` are the numbers per rank."""
        return dealt(self._work(self._planning.numbers(self._order, positions)), sizes)

    def _work(self, numbers: Ints) -> Work:
        if isinstance(self._balance, str):
            return self._planning.work(numbers, _POWERS[self._balance])
        try:
            work = np.asarray(self._balance(numbers), np.float64)
        except Exception as error:
            error.add_note(
                f"hr.Ranks(balance={name_of(self._balance)}) was asked for the work of {len(numbers)} samples"
            )
            raise
        if work.shape != numbers.shape or not (np.isfinite(work) & (work >= 0)).all():
            raise check.invalid("hr.Ranks(): result of balance", work, f"{len(numbers)} numbers, each 0 or more")
        return work
