"""Epoch, batches and task queue equal a simple program, with any failures and deaths of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.utils.data import default_collate
from unit.by_hand import APART, FLAT, LAST, ON_LOOP, SOME, Broken, ByHand, Setup, copies, cut, some

from headrace.engine.scheduler.epoch_spec import GroupStage, LimitStage, WorkStage
from headrace.engine.scheduler.skip_rules import Skips
from headrace.errors import WorkerDiedError
from headrace.observe import LoaderMeters
from headrace.ops.batch import EvenBatcher
from headrace.options import Skip
from headrace.torch_compat.serialize import pack_error, unpack_error
from headrace.workers.executor import Loss
from headrace.workers.failures import Failure
from headrace.workers.tasks import DEATHS, Chain, Step

Draw = Callable[[Any], Any]

MACHINE = settings(
    max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "35")), stateful_step_count=30, derandomize=True, deadline=None
)

STEPS = {"start": 3, "put": 5, "answer": 10, "open": 3, "ask": 5, "let_go": 2, "again": 1, "lose": 1, "fail": 1}

ROOMY = 1 << 30

SEEDS, AT = st.integers(0, 1000), st.integers(0, 30)

ENDINGS = ("complete", "complete", "stopped", "cancelled")


@dataclass(frozen=True)
class Bad:
    """An error in the place of a sample or a batch: its type, and the number of the sample."""

    kind: type[Exception]
    number: int = -1
    is_more: bool = field(default=False, compare=False)  # than one sample's failure

    @classmethod
    def of(cls, error: Exception) -> Bad:
        return cls(type(error), -1 if isinstance(error, WorkerDiedError) else error.args[0])


@dataclass(kw_only=True)
class World:
    """The behaviour of the user's functions, and the policy for failures."""

    broken: frozenset[int]  # samples whose step raises
    deadly: frozenset[int]  # samples whose step ends the worker, each time
    unread: frozenset[int]  # samples that the source could not read
    changed: frozenset[int]  # samples of another form
    policy: Skip | None
    die: Callable[[], None] = lambda: None

    def touch(self, n: int) -> int:
        if n in self.broken:
            raise Broken(n)
        if n in self.deadly:
            self.die()
        return n

    def form(self, n: int) -> tuple[Any, int]:
        return np.full(2, n, np.float64 if n in self.changed else np.int64), n

    def touched(self, made: Any) -> Any:
        if isinstance(made, Bad):
            return made
        return Bad(Broken, made) if made in self.broken else Bad(WorkerDiedError) if made in self.deadly else made


def kept_or_bad(made: Iterable[Any], function: Callable[[int], Iterable[int]]) -> list[Any]:
    return [part for sample in made for part in ([sample] if isinstance(sample, Bad) else function(sample))]


def grouped(samples: list[Any], size: int, *, drop_last: bool, skips: bool) -> Iterator[Any]:
    for start in range(0, len(samples), size):
        group = samples[start : start + size]
        failed = [sample for sample in group if isinstance(sample, Bad)]
        if len(group) < size and drop_last:
            yield from failed[:1]
        elif failed and not skips:
            yield failed[0]
        else:
            yield from group


class Ruling:
    """A model of the policy that skips failed samples."""

    def __init__(self, policy: Skip) -> None:
        self.policy, self.in_all, self.in_a_row = policy, 0, 0

    def of(self, batch: Sequence[Any]) -> Any:
        """The batch without its failed samples, or its error. None if nothing remains."""
        for sample in batch:
            if not isinstance(sample, Bad):
                self.in_a_row = 0
                continue
            limits = (self.in_all, self.policy.max_in_epoch), (self.in_a_row, self.policy.max_in_row)
            if sample.is_more or any(most is not None and count >= most for count, most in limits):
                return sample
            if self.policy.when is not None and sample.kind is Broken and sample.number % 2:
                return sample
            self.in_all += 1
            self.in_a_row += 1
        return [sample for sample in batch if not isinstance(sample, Bad)] or None


def is_even(error: BaseException) -> bool:
    return not isinstance(error, Broken) or error.args[0] % 2 == 0


