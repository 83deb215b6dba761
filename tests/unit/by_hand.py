"""The engine by hand: the test decides which worker answers, dies or starts, what is read, and what is taken.

The epoch, its batches and the queue of tasks are those of a loader; workers carry their messages out as real ones do,
but only when the test has them do so. Nothing waits, and the clock is simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from simulation.loop import SimulatedLoop

from headrace._util.shared_memory import Arena, Claim, Segment
from headrace.delivery.channel import ChunkDelivery, Delivery
from headrace.delivery.progress import Progress
from headrace.delivery.slabs import Arrived, BatchOpener, Slabs, Views
from headrace.engine.scheduler.dispatch import Budget
from headrace.engine.scheduler.epoch_run import Epoch
from headrace.engine.scheduler.epoch_spec import (
    BatchSpec,
    EpochSpec,
    GroupStage,
    InnerStage,
    Learned,
    LimitStage,
    LoopStage,
    Resources,
    WorkStage,
)
from headrace.engine.scheduler.position_map import (
    BatchBoundaries,
    EvenBoundaries,
    GivenBoundaries,
    GroupOrigins,
    Origins,
    PositionMap,
)
from headrace.engine.scheduler.skip_rules import Skips
from headrace.observe import LoaderMeters
from headrace.readers.protocol import Flow
from headrace.state.state import ResumePoint, StagePoint
from headrace.torch_compat import serialize
from headrace.workers.chains import KnownChains, SharedChains
from headrace.workers.executor import Loss, OnLost, OnReply, WorkerLink
from headrace.workers.failures import Failure
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import ListPart, PackedPart, Part
from headrace.workers.task_runner import TaskRunner, open_part
from headrace.workers.tasks import DEATHS, Chain, Message, PlaceMessage, Reply, Step, StreamChains, TaskMessage


def copies(n: int) -> list[int]:
    return [n * 10 + k for k in range(n * 7 % 4)]


def some(n: int) -> bool:
    return n % 3 != 1


def apart(batch: list[int]) -> list[int]:
    return batch


FLAT, SOME, APART = Step("flat_map", "many", copies), Step("filter", "filter", some), Step("unbatch", "many", apart)

LAST = 1
"""The number of the chain that collates."""

ON_LOOP: Any = object()
"""Stands for a stage of asynchronous steps, which leave samples as they are."""


def settle(loop: SimulatedLoop, *calls: Callable[[], Any]) -> None:
    """Make calls on the loop, then let everybody go as far as they can."""

    async def everything() -> None:
        for call in calls:
            call()
            await asyncio.sleep(0)
        while loop.has_ready:  # noqa: ASYNC110 (there is no event for that)
            await asyncio.sleep(0)

    loop.pass_time(0)  # it is no endless loop, however long it takes
    loop.run_until_complete(everything())


class Worker:
    """A worker that keeps messages until the test has it carry them out."""

    pid = 0

    def __init__(self, workers: Workers, number: int, on_reply: OnReply, on_lost: OnLost) -> None:
        self._workers, self.number = workers, number
        self.is_open = True
        self.to_do: list[TaskMessage | PlaceMessage] = []
        self.answered: list[tuple[int, Reply]] = []
        self.on_reply, self.on_lost = on_reply, on_lost
        self.sample = -1  # that it is working on
        self.dies_at: int | None = None
        self.runner = TaskRunner(everywhere=False, progress=self, number=number)

    def __setitem__(self, at: int, sample: int) -> None:
        self.sample = sample

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        assert self.is_open, "a message to a worker that has ended"
        for segment in segments:
            self.runner.attach(segment.number, segment.view)
        if message.is_answered:
            self.to_do.append(message)
        else:
            message.carry_out(self.runner)

    def learn(self, stream: int, chains: SharedChains) -> None:
        self.runner.learn(stream, chains.load)

    @property
    def may_do(self) -> list[int]:
        """The messages that may be carried out next: where workers are threads, any of them writes what one holds."""
        places = [at for at, message in enumerate(self.to_do) if isinstance(message, PlaceMessage)]
        return [0, *places] if self._workers.shares_objects else [0]

    def answer(self, at: int, *, fails: bool = False) -> None:
        message, self._workers.at_work = self.to_do.pop(at), self
        if fails and not isinstance(message, PlaceMessage):
            reply = Reply("failed", errors=[(message.slot, serialize.pack_error(Broken("by the test")))])
        else:
            reply = message.carry_out(self.runner)
        if self.dies_at is not None:
            self.lose(Loss(7, -9, message.number, self.dies_at))
        else:
            self.reply(message.number, reply)

    def reply(self, number: int, reply: Reply) -> None:
        self.answered.append((number, reply))
        self.on_reply(number, reply)

    def lose(self, loss: Loss) -> None:
        self.is_open = False
        self.on_lost(loss)
        for message in self.to_do:
            self.on_reply(message.number, Reply("written"))
        self.on_lost(Loss())


class Workers:
    """An executor whose workers start when the test has them start."""

    def __init__(
        self, make: Callable[..., Any] = Worker, *, shares_memory: bool = True, shares_objects: bool = True
    ) -> None:
        self.shares_memory, self.shares_objects = shares_memory, shares_objects
        self._make = make
        self.all: list[Any] = []
        self.at_work: Worker
        self.starting: list[asyncio.Future[None]] = []

    @property
    def live(self) -> list[Any]:
        return [worker for worker in self.all if worker.is_open]

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        may: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.starting.append(may)
        await may
        self.all.append(self._make(self, number, on_reply, on_lost))
        return self.all[-1]

    def let_start(self) -> bool:
        """Have the next worker start, if one is to."""
        while self.starting:
            may = self.starting.pop(0)
            if not may.done():
                may.set_result(None)
                return True
        return False

    def die(self) -> None:
        """Have the worker that is in the middle of a sample end there."""
        if self.at_work.dies_at is None:
            self.at_work.dies_at = self.at_work.sample

    async def aclose(self) -> None:
        for worker in self.live:
            worker.is_open = False


class Broken(Exception):
    """An error by the test."""


class Trainer:
    """The other end of the channel."""

    def __init__(self, depth: int) -> None:
        self.depth, self.asked, self.sent = depth, 0, list[Delivery | ChunkDelivery]()
        self.errors: list[bytes] = []
        self.is_closed = False
        self._callback: Callable[[], None] = lambda: None

    @property
    def granted(self) -> int:
        return self.asked + self.depth

    def send(self, message: Delivery | ChunkDelivery) -> None:
        assert len(self.sent) < self.granted, "more is sent than was granted"
        self.sent.append(message)

    def fail(self, blob: bytes) -> None:
        self.errors.append(blob)

    def close(self) -> None:
        self.is_closed = True

    def on_credit(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def take_back(self) -> Sequence[Delivery | ChunkDelivery]:
        return ()

    def ask(self) -> None:
        self.asked += 1
        self._callback()


def cut(draw: Callable[[int, int], int], count: int, most: int) -> Iterator[int]:
    """The sizes, at most `most`, of parts of so many."""
    while count:
        size = draw(1, min(count, most))
        yield size
        count -= size


class HandFed:
    """A source that asks for room in order, and puts what it has room for when the test has it do so."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.ready: list[tuple[int, int, Claim]] = []
        self._is_put = asyncio.Event()
        self.flow: Flow

    async def run(self, flow: Flow) -> None:
        self.flow = flow
        for count in self._setup.cuts or ():
            flow.cut(count)
        at = 0
        try:
            for size in self._setup.sizes:
                self.ready.append((at, size, await flow.turn(100 * size, at)))
                at += size
            while self.ready:
                self._is_put.clear()
                await self._is_put.wait()
        finally:
            self.ready.clear()  # its readers end with it
        if self._setup.breaks:
            raise Broken("the source")

    def put(self, which: int) -> None:
        start, size, claim = self.ready.pop(which)
        self.flow.put(start, self.flow.part_of(list(self._setup.samples[start : start + size]), claim))
        self._is_put.set()

    def mark(self, position: int) -> Any:
        return position


