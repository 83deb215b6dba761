"""Epochs equal their plans in any order of answers, failures and requests; in groups, and on a simulated clock."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.batchers import KINDS
from unit.by_hand import APART, FLAT, LAST, SOME, Broken, ByHand, Setup, copies, run, some

from headrace.engine.scheduler.epoch_spec import GroupStage, LimitStage, WorkStage
from headrace.engine.scheduler.group_level import FoundGroup, GroupFinder
from headrace.engine.scheduler.position_map import GroupOrigins
from headrace.errors import OptionError
from headrace.ops.batch import EvenBatcher
from headrace.state.state import ResumePoint, StagePoint
from headrace.torch_compat.collate import of_single
from headrace.workers.tasks import Chain, Finish, Step

SEEDS = st.integers(0, 2**32)
shapes = settings(max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "60")), deadline=None)


def weight(n: int) -> int:
    return n % 7 + 1


LEAVES_OUT = {kind for kind in KINDS if "whole" in kind}
IN_ORDER = {kind for kind in KINDS if "even" in kind or "budget" in kind}
MEASURE = Step("weight", "map", weight)
COLLATES = Chain(collate=list)
COLLATES_GROUP = Chain(collate=list, after=(APART,))


@st.composite
def plans(draw: st.DrawFn) -> Setup:
    kinds = draw(st.lists(st.sampled_from(["flat", "some", "limit", *KINDS]), max_size=4))
    most = st.sampled_from([None, None, 0, 5, 10, 20])
    chains, stages, limits = {LAST: COLLATES}, list[Any](), list[int | None]()
    for kind in kinds:
        number = 2 + len(stages)
        if kind == "limit":
            stages.append(LimitStage())
            limits.append(draw(most))
            continue
        if kind in KINDS:
            limits.append(draw(most))
        if kind not in KINDS:
            chains[number] = Chain((FLAT if kind == "flat" else SOME,))
            stages.append(WorkStage(number, kind == "flat"))
            continue
        if not stages or isinstance(stages[-1], LimitStage):
            chains[number] = Chain()
            stages.append(WorkStage(number))
            number += 1
        chains[number - 1] = replace(chains[number - 1], measure=MEASURE)
        chains[number] = COLLATES_GROUP
        stages.append(GroupStage(number, KINDS[kind].begin, kind, is_measured=True))
    batch_size = draw(st.sampled_from([1, 1, 2, 3, 7]))
    depth, together = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([1, 2, 5, 64]))
    return Setup(
        samples=range(draw(st.sampled_from([0, 1, 9, 25, 40]))),
        together=together if depth else 1,
        chains=chains,
        stages=tuple(stages),
        batch_size=batch_size,
        drop_last=draw(st.booleans()),
        depth=depth,
        budget=draw(st.sampled_from([300, 1500, 1 << 30])),
        workers=draw(st.integers(1, 3)),
        is_spread=draw(st.booleans()),
        limits=(*limits, draw(most)) if stages else (),
    )


def expected(plan: Setup) -> list[list[int]]:
    samples: list[Any] = list(plan.samples)
    limits = iter(plan.limits)
    for stage in plan.stages:
        if isinstance(stage, GroupStage | LimitStage):
            samples = samples[: next(limits, None)]
        if isinstance(stage, LimitStage):
            continue
        if isinstance(stage, GroupStage):
            groups = KINDS[stage.name].groups([(sample, weight(sample)) for sample in samples])
            samples = [sample for group in groups for sample in group]
        elif stage.gives_many:
            samples = [part for sample in samples for part in copies(sample)]
        elif plan.chains[stage.chain].steps:
            samples = list(filter(some, samples))
    samples = samples[: next(limits, None)]
    batches = [samples[k : k + plan.batch_size] for k in range(0, len(samples), plan.batch_size)]
    return batches[:-1] if plan.drop_last and batches and len(batches[-1]) < plan.batch_size else batches


@pytest.mark.slow
@shapes
@given(plan=plans(), seed=SEEDS, lefts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_run_is_resumed_exactly_from_a_snapshot(plan: Setup, seed: int, lefts: list[int]) -> None:
    whole = expected(plan)
    for left in lefts:
        result = run(plan, seed, stop_after=left)
        assert result.batches == whole[:left]
        if len(result.batches) < left or not plan.stages:
            return
        plan, whole, seed = resumed(plan, result.snapshots[-1]), whole[left:], seed + 1
    assert run(plan, seed).batches == whole


def resumed(plan: Setup, received: ResumePoint) -> Setup:
    assert len(received.covers) <= 1
    done = received.covers[0][1] if received.covers else 0
    nothing = (StagePoint(),) * len(plan.limits)
    stages = zip(received.stages or nothing, plan.points or nothing, strict=True)
    counts = (*[after.emitted - before.emitted for after, before in stages][:-1], received.used)
    pairs = zip(plan.limits, counts[: len(plan.limits)], strict=True)
    limits = tuple(None if limit is None else limit - count for limit, count in pairs)
    return replace(plan, samples=plan.samples[done:], points=received.stages, limits=limits)


@pytest.mark.slow
@shapes
@given(plan=plans(), seed=SEEDS, rate=st.sampled_from([0.05, 0.3, 1.0]))
def test_failed_tasks_neither_repeat_nor_reorder_samples(plan: Setup, seed: int, rate: float) -> None:
    chance = random.Random(seed)
    result = run(plan, seed, fails=lambda task: chance.random() < rate)
    assert bool(result.failed) >= (None in result.batches)
    if not result.failed:
        assert result.batches == expected(plan)
        return
    came = [sample for batch in result.batches if batch is not None for sample in batch]
    everything = _without_groups_left_out(plan)
    if _keeps_order(plan):
        assert all(any(sample == one for one in everything) for sample in came), "a sample came twice, or out of order"
    else:
        assert set(came) <= set(everything)
        assert len(set(came)) == len(came), "a sample came twice"
    is_final = any(task.finish is not Finish.EACH for task in result.failed)  # else each was made again by itself
    if is_final and not plan.drop_last and not any(limit is not None for limit in plan.limits) and _raises_all(plan):
        assert None in result.batches, "tasks failed without an error"


def _without_groups_left_out(plan: Setup) -> Iterator[int]:
    stages = tuple(stage for stage in plan.stages if not (isinstance(stage, GroupStage) and stage.name in LEAVES_OUT))
    for batch in expected(replace(plan, stages=stages, limits=(), drop_last=False)):
        yield from batch


def _keeps_order(plan: Setup) -> bool:
    return all(stage.name in IN_ORDER for stage in plan.stages if isinstance(stage, GroupStage))


def _raises_all(plan: Setup) -> bool:
    return not any(isinstance(stage, GroupStage) and stage.name in LEAVES_OUT for stage in plan.stages)


def grouped(kind: str, count: int, step: Step | None = None, **options: Any) -> Setup:
    """`count` samples through one inner group, in batches of one."""
    measured = Chain((step,) if step else (), measure=MEASURE)
    chains = {LAST: COLLATES, 2: measured, 3: COLLATES_GROUP}
    group = GroupStage(3, KINDS[kind].begin, kind, is_measured=True)
    stages = (WorkStage(2), group)
    return Setup(samples=range(count), chains=chains, stages=stages, batch_size=1, **options)


def test_error_of_a_sample_is_raised_before_its_group_is_complete() -> None:
    """No group is ever complete here: the whole source would be read to find an error."""
    made = []

    def fails(n: int) -> int:
        made.append(n)
        raise Broken("damaged")

    plan = grouped("12 tokens by length, whole", 2_000, step=Step("map(fails)", "map", fails), budget=1500)
    assert run(plan, 0, stop_after=1).batches == [None]
    assert len(made) < 500


def test_short_last_batch_is_dropped_without_repeating_samples() -> None:
    """All workers make those of the others, and then one collates them: it must not make them again to look at them."""

    def text(n: Any) -> str:
        if isinstance(n, str):
            raise TypeError(f"made twice: {n}")
        return str(n)

    chains = {1: Chain((Step("map(text)", "map", text),), collate=list)}
    plan = Setup(samples=range(6), chains=chains, batch_size=4, drop_last=True, is_spread=True)
    assert [run(plan, seed).batches for seed in range(5)] == [[["0", "1", "2", "3"]]] * 5


MEASURES = st.lists(st.integers(0, 9), max_size=40)


class Nine:
    """Groups, in order, whose measures have a sum of nine or more."""

    def __init__(self) -> None:
        self._offered = list[int]()

    def offer(self, measure: int) -> Sequence[int]:
        self._offered.append(measure)
        return range(len(self._offered)) if sum(self._offered) >= 9 else ()

    def end(self) -> Sequence[int]:
        return range(len(self._offered))


def found(begin: Any, measures: Sequence[int]) -> list[FoundGroup]:
    finder = GroupFinder(begin, "made()")
    groups = [group for number, measure in enumerate(measures) for group in finder.offer([number], [measure])]
    return [*groups, *finder.end()]


@given(kind=st.sampled_from(sorted(KINDS)), measures=MEASURES)
def test_groups_equal_a_plain_program(kind: str, measures: list[int]) -> None:
    wanted = list(KINDS[kind].groups(list(enumerate(measures))))
    assert [list(group.numbers) for group in found(KINDS[kind].begin, measures)] == wanted


def test_origins_of_groups_that_cannot_be_repeated_are_forgotten() -> None:
    origins = GroupOrigins()
    for number in range(1000):
        origins.formed([2 * number, 2 * number + 1])
        origins.arrived([number])
        origins.forget(number)
    assert len(origins._groups) <= 2
    assert len(origins._used) == 1


@pytest.mark.parametrize("named", [[2], [0, 0], [-1]])
def test_batcher_that_names_unknown_samples_is_an_error(named: list[int]) -> None:
    class Wrong(Nine):
        def offer(self, measure: int) -> Sequence[int]:
            super().offer(measure)
            return named if len(self._offered) == 2 else ()

    groups = found(Wrong, [1, 1, 1])
    assert [group.numbers for group in groups] == [[1], [2], [0]]
    assert [type(group.error) for group in groups] == [OptionError, OptionError, type(None)]
    assert "made(): of 2 samples that it was offered" in str(groups[0].error)


def test_error_at_the_end_of_a_batcher_replaces_all_of_its_samples() -> None:
    class Endless(Nine):
        def end(self) -> Any:
            raise ValueError("no end")

    (group,) = found(Endless, [1, 2])
    assert (list(group.numbers), str(group.error)) == ([0, 1], "no end")


def test_samples_are_refused_when_too_many_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.scheduler.group_level._WAITING_MOST", 3)
    groups = found(Nine, [1] * 5)
    assert [list(group.numbers) for group in groups] == [[3], [4], [0, 1, 2]]
    assert [type(group.error) for group in groups] == [OptionError, OptionError, type(None)]


def test_samples_that_a_batcher_drops_at_its_end_stay_waiting() -> None:
    class LeavesOut(Nine):
        def end(self) -> Any:
            return None

    finder = GroupFinder(LeavesOut, "leaves_out()")
    assert [group.numbers for group in finder.offer([0, 1, 2], [9, 1, 1])] == [[0]]
    assert not list(finder.end())
    assert finder.waiting == [1, 2]


SIZE, WAIT_S, TOGETHER = 3, 1.0, 2


class Timed(ByHand):
    """Samples 0, 1, 2, … in groups of three that wait for a second. Workers answer immediately."""

    def __init__(self, samples: int = 100, **more: Any) -> None:
        self.put, self.came = 0, list[list[int]]()
        stage = GroupStage(TOGETHER, partial(EvenBatcher, SIZE, drop_last=False), "batch", max_wait_s=WAIT_S)
        chains = {LAST: Chain((), of_single(list)), TOGETHER: Chain((), list)}
        super().__init__(
            Setup(samples=range(samples), sizes=[1] * samples, chains=chains, stages=(stage,), batch_size=1, **more)
        )
        self.go_on()

    def go_on(self) -> None:
        self.settle(bool)
        while self.workers.starting or any(worker.to_do for worker in self.workers.live):
            self.start()
            for worker in self.workers.live:
                while worker.to_do:
                    self.settle(partial(worker.answer, 0))

    def give(self, count: int = 1) -> int:
        """Put some samples, if as many are wanted; how many that were."""
        given = 0
        while given < count and self.source.ready:
            self.settle(partial(self.source.put, 0))
            self.go_on()
            given += 1
        self.put += given
        return given

    def wait(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        self.go_on()

    def receive(self) -> list[int] | None:
        came = self.take()
        self.go_on()
        came = came or self.take()  # which was made because it was asked for
        if came is None:
            return None
        self.came.append(came[1])
        if self.taken:
            self.let_go(0)
        return self.came[-1]

    def finish(self) -> None:
        while not self.running.done():
            assert self.give() or self.receive() is not None or self.source.ready
        while self.receive() is not None:
            pass


@contextmanager
def timed(**more: Any) -> Iterator[Timed]:
    with Timed(**more) as driven:
        yield driven
        driven.finish()
        assert driven.came == [batch for batch in driven.came if 1 <= len(batch) <= SIZE]
        assert [n for batch in driven.came for n in batch] == list(range(driven.put))


def test_last_batch_is_emitted_at_once() -> None:
    with timed(samples=4, look_ahead=9) as driven:
        driven.give(4)
        assert driven.receive() == [0, 1, 2]
        assert driven.receive() == [3]
        assert driven.loop.timers == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_timer_stops_at_the_limit_of_batches(limit: int) -> None:
    with timed(samples=20, look_ahead=9, limits=(None, limit)) as driven:
        driven.give(SIZE * limit + 1)
        for _ in range(limit):
            assert driven.receive() is not None
        driven.wait(10)
        assert driven.receive() is None
        assert driven.running.done()
        assert driven.loop.timers == 0
        driven.put = SIZE * limit


ACTIONS = st.lists(st.sampled_from(["give", "give", "give", "take", 0.25, 0.5, 1.0]), max_size=40)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(actions=ACTIONS, depth=st.integers(0, 3), look_ahead=st.integers(1, 9))
def test_timed_batches_equal_a_plain_program(actions: list[Any], depth: int, look_ahead: int) -> None:
    with timed(depth=depth, look_ahead=look_ahead, samples=30) as driven:
        plain = _Plain(depth)
        for action in actions:
            if action == "give":
                if driven.give():
                    plain.give()
            elif action == "take":
                assert driven.receive() == plain.take()
            else:
                driven.wait(action)
                plain.wait(action)


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, deadline=None)
@given(actions=ACTIONS, depth=st.integers(0, 3))
def test_no_sample_is_lost_when_batches_are_sent_together(actions: list[Any], depth: int) -> None:
    with timed(depth=depth, look_ahead=9, samples=30, together=4) as driven:
        for action in actions:
            driven.give() if action == "give" else driven.receive() if action == "take" else driven.wait(action)


class _Plain:
    """A model without an engine.

    Args:
        depth: how many batches may be made before they are asked for.
    """

    def __init__(self, depth: int) -> None:
        self._next, self._now, self._since = 0, 0.0, 0.0
        self._waiting, self._made = list[int](), list[list[int]]()
        self._depth, self._taken, self._asked = depth, 0, 0

    def give(self) -> None:
        self._since = self._since if self._waiting else self._now
        self._waiting.append(self._next)
        self._next += 1
        self._look()

    def wait(self, seconds: float) -> None:
        self._now += seconds
        self._look()

    def take(self) -> list[int] | None:
        self._asked = self._taken + 1
        self._look()
        if self._taken == len(self._made):
            return None
        self._taken += 1
        return self._made[self._taken - 1]

    def _look(self) -> None:
        is_due = self._now >= self._since + WAIT_S and len(self._made) < self._asked + self._depth
        if self._waiting and (len(self._waiting) == SIZE or is_due):
            self._made.append(self._waiting)
            self._waiting = []
