"""The stages before the last one: what leaves samples out, gives many for one, or puts some together on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from anyio.abc import TaskGroup

from headrace.errors import StateMismatchError
from headrace.failures import Failure
from headrace.memory import bytes_in
from headrace.parts import ListPart, Part
from headrace.positions import part_position
from headrace.running import running_charge
from headrace.scheduler.budget import Budget
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.pile import Pile
from headrace.scheduler.recipe import GroupStage, InnerStage, LoopStage
from headrace.scheduler.wiring import EpochSpec
from headrace.tasks import Finish, Task

_INNER_TASKS = 4  # for each worker
_BETWEEN_STAGES = 2**16  # and more: what a stage gives goes on under these places


class Units(NamedTuple):
    """Some of what goes into a level: samples of the source, or one group of samples.

    Attributes:
        start: the number of the first one.
        number: how many.
        parts, positions: of their samples.
    """

    start: int
    number: int
    parts: list[Part]
    positions: Sequence[int]


class InnerHost(Protocol):
    """The epoch that a level is part of."""

    def positions(self, start: int, stop: int) -> Sequence[int]:
        """Of the source's samples with these numbers."""
        ...

    def batch_of(self, level: Level, start: int) -> int:
        """The batch that a unit is for, about: tasks of earlier ones go first. It is no lower for a later unit."""
        ...

    def is_awaited(self, level: Level, start: int) -> bool:
        """Whether units that are not begun yet are what the oldest batch waits for."""
        ...

    def is_urgent(self, level: Level, start: int) -> bool:
        """Whether nothing would move if what comes of these units got no room."""
        ...

    def came_through(self, start: int, part: Part) -> None:
        """The source's samples from `start` on have become these, one of each; they come in any order."""
        ...

    def left(self, level: Level, units: Sequence[int], part: Part, positions: Sequence[int]) -> None:
        """The next samples of a level, with these positions; the last ones of those that are of these units."""
        ...

    def passed(self, level: Level, unit: int, *, is_of_use: bool) -> None:
        """All units up to this one have given what they give; whether the last ones gave anything."""
        ...

    def moved(self) -> None:
        """Something went on: others may be begun, or it was the last."""
        ...

    def failure(self, error: BaseException) -> Failure:
        """A failure that is no single sample's."""
        ...