@dataclass(kw_only=True)
class Setup:
    """The epoch to drive.

    Attributes:
        samples: Samples of the source. A Failure: one that could not be read.
        sizes: Sizes of the parts that the source puts.
        chains: By number. The last one has `LAST`.
        last: (number of full batches, sizes of later ones), if known.
        cuts: Sizes of batches, if the source determines them.
        breaks: True if the source raises at its end.
        together: Maximum number of batches per task.
        limits: Maximum number of samples of each level. Empty: no limits.
    """

    samples: Sequence[Any]
    chains: dict[int, Chain]
    sizes: Sequence[int] = ()
    stages: tuple[InnerStage, ...] = ()
    batch_size: int = 4
    last: tuple[int, Sequence[int]] | None = None
    cuts: Sequence[int] | None = None
    breaks: bool = False
    drop_last: bool = False
    in_order: bool = True
    is_spread: bool = False
    collations: int | None = None
    together: int = 1
    use_slots: bool = False
    workers: int = 2
    depth: int = 2
    look_ahead: int = 3
    budget: int = 1 << 30
    limits: tuple[int | None, ...] = ()
    shares_memory: bool = True
    shares_objects: bool = True
    skips: Skips | None = None
    points: tuple[StagePoint, ...] = ()

    @property
    def keeps_count(self) -> bool:
        return not any(
            isinstance(stage, GroupStage | LimitStage)
            or (isinstance(stage, WorkStage) and not all(step.keeps_count for step in self.chains[stage.chain].steps))
            for stage in self.stages
        )

    @property
    def levels(self) -> list[Origins]:
        kinds = [type(stage) for stage in self.stages if isinstance(stage, GroupStage | LimitStage)]
        first, *others = self.points or [StagePoint()] * (1 + len(kinds))
        pairs = zip(kinds, others, strict=True)
        return [Origins(first), *(GroupOrigins(one) if kind is GroupStage else Origins(one) for kind, one in pairs)]