def expected(setup: Setup, world: World) -> dict[int, Any]:
    samples: list[Any] = [Bad(Broken, n) if n in world.unread else n for n in range(len(setup.samples))]
    if setup.breaks:
        samples.append(Bad(Broken, SOURCE, is_more=True))
    limits = iter(setup.limits)
    for stage in setup.stages:
        if isinstance(stage, GroupStage | LimitStage):
            samples = samples[: next(limits)]
        if isinstance(stage, GroupStage):
            batcher: Any = stage.batcher
            samples = list(grouped(samples, *batcher.args, **batcher.keywords, skips=world.policy is not None))
        elif isinstance(stage, WorkStage):
            for step in setup.chains[stage.chain].steps:
                if step is FLAT:
                    samples = kept_or_bad(samples, copies)
                elif step is SOME:
                    samples = kept_or_bad(samples, lambda n: [n] if some(n) else [])
                else:
                    samples = [world.touched(sample) for sample in samples]
    samples = samples[: next(limits, None)]
    if any(step.name == "map(touch)" for step in setup.chains[LAST].steps):
        samples = [world.touched(sample) for sample in samples]
    sizes = list(setup.cuts or ())
    if setup.last is not None:
        sizes = [setup.batch_size] * setup.last[0] + list(setup.last[1])
    ruling, batches, start = None if world.policy is None else Ruling(world.policy), dict[int, Any](), 0
    while start < len(samples) or len(batches) < len(sizes):
        number = len(batches)
        size = sizes[number] if number < len(sizes) else 1 if setup.cuts is not None else setup.batch_size
        batch, start = samples[start : start + size], start + size
        is_left_out = setup.drop_last and len(batch) < size
        bad = [sample for sample in batch if isinstance(sample, Bad)]
        made: Any = batch
        if bad:
            made = bad[0] if ruling is None else ruling.of(batch)
        elif ruling is not None:
            ruling.of(batch)
        batches[number] = None if is_left_out and not isinstance(made, Bad) else made
    return {number: made for number, made in batches.items() if made is not None}


SOURCE = "the source"
KINDS = st.lists(st.sampled_from(["map", "loop", "flat", "some", "limit", 1, 2, 3]), min_size=1, max_size=3)
POLICIES = st.builds(
    Skip,
    when=st.sampled_from([None, is_even]),
    max_in_epoch=st.none() | st.integers(0, 6),
    max_in_row=st.none() | st.integers(0, 3),
)