class Level:
    """Samples through stages, as they come: each unit by itself, many at once, and what comes of them in order.

    Args:
        number: of the level; what goes into the first one are the source's samples.
        stages: what is done in it.
        spec: what the epoch goes through.
        known: how many samples of what the first unit gives are known: they are not given again.
    """

    def __init__(
        self,
        number: int,
        stages: Sequence[InnerStage],
        spec: EpochSpec,
        dispatch: Dispatch,
        budget: Budget,
        host: InnerHost,
        known: int = 0,
    ) -> None:
        self.number = number
        self._stages, self._key = tuple(stages), spec.key
        self._batches, self._learned = spec.batches, spec.learned
        self._dispatch, self._budget, self._host = dispatch, budget, host
        self._known = known
        self.frontier = 0  # the units below have given what they give
        self.under_way = 0  # tasks
        self.inside = 0  # samples before, in and behind the stages
        self._made: dict[int, tuple[int, Part, Sequence[int], Sequence[int]]] = {}  # by the first unit
        self._pile = Pile()
        self.group: TaskGroup | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is in it that goes on by itself."""
        return self.under_way > 0 or self._has_waiting

    def add(self, start: int, part: Part) -> None:
        """Samples of the source, by their numbers."""
        self.inside += part.count
        self._pile.add(start, part)
        self.begin()

    def begin(self) -> None:
        """Have the first units go through the stages: as many as keep all busy, and those that are waited for.

        Not all at once: there may be a hundred thousand, and each would be a task, and what came of it be held.
        """
        while self._has_waiting:
            assert self.group is not None
            most = max(_INNER_TASKS * self._batches.workers, self._batches.look_ahead // self._chunk)
            is_enough = self.under_way >= most or (self.under_way and self._budget.is_full)
            if is_enough and not self._host.is_awaited(self, self._first_waiting):
                return
            self.under_way += 1
            self.group.start_soon(self._go_through, self._take())

    def flush(self) -> None:
        """No more samples come."""

    def drop(self) -> None:
        """Let go of everything."""
        self._pile.drop()
        for _, part, _, _ in self._made.values():
            part.release()

    @property
    def _has_waiting(self) -> bool:
        return bool(self._pile)

    @property
    def _first_waiting(self) -> int:
        return self._pile.start

    @property
    def _chunk(self) -> int:
        return self._batches.chunk(self._batches.batch_size or self._pile.size, self._learned.sample_s)

    def _take(self) -> Units:
        start, part = self._pile.take(self._chunk)
        return Units(start, part.count, [part], self._host.positions(start, start + part.count))

    async def _go_through(self, units: Units) -> None:
        running_charge.set(None)  # it was the source's, in whose task we were begun
        numbers: Sequence[int] = range(units.start, units.start + units.number)
        (part, *_), positions = units.parts, units.positions
        for place, stage in enumerate(self._stages, _BETWEEN_STAGES):
            if not numbers:
                break  # none is left
            if isinstance(stage, LoopStage):
                part, kept = await stage.run(part, positions, self._key)
                if isinstance(part, ListPart):
                    part.claim = self._budget.claim(bytes_in(part.samples))
            elif isinstance(stage, GroupStage):
                part, kept = await self._by_workers(stage.chain, Finish.GROUP, units, units.parts, positions)
            else:
                part, kept = await self._by_workers(stage.chain, Finish.SAMPLES, units, [part], positions)
            if stage.gives_many or len(kept) < len(numbers):
                numbers, positions = [numbers[k] for k in kept], _parts_of(positions, kept, place)
        self.under_way -= 1
        self._budget.changed()
        self._come_out(units, part, numbers, positions)
        self.begin()
        self._host.moved()

    async def _by_workers(
        self, chain: int, finish: Finish, units: Units, parts: list[Part], positions: Sequence[int]
    ) -> tuple[Part, Sequence[int]]:
        """(what a chain makes of samples, of which of them each is)."""
        batch = self._host.batch_of(self, units.start)
        task = Task(chain, self._key, batch, finish, parts, units.start, positions)
        is_urgent = lambda: units.start <= self.frontier or self._host.is_urgent(self, units.start)
        reply, made = await self._dispatch.samples(task, is_urgent)
        if made is not None:
            return made, reply.kept
        count = 1 if finish is Finish.GROUP else len(positions)
        return ListPart([Failure(reply.errors[0][1].widened())] * count), range(count)

    def _come_out(self, units: Units, part: Part, numbers: Sequence[int], positions: Sequence[int]) -> None:
        went_in = self._size_of(units)
        if self._batches.keeps_count:
            self.inside -= went_in
            self._host.came_through(units.start, part)
            return
        self.inside += part.count - went_in
        self._made[units.start] = units.number, part, numbers, positions
        while self.frontier in self._made:
            count, part, numbers, positions = self._made.pop(self.frontier)
            self.frontier += count
            self.inside -= part.count
            is_of_use = part.count > 0
            if self._known and is_of_use:
                part, numbers, positions = self._without_known(part, numbers, positions)
            self._host.left(self, numbers, part, positions)
            self._host.passed(self, self.frontier - 1, is_of_use=is_of_use)

    def _size_of(self, units: Units) -> int:
        """How many samples go in with these units."""
        return units.number

    def _without_known(
        self, part: Part, numbers: Sequence[int], positions: Sequence[int]
    ) -> tuple[Part, Sequence[int], Sequence[int]]:
        """The first unit gives again what it gave before, of which so many samples were delivered already.

        It must give more than those, or it would not have been begun again: else what it gives has changed.
        """
        known, self._known = self._known, 0
        given = sum(1 for number in numbers if number == 0)
        if given <= known:
            why: Part = part.cut(0, 1)
            if given != 1 or not why.failed:  # else that says it
                why.release()
                why = ListPart([self._host.failure(_changed(known, given))])
            self._host.left(self, [0] * (known + 1), why, [positions[0]])
        first = min(known, given)
        left = part.cut(first, part.count)
        part.release()
        return left, numbers if given > known else numbers[first:], positions[first:]


class GroupLevel(Level):
    """Samples that are put together: a group of so many is a unit. Its first stage says how many, and does it."""

    def __init__(self, number: int, stages: Sequence[InnerStage], *args: Any) -> None:
        super().__init__(number, stages, *args)
        (self._group_stage,) = (stage for stage in stages if isinstance(stage, GroupStage))
        self._whole: deque[Units] = deque()
        self._parts: list[Part] = []  # of the group that lacks samples
        self._positions: list[int] = []
        self._begun = 0  # groups, with that one

    def put(self, part: Part, positions: Sequence[int]) -> None:
        """The next samples, with their positions."""
        done = 0
        while done < part.count:
            count = min(part.count - done, self._group_stage.size - len(self._positions))
            self._parts.append(part.cut(done, done + count))
            self._positions += positions[done : done + count]
            done += count
            if len(self._positions) == self._group_stage.size:
                self._close()
        part.release()
        self.begin()

    def flush(self) -> None:
        """No more samples come: the last group has fewer, or is left out; but errors are told."""
        if not self._positions:
            return
        if self._group_stage.drop_last:
            parts, self._parts, positions, self._positions = self._parts, [], self._positions, []
            failed = next((part.cut(part.failed[0], part.failed[0] + 1) for part in parts if part.failed), None)
            for part in parts:
                part.release()
            if failed is None:
                return
            self._parts, self._positions = [failed], positions[:1]
        self._close()
        self.begin()

    def drop(self) -> None:
        super().drop()
        for part in (*self._parts, *(part for units in self._whole for part in units.parts)):
            part.release()
        self._parts.clear()
        self._whole.clear()

    def _close(self) -> None:
        """The group that lacked samples lacks none."""
        self._whole.append(Units(self._begun, 1, self._parts, self._positions))
        self.inside += len(self._positions)
        self._begun += 1
        self._parts, self._positions = [], []

    @property
    def _has_waiting(self) -> bool:
        return bool(self._whole)

    @property
    def _first_waiting(self) -> int:
        return self._whole[0].start

    @property
    def _chunk(self) -> int:
        return self._group_stage.size

    def _take(self) -> Units:
        return self._whole.popleft()

    def _size_of(self, units: Units) -> int:
        return len(units.positions)


def _changed(known: int, given: int) -> StateMismatchError:
    return StateMismatchError(
        f"{known} samples were received of those that one sample (or batch) became when the state was saved, and more "
        f"were to come; now it becomes {given}: the same must come of it each time",
        field="parts",
    )


def _parts_of(positions: Sequence[int], kept: Sequence[int], place: int) -> list[int]:
    """The positions of what came of samples: of each one as many as it is named times."""
    result, last, part = [], -1, 0
    for k in kept:
        part = part + 1 if k == last else 0
        last = k
        result.append(part_position(positions[k], part, place))
    return result
