"""The engine without threads, processes or clocks: workers that answer in any order, a trainer that asks at any time.

It runs on the simulated loop, where the order of all that is ready is drawn by a seed, and a hang is an error at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from simulation.loop import simulate

from headrace._util.shared_memory import Arena, Claim, Lease
from headrace.delivery.arrival import Arrived, BatchOpener
from headrace.delivery.messages import ChunkDelivery, Delivery
from headrace.delivery.progress import Progress, ProgressSnapshot
from headrace.delivery.slabs import Slabs, Views
from headrace.engine.scheduler.budget import Budget
from headrace.engine.scheduler.epoch_run import Epoch
from headrace.engine.scheduler.epoch_spec import BatchSpec, EpochSpec, GroupStage, Learned, LimitStage, Resources
from headrace.engine.scheduler.position_map import BatchBoundaries, EvenBoundaries, GroupOrigins, Origins, PositionMap
from headrace.engine.scheduler.skip_rules import Skips
from headrace.errors import StateMismatchError
from headrace.observe.stats import LoaderMeters
from headrace.readers.protocol import Flow
from headrace.torch_compat import serialize
from headrace.types import Ranges
from headrace.workers.messages import TaskMessage
from headrace.workers.sample_chunks import ListPart, address_of
from headrace.workers.task_runner import TaskRunner
from headrace.workers.tasks import Chain, Reply, Step, Task


def copies(n: int) -> list[int]:
    return [n * 10 + k for k in range(n * 7 % 4)]


def some(n: int) -> bool:
    return n % 3 != 1


def apart(batch: list[int]) -> list[int]:
    return batch


FLAT, SOME, APART = Step("flat_map", "many", copies), Step("filter", "filter", some), Step("unbatch", "many", apart)


class Broken(Exception):
    """The error of a worker that fails by the test."""


class ScriptedWorks:
    """Workers that take any time for an answer, do a task twice, and fail when the test has them fail.

    Args:
        fails: asked for each task, in the order in which they are taken on.
    """

    def __init__(self, chains: dict[int, Chain], rng: random.Random, fails: Callable[[Task], bool]) -> None:
        self._rng, self._fails = rng, fails
        self._runner = TaskRunner(everywhere=False, progress=[-1])
        self._numbers = itertools.count(1)
        self.tasks: dict[Task, int] = {}
        self.failed: list[Task] = []
        for number, chain in chains.items():
            self._runner.learn(number, lambda chain=chain: chain)

    def learn_spec(self, number: int, spec: bytes) -> None:
        self._runner.learn_spec(number, spec)

    async def run(self, task: Task) -> Reply:
        assert task not in self.tasks
        number = self.tasks[task] = next(self._numbers)
        parts = []
        for part in task.parts:
            sent, segments = part.sent()
            parts.append(sent)
            for segment in segments:
                self._runner.attach(segment.number, segment.view)
        place = None
        if task.place is not None:
            self._attach(task.place)
            place = address_of(task.place)
        await self._some_time()
        if self._fails(task):
            self.failed.append(task)
            reply = Reply("failed", errors=[(task.slot, serialize.pack_error(Broken("by the test")))])
        else:
            if self._rng.random() < 0.2:  # a worker that died has left nothing: another one does it again
                self._runner.work(TaskMessage.of(number, task, parts, place))
                self._runner.let_go(number)
            reply = self._runner.work(TaskMessage.of(number, task, parts, place))
        if reply.kind != "held":
            self._release(task)
        return reply

    async def place(self, task: Task, place: Lease) -> Reply:
        if task.place is not None:
            task.place.release()
        task.place = place
        self._attach(place)
        await self._some_time()
        reply = self._runner.place(self.tasks[task], address_of(place))
        if reply.kind != "held":
            self._release(task)
        return reply

    def abandon(self, task: Task) -> None:
        if task in self.tasks:
            self._runner.let_go(self.tasks[task])
            self._release(task)

    def _attach(self, place: Lease) -> None:
        self._runner.attach(place.segment.number, place.segment.view)

    async def _some_time(self) -> None:
        await asyncio.sleep(self._rng.choice([0, 0, 1, 5, 20]))

    def _release(self, task: Task) -> None:
        del self.tasks[task]
        for part in task.parts:
            part.release()
        if task.place is not None:
            task.place.release()


class Trainer:
    """The other end of the channel: it asks for batches one after the other, and releases each at any time."""

    def __init__(self, depth: int) -> None:
        self.depth, self.asked, self.sent = depth, 0, list[Delivery | ChunkDelivery]()
        self.errors: list[bytes] = []
        self.is_closed = False
        self._callback: Callable[[], None] = lambda: None
        self._came = asyncio.Event()

    @property
    def granted(self) -> int:
        return self.asked + self.depth

    def send(self, message: Delivery | ChunkDelivery) -> None:
        assert len(self.sent) < self.granted, "more is sent than was granted"
        self.sent.append(message)
        self._came.set()

    def fail(self, blob: bytes) -> None:
        self.errors.append(blob)
        self._came.set()

    def close(self) -> None:
        self.is_closed = True
        self._came.set()

    def on_credit(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def take_back(self) -> Sequence[Delivery | ChunkDelivery]:
        return ()

    def ask(self) -> None:
        self.asked += 1
        self._callback()

    async def receive(self) -> Delivery | ChunkDelivery | None:
        self.ask()
        while len(self.sent) < self.asked:
            if self.is_closed:
                return None
            self._came.clear()
            await self._came.wait()
        return self.sent[self.asked - 1]


class Scripted:
    """A source that puts its samples in any order, and at any time."""

    def __init__(self, samples: Sequence[Any], rng: random.Random, *, breaks: bool = False) -> None:
        self._samples, self._rng, self._breaks = samples, rng, breaks

    async def run(self, flow: Flow) -> None:
        at = 0
        async with anyio.create_task_group() as group:
            while at < len(self._samples):
                count = min(self._rng.randint(1, 4), len(self._samples) - at)
                claim = await flow.turn(100 * count, at)
                group.start_soon(self._put, flow, at, count, claim)
                at += count
        if self._breaks:
            raise Broken("the source")

    async def _put(self, flow: Flow, start: int, count: int, claim: Claim) -> None:
        await asyncio.sleep(self._rng.choice([0, 1, 10]))
        flow.put(start, flow.part_of(list(self._samples[start : start + count]), claim))

    def mark(self, position: int) -> Any:
        return position


@dataclass(kw_only=True)
class Plan:
    """An epoch to run.

    Attributes:
        samples: the source's.
        stages: before the last one; the chains that they name are in `chains`, as 1 is, the last one's.
        done: how many of the source's samples were received before.
        known: how many samples are known of what the first ones give.
        passed: which of the repeated ones are of groups that are not repeated.
        limits: how many samples each level gives at most; empty: all do.
        given: how many each but the last gave before the repeated ones.
        together: how many batches are made by one task at most.
    """

    samples: Sequence[Any]
    chains: dict[int, Chain]
    batch_size: int = 4
    stages: tuple[Any, ...] = ()
    keeps_count: bool = True
    drop_last: bool = False
    in_order: bool = True
    is_spread: bool = False
    use_slots: bool = False
    depth: int = 2
    budget: int = 1 << 30
    workers: int = 2
    limits: tuple[int | None, ...] = ()
    skips: Skips | None = None
    boundaries: BatchBoundaries | None = None
    breaks: bool = False
    done: int = 0
    known: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    together: int = 1
    fails: Callable[[Task], bool] = lambda task: False


@dataclass
class Run:
    """Results of a run.

    Attributes:
        batches: what each has; None in the place of one that was an error.
        snapshots: how far the trainer was after each.
        errors: what ended it.
        failed: the tasks that failed.
    """

    batches: list[Any] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    snapshots: list[ProgressSnapshot] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)


def run(plan: Plan, seed: int, stop_after: int | None = None) -> Run:
    return simulate(_run(plan, random.Random(seed), stop_after), seed)[0]


async def _run(plan: Plan, rng: random.Random, stop_after: int | None) -> Run:
    result = Run()
    works = ScriptedWorks(plan.chains, rng, plan.fails)
    arena, trainer = Arena(), Trainer(plan.depth)
    slabs = Slabs(lambda _: None, lambda _: True)
    slabs.limit = slabs.kept = plan.depth + 3
    budget = Budget(plan.budget, lambda: arena.leased_bytes, lambda: arena.leased_bytes)
    kinds = [type(stage) for stage in plan.stages if isinstance(stage, GroupStage | LimitStage)]
    first, *known = plan.known or [0] * (1 + len(kinds))
    before, *given = *(plan.given or [0] * len(kinds)), 0
    levels = [Origins(first, before=before)]
    for kind, count, passed, before in zip(kinds, known, plan.passed or [()] * len(kinds), given, strict=True):
        is_group = kind is GroupStage
        levels.append(GroupOrigins(count, passed, before=before) if is_group else Origins(count, before=before))
    batches = BatchSpec(
        chain=1,
        batch_size=plan.batch_size,
        workers=plan.workers,
        inner=plan.stages,
        drop_last=plan.drop_last,
        keeps_count=plan.keeps_count,
        look_ahead=rng.choice([0, 3, 50]),
        in_order=plan.in_order,
        is_spread=plan.is_spread,
        collations=rng.choice([None, 1]),
        together=plan.together,
    )
    is_limited = any(limit is not None for limit in plan.limits[:-1])
    position_map = PositionMap(kept_from=None if plan.keeps_count else 0, levels=levels, is_limited=is_limited)
    spec = EpochSpec(
        source=Scripted(plan.samples[plan.done :], rng, breaks=plan.breaks),
        batches=batches,
        learned=Learned(plan.use_slots),
        key=7,
        boundaries=plan.boundaries or EvenBoundaries(plan.batch_size),
        position_map=position_map,
        limits=plan.limits,
        skips=plan.skips,
    )
    resources = Resources(
        works=works,
        slabs=slabs,
        arena=arena,
        budget=budget,
        meters=LoaderMeters(),
        wrap=ListPart,
        copies=1,
        pack_error=serialize.pack_error,
    )
    progress = Progress(ProgressSnapshot(), lambda received: {})
    epoch = Epoch(spec, resources, trainer)
    task = asyncio.create_task(epoch.run())
    task.add_done_callback(lambda _: trainer.close())  # also after a failure
    messages, waiting = 0, deque[Arrived]()
    opener = BatchOpener(Views(slabs.segments, lambda _: None, lambda _: None))
    while stop_after is None or len(result.batches) < stop_after:
        await asyncio.sleep(rng.choice([0, 0, 2, 30]))
        progress.ask()
        if not waiting:
            message = await trainer.receive()
            if message is None:
                break
            messages += 1
            waiting.extend(opener.arrived(message))
            first = message.batch if isinstance(message, Delivery) else len(result.numbers)
            result.numbers += range(first, first + len(waiting))
        arrived = waiting.popleft()
        try:
            result.batches.append(arrived.open())
            progress.receive(arrived)
        except (Broken, StateMismatchError):
            result.batches.append(None)
            progress.fail(arrived)
        result.snapshots.append(progress.received)
        if not waiting:
            slabs.returned(message.segment)
    epoch.stop()
    await task
    if waiting:
        slabs.returned(message.segment)
    for message in trainer.sent[messages:]:
        slabs.returned(message.segment)
    result.errors, result.failed = trainer.errors, works.failed
    assert not works.tasks, "workers have tasks that nobody waits for"
    assert not slabs._out
    assert len(slabs._free) == len(slabs.segments), "a slab is held by nobody"
    assert arena.leased_bytes == 0, "memory is held by nobody"
    assert budget.claimed == 0, "bytes are claimed by nobody"
    slabs.close()
    arena.close()
    return result
