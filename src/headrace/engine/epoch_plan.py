"""One epoch of a loader as it was planned: what comes on this rank, from which state on, and what is saved of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from headrace.datasets.pipeline import Pipeline
from headrace.deliver.progress import ProgressSnapshot
from headrace.errors import OptionError, StateMismatchError
from headrace.lanes import LaneProgress
from headrace.plan import Cursor, Order, Steps, draw, sample_seed, share
from headrace.plan.cursor import compressed
from headrace.plan.lane_packing import LanePacking
from headrace.plan.lane_run import LaneRun
from headrace.plan.mixed_lanes import MixedLaneRun
from headrace.plan.order import ENDLESS
from headrace.plan.ranges import among_left, united
from headrace.scheduler.boundaries import BatchBoundaries, EvenBoundaries
from headrace.scheduler.lane_map import LaneMap
from headrace.scheduler.origins import GroupOrigins, Origins
from headrace.scheduler.position_map import PositionMap, as_numbers
from headrace.state import Fingerprint, ResplitBase, State, last_positions
from headrace.state_checks import check_of, mark_check
from headrace.types import Ints, Ranges

Numbers = Callable[[Order, Ints], Ints]


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """Samples that are counted: those of the source that its steps leave, first of all, or those of another such level.

    Attributes:
        limit: how many come of it in the epoch at most, on all ranks together; None: all.
        is_grouped: whether it is made of groups of samples of the level before.
    """

    limit: int | None = None
    is_grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """What one iterator goes through.

    Attributes:
        begin: the state that it begins with.
        facts: what states of it agree about.
        order: which samples come; None: they have no numbers.
        numbers: of the samples at some positions of that.
        steps: this rank's way through the positions.
        rank, world: which part of the data is this process's; where samples have no numbers, `steps` are its own.
        batch_size: samples of a batch.
        keeps_count: whether each sample of the source comes in a batch.
        is_shared: whether all ranks receive the same steps, so that one state is that of all.
        is_resumed: whether a state was loaded; else `begin` is for states alone, and the source is as it should be.
        levels: of samples that are counted: those of the source are one, and groups of those of another one are, too.
        leave_out: how many of the batches that come first are not given.
        share: where an epoch has a number of samples that are counted while they come: which of them are this rank's.
        counts: where each rank reads a stretch of the epoch, of shards that are read from their start: how many samples
            each shard has.
        source: what its data set is called.
        packing: how documents are packed in lanes; None: they are not.
        pass_count: where ranks share an epoch whose samples are counted as they come: how many positions a pass over
            the data has; None: not known, or counted elsewhere.
        is_left_out: whether the one at a position is left out of these; None: none is.
        why_no_state: why states of it are refused; None: they are not.
    """

    begin: State
    facts: Fingerprint
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
    packing: LanePacking | None = None
    pass_count: int | None = None
    is_left_out: Callable[[int], bool] | None = None
    why_no_state: str | None = None

    @property
    def number(self) -> int:
        """The epoch's."""
        return self.begin.epoch

    @property
    def key(self) -> int:
        """From which, with positions, random numbers are made."""
        key = sample_seed(self.facts.seed, self.number)
        if self.order is None and self.world > 1:  # then each rank counts its own samples
            key ^= draw("rank", self.rank)
        return key

    @property
    def left_to_keep(self) -> tuple[int | None, ...]:
        """How many of the samples that each level gives are to come at most, on this rank; None: all."""
        *limits, last = (level.limit for level in self.levels)
        left = [None if limit is None else max(0, limit - n) for limit, n in zip(limits, self._given, strict=True)]
        if last is not None:
            last = max(0, last - self.begin.samples) if self.share is None else self.share.count
        return (*left, last)

    @property
    def batches(self) -> int | None:
        """How many batches are to come; None: it is not known."""
        if self.order is None or not self.keeps_count or self.steps.end >= ENDLESS:
            return None
        _, count, last = self.steps.sizes()
        return count + len(last)

    @property
    def is_even(self) -> bool:
        """Whether the batches of each step have as many samples on all ranks, as far as that is known."""
        steps = self.steps if self.share is None else self.share
        if self.world == 1:
            return True
        return not self.is_uneven and not any(size % self.world for size in (steps.size, *steps.last))

    @property
    def is_uneven(self) -> bool:
        """True if each rank ends with its own data, whatever the others have."""
        return self.world > 1 and self.steps.tail == "uneven"

    def check_end(self, received: ProgressSnapshot) -> None:
        """Whether all batches came that are this rank's, where ranks share an epoch whose samples are not counted.

        Raises:
            OptionError: there were fewer samples than the epoch was said to have.
        """
        if self.share is None or self.is_uneven:
            return
        _, full, last = self.share.sizes()
        came, owed = received.batches - self.begin.batches, full + len(last)
        if came < owed:
            why = (
                "a short last step is not shared evenly, so that some rank may need a few samples more; have an "
                "iterable begin again at its end, give .epoch(samples=N) fewer of them, or tail='drop'"
            )
            if self.counts is not None:
                why = (
                    "shards have fewer samples than their index says, or failed and were skipped (stats().skipped); "
                    "leave these shards out, or take tail='uneven'"
                )
            raise OptionError(
                f"the samples of {self.source} have come to their end on rank {self.rank} of {self.world} after {came} "
                f"of {owed} batches, and other ranks may have more: {why}"
            )

    def boundaries(self) -> BatchBoundaries:
        """Where samples are cut into batches."""
        if self.batches is None:
            return EvenBoundaries(self.batch_size) if self.share is None else EvenBoundaries(*self.share.sizes())
        return EvenBoundaries(*self.steps.sizes())

    def lane_run(self) -> LaneRun | None:
        """The rank's lanes, where documents are packed in these."""
        if self.packing is None or self.order is None:
            return None
        size = self.steps.size
        lanes = range(*share(size, self.rank, self.world))
        if self.packing.mixing is not None:
            return MixedLaneRun(self.packing, lanes, size, self.begin.progress, self.is_left_out)
        return LaneRun(self.packing, lanes, size, self.order.count, self.begin.progress, self.is_left_out)

    def position_map(self, mark: Callable[[int], object] | None, lanes: LaneRun | None) -> PositionMap:
        """Where samples are.

        Args:
            mark: of the source.
            lanes: where documents are packed in these.
        """
        positions = None if self._is_plain else lambda start, stop: as_numbers(self.steps.positions(start, stop))
        kept_from = None if self.keeps_count else self.begin.samples + (self.rank << 44)
        if lanes is not None and kept_from is not None:
            run = lanes
            return LaneMap(lambda start, stop: as_numbers(run.positions(start, stop)), kept_from, run)
        if mark is not None:
            ask, done = mark, self._done
            mark = (lambda number: ask(_original(number, done))) if done else ask
        is_limited = any(level.limit is not None for level in self.levels[:-1])
        repeated = None if self.share is None or self.counts is not None else self._count_repeated
        return PositionMap(positions, kept_from, mark, self._origins, is_limited=is_limited, repeated=repeated)

    def _count_repeated(self, numbers: Ints) -> int:
        """How many of the source's samples, given by their numbers, are of later passes than the first."""
        if self.pass_count is None or not len(numbers):
            return 0
        first = self.steps.step_at(self.pass_count)
        if numbers.max() < first:
            return 0
        are_later = numbers >= first + self.steps.batch  # in between is the step in which the pass ends
        inside = numbers[(numbers >= first) & ~are_later]
        ending = self.steps.positions(first, first + self.steps.batch) >= self.pass_count
        return int(are_later.sum()) + int(ending[inside - first].sum())

    def passed(self, received: ProgressSnapshot) -> tuple[int, int]:
        """(samples of later passes than the first, samples that the first one has not come to) on this rank.

        Both are 0 as far as they are not known. Of documents that are packed in lanes, documents count.
        """
        if self.pass_count is None:
            return received.repeated, 0
        if self.packing is not None:
            return self._passed_by_lanes(self.pass_count, received.lanes)
        used = max((stop for _, stop in received.covers), default=0)
        first = self.steps.step_at(self.pass_count)
        ending = self.steps.positions(first, first + self.steps.batch)[max(0, used - first) :]
        return received.repeated, max(0, first - used) + int((ending < self.pass_count).sum())

    def _passed_by_lanes(self, pass_count: int, lanes: LaneProgress | None) -> tuple[int, int]:
        size, begin = self.steps.size, self.begin.progress
        numbers = np.arange(*share(size, self.rank, self.world))
        ends = np.maximum(0, -((numbers - pass_count) // size))  # the lanes' documents of the first pass
        first, drawn = (
            np.zeros_like(numbers) if some is None else np.array([cursor.drawn for cursor in some.cursors])
            for some in (begin, lanes)
        )
        repeated = np.maximum(drawn - ends, 0) - np.maximum(first - ends, 0)
        return int(repeated.sum()), int(np.maximum(ends - drawn, 0).sum())

    @property
    def _origins(self) -> list[Origins]:
        """Of what each level's samples are made."""
        levels, begin = self.levels, self.begin
        known, passed = begin.parts or (0,) * len(levels), ((), *(begin.passed or ((),) * (len(levels) - 1)))
        return [
            GroupOrigins(count, some, before=before) if level.is_grouped else Origins(count, before=before)
            for level, count, some, before in zip(levels, known, passed, (*self._given, 0), strict=True)
        ]

    @property
    def _given(self) -> tuple[int, ...]:
        """How many samples each level but the last gave before those that it begins with."""
        return self.begin.given or (0,) * (len(self.levels) - 1)

    @property
    def _is_plain(self) -> bool:
        """Whether samples have the positions that the source counts."""
        steps, cursor = self.steps, self.steps.begin
        is_at_start = not cursor.position and not len(cursor.holes) and not len(steps.done)
        return is_at_start and not steps.repeated and steps.world == 1 and steps.lanes == 1

    @property
    def _done(self) -> Ranges:
        return as_ranges(self.steps.done)

    def received(self) -> ProgressSnapshot:
        """What has been received at its begin."""
        samples = self.begin.samples
        if self.is_shared:
            samples = samples // self.world
        begin = self.begin
        return ProgressSnapshot(
            begin.batches,
            samples,
            samples,
            skipped=begin.skipped,
            parts=begin.parts,
            passed=begin.passed,
            given=begin.given,
            lanes=begin.progress,
        )

    def digest(self) -> int:
        """What all ranks must agree about at its begin."""
        steps = self.steps
        state = replace(
            self.begin, end=steps.end, step=steps.size, lanes=steps.lanes, tail=steps.tail, rank=None, world=self.world
        )
        if not self.is_shared:
            state = replace(
                state, done=(), samples=0, mark=None, parts=(), passed=(), given=(), since=state.since._replace(here=0)
            )
            state = replace(state, progress=None)
        if self.order is None:
            state = replace(state, cursor=Cursor.at())  # each rank's own
        state = replace(state, skipped=(0, 0))
        coming = steps.begin.coming(0, min(_COMPARED, steps.left))
        numbers = _NONE if self.order is None else self.numbers(self.order, coming)
        if steps.deal is not None and steps.full:
            numbers = np.concatenate([numbers, steps.dealt(0, steps.size)[1]])
        return int(check_of(state.pack(self.facts, _NONE), numbers), 16)

    def save(self, received: ProgressSnapshot) -> dict[str, object]:
        """A state.

        Raises:
            OptionError: there is none, and why.
        """
        if self.why_no_state is not None:
            raise OptionError(self.why_no_state)
        state = self.after(received)
        return state.pack(self.facts, self.last_numbers(state))

    def after(self, received: ProgressSnapshot) -> State:
        """What is to come after some batches."""
        steps = self.steps
        state = replace(
            self.begin,
            end=steps.end,
            step=steps.size,
            lanes=steps.lanes,
            tail=steps.tail,
            world=self.world,
            rank=None if self.is_shared else self.rank,
            batches=received.batches,
            skipped=received.skipped,
            skip=max(0, self.leave_out - (received.batches - self.begin.batches)),
            parts=received.parts,
            passed=received.passed,
            given=received.given,
            progress=received.lanes,
        )
        if received.is_over:
            return replace(
                state,
                epoch=self.number + 1,
                cursor=self.carried(),
                carried=as_ranges(self.carried().holes),
                done=(),
                batches=0,
                samples=0,
                skipped=(0, 0),
                skip=0,
                step=state.step_now,
                since=ResplitBase(),
                parts=(),
                passed=(),
                given=(),
                progress=None,
                mark=self.next_mark(received.mark),
            )
        if self.is_shared:
            used = sum(stop - start for start, stop in received.covers)
            cursor = steps.after(EvenBoundaries(*steps.sizes()).find(used)[0])
            return replace(state, cursor=cursor, samples=self.begin.samples + steps.left - _left(cursor, steps.end))
        done = united([*self._done, *(r for a, b in received.covers for r in among_left(a, b, self._done))])
        samples = received.used  # by these, what is left over of a filter is counted
        if self.order is not None or not received.batches - self.begin.batches:
            return replace(state, done=done, samples=samples)
        if received.mark is None:
            raise OptionError(
                f"{self.source} gives no state: it, or the iterator that its aiter() gives, needs state_dict() and "
                "load_state_dict(state)"
            )
        mark, at = received.mark
        cursor = Cursor.at(self.begin.cursor.position + at)
        done = united((max(a - at, 0), b - at) for a, b in done if b > at)
        return replace(state, cursor=cursor, done=done, mark=mark, samples=samples)

    def next_mark(self, mark: tuple[object, int] | None) -> object:
        """Where the epoch after this one begins: behind the end of this one, with the data set as that leaves it."""
        state, at = (self.begin.mark, 0) if mark is None else mark
        if not isinstance(state, dict) or "dataset" not in state:
            return None
        took = {} if self.share is None else {"took": self.begin.since.here + self.share.whole}
        return {"over": self.begin.cursor.position + at, **took, **state}

    def skipped(self, batches: int) -> EpochPlan:
        """The same epoch, from so many batches further on."""
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
        begin = replace(begin, done=done, batches=begin.batches + batches, samples=begin.samples + count)
        if share is not None:
            received = as_ranges(share.done)
            share = replace(share, done=as_array(united([*received, *among_left(0, count, received)])))
        return replace(self, begin=begin, steps=replace(steps, done=as_array(done)), share=share)

    def carried(self) -> Cursor:
        """Where the next epoch begins: with what this one leaves to it."""
        steps = self.steps
        if steps.tail != "carry" or self.order is None:
            return Cursor.at()
        left = steps.after(steps.steps)
        positions = left.coming(0, _left(left, steps.end))
        if not len(positions):
            return Cursor.at()
        return Cursor(0, compressed(positions) - steps.end)

    def last_numbers(self, state: State) -> Ints:
        """The numbers of the samples right before a state."""
        if self.order is None or state.epoch != self.number:
            return _NONE
        return self.numbers(self.order, last_positions(state))

    def check(self, packed: dict[str, object]) -> None:
        """Whether the samples before the state that it goes on from are those of this plan.

        Raises:
            StateMismatchError: they are not.
        """
        check = packed.get("check")
        if not check:
            return
        try:
            is_the_same = check == check_of(packed, self.last_numbers(State.unpack(packed)))
            if "marked" in packed:  # which releases before have not said
                is_the_same = is_the_same and packed["marked"] == mark_check(packed.get("mark"))
        except (ArithmeticError, IndexError, OptionError, TypeError, ValueError):  # of numbers that make no sense
            is_the_same = False
        if not is_the_same:
            raise StateMismatchError(
                "the samples before this state are not those of this loader's order: the data or a sampler have "
                "changed, or the state was edited",
                field="check",
            )


def levels_of(pipeline: Pipeline) -> tuple[LevelPlan, ...]:
    """What samples of a pipeline are counted."""
    limits = (*(regroup.limit for regroup in pipeline.regroups), pipeline.limit)
    are_grouped = (False, *(regroup.grouping is not None for regroup in pipeline.regroups))
    return tuple(map(LevelPlan, limits, are_grouped))


def as_ranges(holes: Ints) -> Ranges:
    """The same ranges as plain numbers."""
    return tuple((int(start), int(stop)) for start, stop in holes)


def as_array(ranges: Iterable[tuple[int, int]]) -> Ints:
    """Ranges as [k, 2], without empty ones."""
    return np.array([(start, stop) for start, stop in ranges if start < stop], np.int64).reshape(-1, 2)


def _left(cursor: Cursor, end: int) -> int:
    return max(0, end - cursor.position) + cursor.hole_count


def _original(number: int, done: Ranges) -> int:
    """What a source calls the sample that is called `number` without those that are done."""
    return among_left(number, number + 1, done)[0][0]


_COMPARED = 1024  # samples to come, by all ranks
_NONE = np.zeros(0, np.int64)
