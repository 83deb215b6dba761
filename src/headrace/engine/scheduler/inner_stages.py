"""Stages before the last one, which skip, multiply or group samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio.abc import TaskGroup

from headrace._util.context import part_position, running_charge
from headrace._util.shared_memory import bytes_in
from headrace.engine.scheduler.dispatch import Budget, Dispatch, Pace, Pile
from headrace.engine.scheduler.epoch_spec import EpochSpec, GroupStage, InnerStage, LimitStage, LoopStage, WorkStage
from headrace.errors import StateMismatchError
from headrace.workers.failures import Failure
from headrace.workers.sample_chunks import ListPart, Part
from headrace.workers.tasks import Finish, Reply, Task

if TYPE_CHECKING:
    from headrace.engine.scheduler.epoch_run import Epoch

SKIPPED_LEAST = 10_000  # skipped samples before an epoch is aborted
_INNER_TASKS = 4  # for each worker
_BUDGET_SHARE = 16  # part of the memory budget that the results of one task may take
_BETWEEN_STAGES = 2**16  # and above: indices of stages that derive positions of new samples


class Units(NamedTuple):
    """Consecutive inputs of a level: source samples, or one group of samples.

    Attributes:
        start: Number of the first unit.
        number: Number of units.
        notes: Details of each sample for workers.
    """

    start: int
    number: int
    parts: list[Part]
    positions: Sequence[int]
    notes: Sequence[tuple[int, ...]] = ()


class Outcome(NamedTuple):
    """Samples made from some units. The other fields have one entry per sample."""

    part: Part
    units: Sequence[int]
    positions: Sequence[int]
    measures: Sequence[int]


class Level:
    """Runs units through stages, many at once, and emits their results in order.

    The input of level number 0 is the source's samples.
    """

    def __init__(
        self,
        number: int,
        stages: Sequence[InnerStage],
        spec: EpochSpec,
        dispatch: Dispatch,
        budget: Budget,
        host: Epoch,
    ) -> None:
        self.number = number
        self._stages = tuple(stage for stage in stages if not isinstance(stage, LimitStage))
        self._key = spec.key
        self._batches, self._learned = spec.batches, spec.learned
        self._dispatch, self._budget, self._host = dispatch, budget, host
        self._origins = spec.position_map.levels[number]
        self._before = spec.position_map.levels[number - 1].before if number else 0  # samples made before in the epoch
        self._known = self._origins.known  # samples of the first unit that are not repeated
        self.left = spec.limits[number] if spec.limits else None  # remaining limit of samples
        self.is_over = False  # no further result is needed
        self.frontier = 0  # units below are finished
        self.under_way = 0  # tasks
        self.inside = 0  # samples before, in and after the stages
        self._made: dict[int, tuple[int, Outcome]] = {}  # by the first unit: (number of units, their outcome)
        self._pile = Pile()
        self._put = 0  # number of samples added by the level before
        self._positions: deque[int] = deque()  # of waiting samples
        self._scopes: set[anyio.CancelScope] = set()  # of tasks
        works = all(type(stage) is WorkStage for stage in self._stages)  # steps on the loop are awaited together
        most, is_each = spec.batches.together_before, spec.batches.batch_size == 1 and not spec.batches.has_groups
        pace = Pace(most, is_awaited=is_each, most_bytes=budget.limit // _BUDGET_SHARE)
        self._pace = pace if works and most > 1 else None
        self.group: TaskGroup | None = None

    @property
    def is_busy(self) -> bool:
        """True if any unit is in work or waits."""
        return self.under_way > 0 or self._has_waiting

    def add(self, start: int, part: Part) -> None:
        if self.is_over:
            part.release()
            return
        self.inside += part.count
        self._pile.add(start, part)
        self.begin()

    def put(self, outcome: Outcome, stop: int) -> None:
        """Add the next samples of the level before, whose units below `stop` are all finished."""
        start, self._put = self._put, self._put + outcome.part.count
        self._positions.extend(outcome.positions)
        self.add(start, outcome.part)

    def begin(self) -> None:
        """Start as many units as keep all workers busy, and those that are waited for.

        Not all of them: of 100,000 units each would be a task whose result is held.
        """
        while self._has_waiting:
            assert self.group is not None
            most = _INNER_TASKS * self._batches.workers
            if self._pace is None:  # else waiting samples form larger tasks, once they are known to be fast
                most = max(most, self._batches.look_ahead // self._chunk)
            is_enough = self.under_way >= most or (self.under_way and self._budget.is_full)
            if is_enough and not self._host.is_awaited(self, self._first_waiting):
                return
            self.under_way += 1
            self.group.start_soon(self._go_through, self._take())

    def flush(self) -> None:
        """End the input."""

    def end(self) -> None:
        self.is_over, self.inside, self.under_way = True, 0, 0
        self.drop()
        for scope in self._scopes:
            scope.cancel()

    def drop(self) -> None:
        self._pile.drop()
        for _, outcome in self._made.values():
            outcome.part.release()
        self._made.clear()

    @property
    def _has_waiting(self) -> bool:
        return bool(self._pile)

    @property
    def _first_waiting(self) -> int:
        return self._pile.start

    @property
    def _chunk(self) -> int:
        if not self._stages:
            return self._pile.size  # nothing to do: whole parts pass
        if self._pace is not None and (self._dispatch.has_begun or self._batches.is_input):
            return self._pace.size
        share = self._batches.chunk(self._batches.batch_size or self._pile.size, self._learned.sample_s)
        return share if self._pace is None else min(share, self._pace.size)

    def _take(self) -> Units:
        if self._pace is not None:
            self._pace.begin()
        chunk = self._chunk
        start, part = self._pile.take(chunk)
        parts, count = [part], part.count
        while self._stages and count < chunk and self._pile and self._pile.start == start + count:
            _, part = self._pile.take(chunk - count)
            parts.append(part)
            count += part.count
        if self.number:
            positions: Sequence[int] = [self._positions.popleft() for _ in range(count)]
        else:
            positions = self._host.positions(start, start + count)
        return Units(start, count, parts, positions)

    async def _go_through(self, units: Units) -> None:
        running_charge.set(None)  # inherited from the source's task, which started this one
        if self.is_over:
            _release(units.parts)
            return
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                outcome = await self._through_stages(units)
            finally:
                self._scopes.discard(scope)
            self._end_task(units, outcome)

    def _end_task(self, units: Units, outcome: Outcome) -> None:
        if self.is_over:
            outcome.part.release()
            return
        self.under_way -= 1
        self._come_out(units, outcome)
        self.begin()
        self._host.moved()

    async def _through_stages(self, units: Units) -> Outcome:
        numbers: Sequence[int] = range(units.start, units.start + units.number)
        parts, positions = units.parts, units.positions
        part = parts[0]  # without stages the only one
        measures: Sequence[int] = ()
        for place, stage in enumerate(self._stages, _BETWEEN_STAGES):
            if not numbers:
                break  # all were filtered out
            if isinstance(stage, LoopStage):
                (part, kept), measures = await stage.run(parts, positions, self._key), ()
                if isinstance(part, ListPart):
                    part.claim = self._budget.claim(bytes_in(part.samples))
            else:
                finish = Finish.GROUP if isinstance(stage, GroupStage) else Finish.SAMPLES
                part, kept, measures = await self._by_workers(stage.chain, finish, units, parts, positions)
            parts = [part]
            if stage.gives_many or len(kept) < len(numbers):
                numbers, positions = [numbers[k] for k in kept], _parts_of(positions, kept, place)
        return Outcome(part, numbers, positions, measures)

    async def _by_workers(
        self, chain: int, finish: Finish, units: Units, parts: list[Part], positions: Sequence[int]
    ) -> tuple[Part, Sequence[int], Sequence[int]]:
        """Run a chain: (result, index of each result's sample in the input, measures)."""
        batch = self._host.batch_of(self, units.start)
        notes = units.notes if finish is Finish.GROUP else ()
        number = self._before + units.start if self.number else None
        task = Task(chain, self._key, batch, finish, parts, units.start, positions, number, notes=notes)
        # An input may not be waited for, and its result would keep a worker that others wait for.
        is_urgent = lambda: (
            self._batches.is_input or units.start <= self.frontier or self._host.is_urgent(self, units.start)
        )
        reply, made = await self._dispatch.samples(task, is_urgent)
        self._answered(units, reply)
        if made is not None:
            if self._pace is not None:
                self._pace.learn(len(positions), reply.made_s, made.nbytes)
            return made, reply.kept, reply.measures
        count = 1 if finish is Finish.GROUP else len(positions)
        return ListPart([Failure(reply.errors[0][1].widened())] * count), range(count), ()

    def _answered(self, units: Units, reply: Reply) -> None:
        """Hook for replies of workers."""

    def _come_out(self, units: Units, outcome: Outcome) -> None:
        went_in = self._size_of(units)
        if self._batches.keeps_count:
            self.inside -= went_in
            self._host.came_through(units.start, outcome.part)
            return
        self.inside += outcome.part.count - went_in
        self._made[units.start] = units.number, outcome
        while self.frontier in self._made:
            count, outcome = self._made.pop(self.frontier)
            self.frontier += count
            self.inside -= outcome.part.count
            is_of_use = outcome.part.count > 0
            if self._known and is_of_use:
                outcome = self._without_known(outcome)
            if self.left is not None:
                outcome = self._within_limit(outcome, self.left)
                self.left -= outcome.part.count
            self._host.left(self, outcome)
            if self.left == 0:
                self._host.filled(self.number)
            else:
                self._host.passed(self, self.frontier - 1, is_of_use=is_of_use)

    def _size_of(self, units: Units) -> int:
        return units.number

    def _without_known(self, outcome: Outcome) -> Outcome:
        """Remove the samples of the first unit that were delivered before the state.

        The first unit must give more samples than these, or it would not be repeated. Otherwise its result has changed.
        """
        known, self._known = self._known, 0
        part, units, positions, measures = outcome
        given = sum(1 for unit in units if unit == 0)
        if given <= known:
            why: Part = part.cut(0, 1)
            if given != 1 or not why.failed:  # else the failure is reported
                why.release()
                why = ListPart([self._host.failure(_changed(known, given))])
            self._host.left(self, Outcome(why, [0] * (known + 1), [positions[0]], ()))
        first = min(known, given)
        left = part.cut(first, part.count)
        part.release()
        return Outcome(left, units if given > known else units[first:], positions[first:], measures[first:])

    def _within_limit(self, outcome: Outcome, left: int) -> Outcome:
        part, units, positions, measures = outcome
        over = part.count - left
        if over <= 0:
            return outcome
        kept = part.cut(0, left)
        part.release()
        return Outcome(kept, units[: len(units) - over], positions[:left], measures[:left])


def _release(parts: Sequence[Part]) -> None:
    for part in parts:
        part.release()


def _changed(known: int, given: int) -> StateMismatchError:
    return StateMismatchError(
        f"{known} samples were received of those that one sample (or batch) became when the state was saved, and more "
        f"were to come; now it becomes {given}: the same must come of it each time",
        field="stages",
    )


def _parts_of(positions: Sequence[int], kept: Sequence[int], place: int) -> list[int]:
    """Return the positions of results. `kept` has the input index of each."""
    result, last, part = [], -1, 0
    for k in kept:
        part = part + 1 if k == last else 0
        last = k
        result.append(part_position(positions[k], part, place))
    return result