@st.composite
def worlds(draw: st.DrawFn, kinds: st.SearchStrategy[list[Any]]) -> tuple[Setup, World]:
    """Any stages in any order, samples that fail or end workers, and workers of any kind."""
    size_of = lambda least, most: draw(st.integers(least, most))
    count = size_of(0, 18)
    numbers = st.frozensets(st.integers(0, count * 10), max_size=4)
    few = st.frozensets(st.integers(0, max(0, count - 1)), max_size=3)
    shares_objects = draw(st.booleans())
    world = World(
        broken=draw(few | numbers),
        deadly=frozenset() if shares_objects else draw(few | numbers),
        unread=draw(few),
        changed=draw(few),
        policy=draw(st.none() | POLICIES),
    )
    skips, touch = world.policy is not None, Step("map(touch)", "map", world.touch)
    stages, chains = list[Any](), dict[int, Chain]()
    described = draw(kinds)
    touched = draw(st.integers(0, len(described)))
    for number, kind in enumerate(described, LAST + 1):
        first = (touch,) if number - LAST - 1 == touched else ()
        if kind == "limit":
            stages.append(LimitStage())
        elif kind == "loop":
            stages.append(ON_LOOP)
        elif isinstance(kind, int):
            chains[number] = Chain(collate=list, after=(APART,), skips=skips)
            stages.append(GroupStage(number, partial(EvenBatcher, kind, drop_last=draw(st.booleans())), "batch"))
        else:
            step = {"map": (), "flat": (FLAT,), "some": (SOME,)}[kind]
            chains[number] = Chain((*first, *step))
            stages.append(WorkStage(number, kind == "flat"))
    use_slots = not stages and draw(st.booleans())
    last = (touch,) if touched == len(described) else ()
    if use_slots:
        last = (*last, Step("map(form)", "map", world.form))
    chains[LAST] = Chain(last, default_collate if use_slots else list, skips=skips)
    batch_size = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 6]))
    setup = Setup(
        samples=[Failure(pack_error(Broken(n))) if n in world.unread else n for n in range(count)],
        sizes=list(cut(size_of, count, 4)),
        chains=chains,
        stages=tuple(stages),
        batch_size=batch_size,
        drop_last=draw(st.booleans()),
        is_spread=draw(st.booleans()),
        use_slots=use_slots,
        workers=draw(st.integers(1, 3)),
        depth=draw(st.sampled_from([0, 1, 3])),
        look_ahead=draw(st.sampled_from([0, 3, 50])),
        budget=draw(st.sampled_from([300, 1500, ROOMY])),
        shares_objects=shares_objects,
        shares_memory=shares_objects or draw(st.booleans()),
        breaks=draw(st.booleans()),
        collations=draw(st.sampled_from([None, 1])),
    )
    if not setup.keeps_count and world.deadly and world.policy is not None:
        world.policy = Skip(when=world.policy.when, max_in_row=None)  # deaths at parts of one sample count as one
    if not setup.keeps_count:
        levels = 1 + sum(isinstance(stage, GroupStage | LimitStage) for stage in stages)
        setup.limits = tuple(draw(st.sampled_from([None, None, 0, 3, 10])) for _ in range(levels))
    elif not stages and draw(st.booleans()):
        setup.cuts, setup.drop_last = tuple(cut(size_of, count, batch_size)), False
    elif draw(st.booleans()):
        whole = draw(st.integers(0, count // batch_size))
        setup.last, setup.breaks = (whole, tuple(cut(size_of, count - whole * batch_size, batch_size))), False
    has_limits = world.policy is not None and (world.policy.max_in_epoch, world.policy.max_in_row) != (None, None)
    if not has_limits and not any(stage is not ON_LOOP and stage.gives_many for stage in stages):
        setup.in_order = draw(st.booleans())
    if world.policy is not None:
        setup.skips = skips_of(world.policy)
    if setup.in_order and setup.depth:
        setup.together = draw(st.sampled_from([1, 2, 5, 64]))
    return setup, world


def skips_of(policy: Skip) -> Skips:
    return Skips(policy, 0, LoaderMeters(), unpack_error, pack_error)


class EngineMachine(RuleBasedStateMachine):
    """One epoch under any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.driven: ByHand | None = None

    def begin(self, made: tuple[Setup, World], seed: int, ending: str, step: int) -> None:
        self.setup, self.world = made
        self.left, self.ending = step, ending
        self.expected = expected(self.setup, self.world)
        self.came: dict[int, Any] = {}
        self.lost, self.has_failed = 0, False
        self.driven = ByHand(self.setup, seed)
        self.world.die = self.driven.workers.die

    @rule(what=st.sampled_from([step for step, weight in STEPS.items() for _ in range(weight)]), data=st.data())
    def step(self, what: str, data: st.DataObject) -> None:
        assert self.driven is not None
        self.left -= 1
        if not self.left and self.ending == "stopped":
            self.driven.settle(self.driven.epoch.stop)
        elif not self.left and self.ending == "cancelled":
            self.driven.settle(self.driven.running.cancel)
        getattr(self, what)(self.driven, data.draw)

    def start(self, driven: ByHand, _: Draw) -> None:
        driven.start()

    def put(self, driven: ByHand, draw: Draw) -> None:
        if driven.source.ready and not driven.running.done():
            driven.settle(partial(driven.source.put, draw(st.integers(0, len(driven.source.ready) - 1))))

    def answer(self, driven: ByHand, draw: Draw, *, fails: bool = False) -> None:
        busy = [worker for worker in driven.workers.live if worker.to_do]
        if busy:
            worker = draw(st.sampled_from(busy))
            driven.settle(partial(worker.answer, draw(st.sampled_from(worker.may_do)), fails=fails))

    def fail(self, driven: ByHand, draw: Draw) -> None:
        """Have a whole task fail, where that changes no other batch than its own."""
        policy = self.world.policy
        if self.setup.keeps_count and (policy is None or policy.max_in_epoch is policy.max_in_row is None):
            self.has_failed = True
            self.answer(driven, draw, fails=True)

    def lose(self, driven: ByHand, draw: Draw) -> None:
        """End a worker, but none so often that this alone would be an error."""
        live = driven.workers.live
        if live and not driven.workers.shares_objects and self.lost < DEATHS - 1:
            self.lost += 1
            worker = draw(st.sampled_from(live))
            known = draw(st.sampled_from([0, *(message.number for message in worker.to_do if message.is_answered)]))
            driven.settle(partial(worker.lose, Loss(7, -9, known, draw(st.integers(-1, 2)) if known else -1)))

    def again(self, driven: ByHand, draw: Draw) -> None:
        answers = [(worker, *answer) for worker in driven.workers.all for answer in worker.answered]
        if answers:
            worker, number, reply = draw(st.sampled_from(answers))
            driven.settle(partial(worker.on_reply, number, reply))

    def open(self, driven: ByHand, draw: Draw) -> None:
        if driven.gates:
            driven.open(draw(st.integers(0, len(driven.gates) - 1)))

    def ask(self, driven: ByHand, _: Draw) -> None:
        got = driven.take()
        if got is None:
            return
        number, batch = got
        assert number not in self.came, "a batch came twice"
        assert not self.setup.in_order or not self.came or number > max(self.came), "batches came out of order"
        self.came[number] = plain(batch)
        if not self.has_failed or not isinstance(self.came[number], Bad):
            assert number in self.expected, "a batch came that there is none of"
            assert self.came[number] == self.expected[number]

    def let_go(self, driven: ByHand, draw: Draw) -> None:
        if driven.taken:
            driven.let_go(draw(st.integers(0, len(driven.taken) - 1)))

    @invariant()
    def counts_are_of_what_is_held(self) -> None:
        if self.driven is not None:
            assert self.driven.budget.claimed >= 0
            assert self.driven.arena.leased_bytes >= 0

    def teardown(self) -> None:
        if self.driven is not None:
            with self.driven:
                self.finish(self.driven)

    def finish(self, driven: ByHand) -> None:
        """From here on all goes well: then everything must come to its end."""
        for _ in range(300):
            if driven.running.done():
                break
            driven.start()
            while driven.source.ready and not driven.running.done():
                driven.settle(partial(driven.source.put, 0))
            while driven.gates:
                driven.open(0)
            for worker in driven.workers.live:
                if worker.to_do and worker.is_open:
                    driven.settle(partial(worker.answer, 0))
            while driven.taken:
                driven.let_go(0)
            self.ask(driven, None)
        assert driven.running.done(), "the epoch stands still"
        while driven.opened or driven.received < len(driven.trainer.sent):
            self.ask(driven, None)
        assert driven.trainer.is_closed
        is_over = self.ending == "complete" or self.left > 0
        if is_over:
            assert not driven.trainer.errors
            assert self.came.keys() >= self.expected.keys(), "a batch is missing"
        if not driven.running.cancelled():
            driven.running.result()
        if self.left % 2:  # the loader may be closed before its workers have done what nobody waits for, or after
            while busy := [worker for worker in driven.workers.live if worker.to_do] or driven.workers.starting:
                driven.start()
                if busy is not driven.workers.starting:
                    driven.settle(partial(busy[0].answer, 0))
            assert driven.queue.is_idle, "a task is in the books that nobody waits for"
            assert not any(worker.runner._held for worker in driven.workers.live), "a worker holds what nobody wants"


class BatchMachine(EngineMachine):
    """Samples that go into batches as they come: into slots, or spread among workers, or neither."""

    @initialize(made=worlds(st.just([])), seed=SEEDS, ending=st.sampled_from(ENDINGS), step=AT)
    def begin_batches(self, **given: Any) -> None:
        self.begin(**given)


class StageMachine(EngineMachine):
    """Samples that go through stages first."""

    @initialize(made=worlds(KINDS), seed=SEEDS, ending=st.sampled_from(ENDINGS), step=AT)
    def begin_stages(self, **given: Any) -> None:
        self.begin(**given)


def plain(batch: Any) -> Any:
    if isinstance(batch, Exception):
        return Bad.of(batch)
    if isinstance(batch, list) and len(batch) == 2 and hasattr(batch[1], "tolist"):
        pairs, numbers = batch
        assert pairs.tolist() == [[n, n] for n in numbers.tolist()]
        return numbers.tolist()
    return batch


TestBatches = BatchMachine.TestCase
TestStages = StageMachine.TestCase
TestBatches.settings = TestStages.settings = MACHINE


def test_slab_of_a_failed_batch_is_free_after_its_last_task() -> None:
    nothing = frozenset[int]()
    world = World(broken=frozenset([4]), deadly=nothing, unread=nothing, changed=nothing, policy=None)
    steps = Step("map(touch)", "map", world.touch), Step("map(form)", "map", world.form)
    chains = {LAST: Chain(steps, default_collate)}
    with ByHand(Setup(samples=range(8), sizes=[4] + [1] * 4, chains=chains, use_slots=True, workers=4)) as driven:
        for _ in range(4):
            driven.start()
        driven.settle(partial(driven.source.put, 0))
        while (first := driven.take()) is None:
            for worker in driven.workers.live:
                if worker.to_do:
                    driven.settle(partial(worker.answer, 0))
        assert plain(first[1]) == [0, 1, 2, 3]
        driven.let_go(0)
        for _ in range(4):
            driven.settle(partial(driven.source.put, 0))
        failing, *others = sorted(driven.workers.live, key=lambda worker: worker.to_do[0].slot)
        driven.settle(partial(failing.answer, 0))
        number, error = driven.take()
        assert (number, plain(error)) == (1, Bad(Broken, 4))
        assert not driven.slabs._free, "they may still write there"
        for worker in others:
            driven.settle(partial(worker.answer, 0))
        assert driven.running.done()