class ByHand:
    """One epoch on its own workers, driven step by step. The seed orders callbacks that are ready together.

    Attributes:
        gates: Gates of asynchronous steps. Each step ends when its gate is opened.
        taken: Deliveries that the trainer holds.
        opened: Batches of one delivery that the trainer has not requested.
    """

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup, self.loop = setup, SimulatedLoop(seed)
        self.workers = Workers(shares_memory=setup.shares_memory, shares_objects=setup.shares_objects)
        self.gates: list[asyncio.Future[None]] = []
        self.taken: list[Delivery] = []
        self.opened: deque[Arrived] = deque()
        self.received = 0
        self.progress = Progress(ResumePoint(), lambda received: {})
        self.meters, self.arena, self.trainer = LoaderMeters(), Arena(), Trainer(setup.depth)
        self.slabs = Slabs(lambda number: self.queue.forget_segment(number), lambda _: True)
        self.slabs.limit = self.slabs.kept = setup.depth + 3
        self.budget = Budget(setup.budget, lambda: self.arena.leased_bytes, lambda: self.arena.leased_bytes)
        self.settle(self._begin)

    def _begin(self) -> None:
        setup = self.setup
        self.source = HandFed(setup)
        self.queue = TaskQueue(setup.workers, self.workers, self.meters)
        self.chains = StreamChains(setup.chains)  # threads have a weak reference only
        self.queue.chains.learn(self.chains.stream, KnownChains(self.chains))
        self.boundaries: BatchBoundaries = EvenBoundaries(setup.batch_size, *(setup.last or ()))
        if setup.cuts is not None:
            self.boundaries = GivenBoundaries()
        spec = EpochSpec(
            source=self.source,
            batches=BatchSpec(
                chain=LAST,
                batch_size=None if setup.cuts is not None else setup.batch_size,
                workers=setup.workers,
                inner=tuple(LoopStage(self._on_loop) if stage is ON_LOOP else stage for stage in setup.stages),
                drop_last=setup.drop_last,
                keeps_count=setup.keeps_count,
                look_ahead=setup.look_ahead,
                in_order=setup.in_order,
                is_spread=setup.is_spread,
                collations=setup.collations,
                together=setup.together,
            ),
            learned=Learned(setup.use_slots),
            key=7,
            boundaries=self.boundaries,
            position_map=PositionMap(
                kept_from=None if setup.keeps_count else 0,
                levels=setup.levels,
                is_limited=any(limit is not None for limit in setup.limits[:-1]),
            ),
            limits=setup.limits,
            skips=setup.skips,
        )
        resources = Resources(
            works=self.queue,
            slabs=self.slabs,
            arena=self.arena,
            budget=self.budget,
            meters=LoaderMeters(),
            wrap=self._wrap,
            copies=1,
            pack_error=serialize.pack_error,
        )
        self.epoch = Epoch(spec, resources, self.trainer)
        self._opener = BatchOpener(Views(self.slabs.segments, lambda _: None, lambda _: None))
        self.running = self.loop.create_task(self._run())

    async def _run(self) -> None:
        await self.queue.open()
        await self.epoch.run()

    def _wrap(self, samples: list[Any]) -> Part:
        if self.setup.shares_objects:
            return ListPart(samples)
        parts = serialize.pack(samples)
        lease = self.arena.lease(serialize.packed_size(parts))
        failures = [k for k, sample in enumerate(samples) if isinstance(sample, Failure)]
        return PackedPart(lease, serialize.write(parts, lease.view), 0, len(samples), failures)

    async def _on_loop(self, parts: Sequence[Part], positions: Sequence[int], key: int) -> tuple[Part, Sequence[int]]:
        samples = [sample for part in parts for sample in open_part(part)]
        for part in parts:
            part.release()
        gate: asyncio.Future[None] = self.loop.create_future()
        self.gates.append(gate)
        await gate
        return self._wrap(samples), range(len(samples))

    def settle(self, *calls: Callable[[], Any]) -> None:
        settle(self.loop, *calls)

    # What may be done.

    def start(self) -> None:
        self.settle(self.workers.let_start)

    def open(self, which: int) -> None:
        gate = self.gates.pop(which)
        if not gate.done():
            self.settle(partial(gate.set_result, None))

    @property
    def may_take(self) -> bool:
        is_asked = self.trainer.asked > self.received or self.running.done()
        return bool(self.opened) or self.received < len(self.trainer.sent) or not is_asked

    def take(self) -> Any:
        """Ask for a batch; gives (its number, the batch or the exception in its place), or None: there is none yet."""
        if not self.opened:
            if self.trainer.asked == self.received:
                self.settle(self.trainer.ask)
            if self.received == len(self.trainer.sent):
                return None
            message = self.trainer.sent[self.received]
            self.opened.extend(self._opener.arrived(message))
            self.received += 1
            if isinstance(message, ChunkDelivery):
                self.settle(partial(self.slabs.returned, message.segment))  # all of it was copied
        arrived, delivery = self.opened.popleft(), self.trainer.sent[self.received - 1]
        try:
            batch = arrived.open()
            self.progress.receive(arrived)
        except Exception as error:
            batch = error
            self.progress.fail(arrived)
            self.progress.ask()
        if isinstance(delivery, ChunkDelivery):
            return self.boundaries.find(self.progress.received.used - 1)[0], batch  # some may have been skipped
        if not isinstance(batch, Exception):
            self.taken.append(delivery)
        return delivery.batch, batch

    def let_go(self, which: int) -> None:
        self.settle(partial(self.slabs.returned, self.taken.pop(which).segment))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def close(self) -> None:
        assert self.running.done()
        for delivery in (*self.taken, *self.trainer.sent[self.received :]):
            self.slabs.returned(delivery.segment)
        try:
            assert not self.budget._waiting, "somebody still waits for bytes"
            self.loop.run_until_complete(self.queue.close())
            assert self.queue.is_idle
            assert self.arena.leased_bytes == 0, "memory is held by nobody"
            assert self.budget.claimed == 0, "bytes are claimed by nobody"
            assert not self.slabs._waiting, "somebody still waits for a slab"
            assert not self.slabs._out
            assert len(self.slabs._free) == len(self.slabs.segments), "a slab is held by nobody"
            assert asyncio.all_tasks(self.loop) == set()
            assert not self.loop.timers
        finally:
            self.abort()

    def abort(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.settle()
        self.slabs.close()
        self.arena.close()
        self.loop.close()


@dataclass
class Run:
    """The batches of a run, with None for each that was an error; the trainer's progress after each; failed tasks."""

    batches: list[Any] = field(default_factory=list)
    snapshots: list[ResumePoint] = field(default_factory=list)
    failed: list[TaskMessage] = field(default_factory=list)


def run(
    setup: Setup, seed: int, *, stop_after: int | None = None, fails: Callable[[TaskMessage], bool] = lambda task: False
) -> Run:
    """Run an epoch, or its first batches, in an order of events that is drawn.

    Args:
        fails: asked for each task, in the order in which they are taken on.
    """
    rng, result = random.Random(seed), Run()
    setup = replace(
        setup,
        sizes=list(cut(rng.randint, len(setup.samples), 4)),
        look_ahead=rng.choice([0, 3, 50]),
        collations=rng.choice([None, 1]),
        shares_objects=rng.random() < 0.5,
    )
    driven = ByHand(setup, seed)
    workers, source = driven.workers, driven.source

    def answer() -> None:
        worker = rng.choice([worker for worker in workers.live if worker.to_do])
        at = rng.choice(worker.may_do)
        message = worker.to_do[at]
        is_failing = isinstance(message, TaskMessage) and fails(message)
        if is_failing:
            result.failed.append(message)
        driven.settle(partial(worker.answer, at, fails=is_failing))

    def lose() -> None:
        driven.settle(partial(rng.choice(workers.live).lose, Loss(7, -9)))

    def take() -> None:
        got = driven.take()
        if got is None:
            return
        _, batch = got
        assert not isinstance(batch, Exception) or isinstance(batch, Broken)
        result.batches.append(None if isinstance(batch, Broken) else batch)
        result.snapshots.append(driven.progress.received)
        if len(result.batches) == stop_after:
            driven.settle(driven.epoch.stop)

    def possible() -> Iterator[Callable[[], None]]:
        if workers.starting:
            yield driven.start
        if source.ready:
            yield lambda: driven.settle(partial(source.put, rng.randrange(len(source.ready))))
        if any(worker.to_do for worker in workers.live):
            yield answer
        if workers.live and not setup.shares_objects and driven.meters.deaths < DEATHS - 1 and rng.random() < 0.05:
            yield lose
        if driven.may_take and len(result.batches) != stop_after:
            yield take
        if driven.taken:
            yield lambda: driven.let_go(rng.randrange(len(driven.taken)))

    with driven:
        while steps := list(possible()):
            rng.choice(steps)()
        assert not driven.trainer.errors or len(result.batches) == stop_after
        driven.running.result()
    return result
