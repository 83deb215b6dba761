"""The plan of one epoch, its start state and the states saved during it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.scheduler.position_map import (
    BatchBoundaries,
    EvenBoundaries,
    GroupOrigins,
    Origins,
    PositionMap,
    as_numbers,
)
from headrace.errors import OptionError, StateMismatchError
from headrace.order.cursor import Cursor, among_left, compressed, united
from headrace.order.orders import ENDLESS, Order
from headrace.order.permutation import draw, sample_seed
from headrace.order.steps import Steps, share
from headrace.pipeline.pipeline import Pipeline
from headrace.state.state import Fingerprint, ResumePoint, StagePoint, State, is_as_saved, last_positions, whole_check
from headrace.types import Ints, Ranges

if TYPE_CHECKING:
    from headrace.order.packed_rows import PackedRows
    from headrace.order.packing import Packing
    from headrace.order.row_states import RowProgress

Numbers = Callable[[Order, Ints], Ints]


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """A level of counted samples: those that remain of the source, or those of groups.

    Attributes:
        limit: Maximum number of samples in the epoch, on all ranks together. None: no limit.
        is_grouped: True if the samples are made of groups of the level before.
        is_numbered: True if a step needs the numbers of the samples of the level before.
    """

    limit: int | None = None
    is_grouped: bool = False
    is_numbered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The plan of one epoch, for one iterator.

    Attributes:
        order: Order of the samples. None: samples have no numbers.
        numbers: Maps positions of the order to sample numbers.
        steps: This rank's positions.
        rank, world: This process's part of the data. Without sample numbers `steps` covers only this rank's samples.
        keeps_count: True if each source sample becomes one sample of a batch.
        is_shared: True if all ranks receive the same steps, so that one state is valid for all.
        is_resumed: True if a state was loaded. Else `begin` is used for states only, and the source keeps its position.
        leave_out: Number of first batches to discard.
        share: This rank's samples of an epoch with a given number of samples that are counted as they come.
        counts: Samples per shard, if each rank reads a contiguous part of the epoch from shards read from their start.
        pass_count: Positions per pass, if ranks share an epoch counted as samples come. None: not known, or counted
            elsewhere.
        is_left_out: True for positions of excluded documents. None: nothing is excluded.
        why_no_state: Reason for refusing states. None: states are possible.
        is_single: True if samples are emitted one by one, also those of an uneven last step.
    """

    begin: State
    order: Order | None
    numbers: Numbers
    steps: Steps
    rank: int
    world: int
    batch_size: int
    keeps_count: bool
    is_shared: bool
    source: str
    is_resumed: bool = False
    levels: tuple[LevelPlan, ...] = (LevelPlan(),)
    leave_out: int = 0
    share: Steps | None = None
    counts: Ints | None = None
    packing: Packing | None = None
    pass_count: int | None = None
    is_left_out: Callable[[int], bool] | None = None
    why_no_state: str | None = None
    is_single: bool = False

    @property
    def number(self) -> int:
        return self.begin.epoch

    @property
    def facts(self) -> Fingerprint:
        return self.begin.fingerprint

    @property
    def key(self) -> int:
        """Seed of random numbers, combined with positions."""
        key = sample_seed(self.facts.seed, self.number)
        if self.order is None and self.world > 1:  # each rank numbers its own samples
            key ^= draw("rank", self.rank)
        return key

    @property
    def left_to_keep(self) -> tuple[int | None, ...]:
        """Maximum number of samples still to come per level, on this rank. None: no limit."""
        *limits, last = (level.limit for level in self.levels)
        pairs = zip(limits, self._stages, strict=False)
        left = [None if limit is None else max(0, limit - stage.emitted) for limit, stage in pairs]
        if last is not None:
            last = max(0, last - self.begin.samples) if self.share is None else self.share.count
        return (*left, last)

    @property
    def batches(self) -> int | None:
        """Number of batches still to come. None: not known."""
        if self.order is None or not self.keeps_count or self.steps.end >= ENDLESS:
            return None
        _, count, last = self.steps.sizes()
        return count + len(last)

    @property
    def is_even(self) -> bool:
        """True if the batches of each step have equal sizes on all ranks, as far as known."""
        steps = self.steps if self.share is None else self.share
        if self.world == 1:
            return True
        return not self.is_uneven and not any(size % self.world for size in (steps.size, *steps.last))

    @property
    def is_uneven(self) -> bool:
        """True if each rank ends with its own data, independently of the others."""
        return self.world > 1 and self.steps.tail == "uneven"

    def check_end(self, received: ResumePoint) -> None:
        """Raise OptionError if this rank received too few batches of a shared, uncounted epoch."""
        if self.share is None or self.is_uneven:
            return
        _, full, last = self.share.sizes()
        came, owed = received.batches - self.begin.batches, full + len(last)
        if came < owed:
            why = (
                "a short last step is not shared evenly, so that some rank may need a few samples more; have an "
                "iterable begin again at its end, give .epoch(samples=N) fewer of them, or hr.Ranks(last_batch='drop')"
            )
            if self.counts is not None:
                why = (
                    "shards have fewer samples than in their index, or failed and were skipped (stats().skipped); "
                    "leave these shards out, or take hr.Ranks(last_batch='uneven')"
                )
            raise OptionError(
                f"the samples of {self.source} have come to their end on rank {self.rank} of {self.world} after {came} "
                f"of {owed} batches, and other ranks may have more: {why}"
            )

    def boundaries(self) -> BatchBoundaries:
        if self.batches is None:
            if self.share is None or self.is_single:
                return EvenBoundaries(1 if self.is_single else self.batch_size)
            return EvenBoundaries(*self.share.sizes())
        return EvenBoundaries(*self.steps.sizes())

    def packed_rows(self) -> PackedRows | None:
        if self.packing is None or self.order is None:
            return None
        from headrace.order.packed_rows import PackedRows

        size = self.steps.size
        rows = range(*share(size, self.rank, self.world))
        return PackedRows(self.packing, rows, size, self.order.count, self.begin.rows, self.is_left_out)

    def position_map(self, mark: Callable[[int], object] | None, rows: PackedRows | None) -> PositionMap:
        """Return the position map of the epoch. `mark` returns resume marks of the source."""
        positions = None if self._is_plain else lambda start, stop: as_numbers(self.steps.positions(start, stop))
        kept_from = None if self.keeps_count else self.begin.samples + (self.rank << 44)
        if rows is not None and kept_from is not None:
            from headrace.engine.scheduler.group_level import RowMap

            return RowMap(kept_from, rows)
        if mark is not None:
            ask, done = mark, self._done
            mark = (lambda number: ask(_original(number, done))) if done else ask
        is_limited = any(level.limit is not None for level in self.levels[:-1])
        is_limited |= any(level.is_numbered for level in self.levels)
        repeated = None if self.share is None or self.counts is not None else self._count_repeated
        return PositionMap(positions, kept_from, mark, self._origins, is_limited=is_limited, repeated=repeated)

    def _count_repeated(self, numbers: Ints) -> int:
        """Count the source samples, given by number, that belong to later passes."""
        if self.pass_count is None or not len(numbers):
            return 0
        first = self.steps.step_at(self.pass_count)
        if numbers.max() < first:
            return 0
        are_later = numbers >= first + self.steps.batch  # numbers in between are of the step in which the pass ends
        inside = numbers[(numbers >= first) & ~are_later]
        ending = self.steps.positions(first, first + self.steps.batch) >= self.pass_count
        return int(are_later.sum()) + int(ending[inside - first].sum())

    def passed(self, received: ResumePoint) -> tuple[int, int]:
        """Return (samples of later passes, unread samples of the first pass) on this rank.

        Both are 0 if not known. In packed rows, documents are counted.
        """
        if self.pass_count is None:
            return received.repeated, 0
        if self.packing is not None:
            return self._passed_by_rows(self.pass_count, received.rows)
        used = max((stop for _, stop in received.covers), default=0)
        first = self.steps.step_at(self.pass_count)
        ending = self.steps.positions(first, first + self.steps.batch)[max(0, used - first) :]
        return received.repeated, max(0, first - used) + int((ending < self.pass_count).sum())

    def _passed_by_rows(self, pass_count: int, rows: RowProgress | None) -> tuple[int, int]:
        size, begin = self.steps.size, self.begin.rows
        numbers = np.arange(*share(size, self.rank, self.world))
        ends = np.maximum(0, -((numbers - pass_count) // size))  # documents per row in the first pass
        first, drawn = (
            np.zeros_like(numbers) if some is None else np.array([cursor.drawn for cursor in some.cursors])
            for some in (begin, rows)
        )
        repeated = np.maximum(drawn - ends, 0) - np.maximum(first - ends, 0)
        return int(repeated.sum()), int(np.maximum(ends - drawn, 0).sum())

    @property
    def _origins(self) -> list[Origins]:
        pairs = zip(self.levels, self._stages, strict=True)
        return [GroupOrigins(stage) if level.is_grouped else Origins(stage) for level, stage in pairs]

    @property
    def _stages(self) -> tuple[StagePoint, ...]:
        return self.begin.stages or (StagePoint(),) * len(self.levels)

    @property
    def _is_plain(self) -> bool:
        """True if positions equal the source's count."""
        steps, cursor = self.steps, self.steps.begin
        is_at_start = not cursor.position and not len(cursor.holes) and not len(steps.done)
        return is_at_start and not steps.repeated and steps.world == 1 and steps.lanes == 1

    @property
    def _done(self) -> Ranges:
        return as_ranges(self.steps.done)

    def received(self) -> ResumePoint:
        begin = self.begin
        samples = begin.samples // self.world if self.is_shared else begin.samples
        return ResumePoint(
            skipped=begin.skipped, stages=begin.stages, rows=begin.rows, batches=begin.batches, samples=samples
        )

    def digest(self) -> int:
        """Return a hash of everything that ranks must agree about at the start."""
        steps = self.steps
        state = replace(self._planned, rank=None, skipped=(0, 0), mark=None)
        if not self.is_shared:
            resplit = state.resplit._replace(rank_samples=0)
            state = replace(state, received=(), samples=0, resplit=resplit, stages=(), rows=None)
        if self.order is None:
            state = replace(state, cursor=Cursor.at())  # differs between ranks
        coming = steps.begin.coming(0, min(_COMPARED, steps.left))
        numbers = _NONE if self.order is None else self.numbers(self.order, coming)
        if steps.deal is not None and steps.full:
            numbers = np.concatenate([numbers, steps.dealt(0, steps.size)[1]])
        return int(whole_check(state.to_json(None), numbers), 16)

    def save(self, received: ResumePoint) -> dict[str, object]:
        """Return a state as JSON.

        Raises:
            OptionError: there is no state; the message gives the reason.
        """
        if self.why_no_state is not None:
            raise OptionError(self.why_no_state)
        state = self.after(received)
        return state.to_json(self.last_numbers(state))

    @property
    def _planned(self) -> State:
        """The start state, with the steps of this plan."""
        steps = self.steps
        return replace(self.begin, end=steps.end, step=steps.size, lanes=steps.lanes, tail=steps.tail, world=self.world)

    def after(self, received: ResumePoint) -> State:
        """Return the state once this has been received."""
        steps, rank = self.steps, None if self.is_shared else self.rank
        state = replace(self._planned, rank=rank)
        if received.is_over:
            return State(
                fingerprint=state.fingerprint,
                epoch=self.number + 1,
                cursor=self.carried(),
                carried=as_ranges(self.carried().holes),
                end=state.end,
                step=state.step_now,
                batch_size=state.batch_size,
                lanes=state.lanes,
                tail=state.tail,
                rank=rank,
                world=state.world,
                mark=self.next_mark(received),
            )
        state = replace(
            state,
            batches=received.batches,
            skipped=received.skipped,
            skip=max(0, self.leave_out - (received.batches - self.begin.batches)),
            stages=received.stages,
            rows=received.rows,
        )
        if self.is_shared:
            used = sum(stop - start for start, stop in received.covers)
            cursor = steps.after(EvenBoundaries(*steps.sizes()).find(used)[0])
            return replace(state, cursor=cursor, samples=self.begin.samples + steps.left - _left(cursor, steps.end))
        done = united([*self._done, *(r for a, b in received.covers for r in among_left(a, b, self._done))])
        samples = self.begin.samples + received.used  # counts samples that remain after filters
        if self.order is not None or not received.batches - self.begin.batches:
            return replace(state, received=done, samples=samples)
        if received.mark is None:
            raise OptionError(
                f"{self.source} gives no state: it, or the iterator that its aiter() gives, needs state_dict() and "
                "load_state_dict(state)"
            )
        mark, at = received.mark
        mark = mark() if callable(mark) else mark
        if not at and not self.is_resumed and type(mark) is dict:
            mark = self.begin.mark  # before aiter() ran, the data set had the state of the last epoch's end
        cursor = Cursor.at(self.begin.cursor.position + at)
        done = united((max(a - at, 0), b - at) for a, b in done if b > at)
        return replace(state, cursor=cursor, received=done, mark=mark, samples=samples)

    def next_mark(self, received: ResumePoint) -> object:
        """Return the resume mark after this epoch, with the data set in its final state."""
        state, at = (self.begin.mark, 0) if received.mark is None else received.mark
        if not isinstance(state, dict) or "dataset" not in state:
            return None
        took = {} if self.share is None else {"took": self.begin.resplit.rank_samples + self.share.whole}
        is_cut = self.share is not None or any(level.limit is not None for level in self.levels)
        if is_cut and not self.keeps_count:  # the data set has given another number of samples than came out
            used = max((stop for _, stop in received.covers), default=0)
            took = {"took": self.begin.cursor.position + used}
        return {"over": self.begin.cursor.position + at, **took, **state}

    def skipped(self, batches: int) -> EpochPlan:
        """Return the plan that starts `batches` batches later."""
        steps, begin = self.steps, self.begin
        if self.is_shared:
            cursor = steps.after(min(batches, steps.steps))
            samples = begin.samples + steps.left - _left(cursor, steps.end)
            begin = replace(begin, cursor=cursor, batches=begin.batches + batches, samples=samples)
            return replace(self, begin=begin, steps=replace(steps, begin=cursor))
        count, share = self.boundaries().start(batches), self.share
        if self.batches is not None:
            count = min(count, steps.count)
        done = united([*self._done, *among_left(0, count, self._done)])
        begin = replace(begin, received=done, batches=begin.batches + batches, samples=begin.samples + count)
        if share is not None:
            received = as_ranges(share.done)
            share = replace(share, done=as_array(united([*received, *among_left(0, count, received)])))
        return replace(self, begin=begin, steps=replace(steps, done=as_array(done)), share=share)

    def carried(self) -> Cursor:
        """Return the start of the next epoch, including samples carried over from this one."""
        steps = self.steps
        if steps.tail != "carry" or self.order is None:
            return Cursor.at()
        left = steps.after(steps.steps)
        positions = left.coming(0, _left(left, steps.end))
        if not len(positions):
            return Cursor.at()
        return Cursor(0, compressed(positions) - steps.end)

    def last_numbers(self, state: State) -> Ints:
        """Return the numbers of the samples directly before a state."""
        if self.order is None or state.epoch != self.number:
            return _NONE
        return self.numbers(self.order, last_positions(state))

    def check(self, packed: dict[str, object]) -> None:
        """Raise StateMismatchError if the samples before the loaded state differ from this plan."""
        try:
            is_the_same = is_as_saved(packed, self.last_numbers(State.from_json(packed)))
        except (ArithmeticError, IndexError, OptionError, TypeError, ValueError):  # from invalid numbers
            is_the_same = False
        if not is_the_same:
            raise StateMismatchError(
                "the samples before this state are not those of this loader's order: the data or a sampler have "
                "changed, or the state was edited",
                field="check",
            )


def levels_of(pipeline: Pipeline) -> tuple[LevelPlan, ...]:
    limits = (*(regroup.limit for regroup in pipeline.regroups), pipeline.limit)
    are_grouped = (False, *(regroup.grouping is not None for regroup in pipeline.regroups))
    are_numbered = (False, *(any(step.is_numbered for step in regroup.steps) for regroup in pipeline.regroups))
    return tuple(map(LevelPlan, limits, are_grouped, are_numbered))


def as_ranges(holes: Ints) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in holes)


def as_array(ranges: Iterable[tuple[int, int]]) -> Ints:
    return np.array([(start, stop) for start, stop in ranges if start < stop], np.int64).reshape(-1, 2)


def _left(cursor: Cursor, end: int) -> int:
    return max(0, end - cursor.position) + cursor.hole_count


def _original(number: int, done: Ranges) -> int:
    """Map a sample number that excludes `done` samples to the source's number."""
    return among_left(number, number + 1, done)[0][0]


_COMPARED = 1024  # number of samples to come that ranks compare
_NONE = np.zeros(0, np.int64)
