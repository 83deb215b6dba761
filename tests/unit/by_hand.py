"""The engine by hand: the test decides which worker answers, dies or starts, what is read, and what is taken.

The epoch, its batches and the queue of tasks are those of a loader; workers carry their messages out as real ones do,
but only when the test has them do so. Nothing waits, and the clock is simulated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.loop import SimulatedLoop
from unit.scripted import Broken, Trainer

from headrace._util.shared_memory import Arena, Claim, Segment
from headrace.delivery.arrival import Arrived, BatchOpener
from headrace.delivery.messages import ChunkDelivery, Delivery, ProgressDelta
from headrace.delivery.slabs import Slabs, Views
from headrace.engine.scheduler.budget import Budget
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
from headrace.observe.stats import LoaderMeters
from headrace.readers.protocol import Flow
from headrace.torch_compat import serialize
from headrace.workers.chains import KnownChain, SharedChain
from headrace.workers.executor import Loss, OnLost, OnReply, WorkerLink
from headrace.workers.failures import Failure
from headrace.workers.messages import Message, PlaceMessage
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import ListPart, PackedPart, Part
from headrace.workers.task_runner import TaskRunner, open_part
from headrace.workers.tasks import Chain, Reply

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
        self._workers = workers
        self.is_open = True
        self.to_do: list[Message] = []
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

    def learn(self, number: int, chain: SharedChain) -> None:
        self.runner.learn(number, chain.load)

    def answer(self, at: int, *, fails: bool = False) -> None:
        message, self._workers.at_work = self.to_do.pop(at), self
        assert message.is_answered
        if fails and not isinstance(message, PlaceMessage):
            reply = Reply("failed", errors=[(message.slot, serialize.pack_error(Broken("by the test")))])
        else:
            reply = message.carry_out(self.runner)
        if self.dies_at is not None:
            self.lose(Loss(7, -9, message.number, self.dies_at))
            return
        self.answered.append((message.number, reply))
        self.on_reply(message.number, reply)

    def lose(self, loss: Loss) -> None:
        self.is_open = False
        self.on_lost(loss)
        for message in self.to_do:
            if message.is_answered:
                self.on_reply(message.number, Reply("written"))
        self.on_lost(Loss())


class Workers:
    """An executor whose workers start when the test has them start."""

    def __init__(self, *, shares_memory: bool, shares_objects: bool) -> None:
        self.shares_memory, self.shares_objects = shares_memory, shares_objects
        self.all: list[Worker] = []
        self.at_work: Worker
        self.starting: list[asyncio.Future[None]] = []

    @property
    def live(self) -> list[Worker]:
        return [worker for worker in self.all if worker.is_open]

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        may: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.starting.append(may)
        await may
        self.all.append(Worker(self, number, on_reply, on_lost))
        return self.all[-1]

    def die(self) -> None:
        """Have the worker that is in the middle of a sample end there."""
        if self.at_work.dies_at is None:
            self.at_work.dies_at = self.at_work.sample

    async def aclose(self) -> None:
        for worker in self.live:
            worker.is_open = False


class HandFed:
    """A source that asks for room in order, and puts what it has room for when the test has it do so.

    Args:
        samples: a Failure stands for one that could not be read.
        sizes: of the parts that are put.
        cuts: of the batches, where the source gives them.
        breaks: whether it raises at its end.
    """

    def __init__(self, samples: Sequence[Any], sizes: Sequence[int], cuts: Sequence[int] | None, breaks: bool) -> None:
        self._samples, self._sizes, self._cuts, self._breaks = samples, sizes, cuts, breaks
        self.ready: list[tuple[int, int, Claim]] = []
        self._is_put = asyncio.Event()
        self.flow: Flow

    async def run(self, flow: Flow) -> None:
        self.flow = flow
        for count in self._cuts or ():
            flow.cut(count)
        at = 0
        try:
            for size in self._sizes:
                self.ready.append((at, size, await flow.turn(100 * size, at)))
                at += size
            while self.ready:
                self._is_put.clear()
                await self._is_put.wait()
        finally:
            self.ready.clear()  # its readers end with it
        if self._breaks:
            raise Broken("the source")

    def put(self, which: int) -> None:
        start, size, claim = self.ready.pop(which)
        self.flow.put(start, self.flow.part_of(list(self._samples[start : start + size]), claim))
        self._is_put.set()

    def mark(self, position: int) -> Any:
        return position


@dataclass(kw_only=True)
class Setup:
    """The epoch to drive.

    Attributes:
        samples: the source's; a Failure stands for one that could not be read.
        sizes: of the parts that it puts.
        chains: by number; the last one has `LAST`.
        stages: before the last one.
        cuts: of the batches, where the source gives them.
        last: (how many batches are of the size, the sizes of those that follow), where that is known.
        breaks: whether the source raises at its end.
    """

    samples: Sequence[Any]
    sizes: Sequence[int]
    chains: dict[int, Chain]
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

    @property
    def keeps_count(self) -> bool:
        return not any(
            isinstance(stage, GroupStage | LimitStage)
            or (isinstance(stage, WorkStage) and _changes_count(self.chains[stage.chain]))
            for stage in self.stages
        )


def _changes_count(chain: Chain) -> bool:
    return not all(step.keeps_count for step in chain.steps)


class ByHand:
    """One epoch on workers of its own, driven step by step.

    Args:
        setup: what is driven.
        seed: of the order of callbacks that are ready at once.

    Attributes:
        source, workers: what they are.
        gates: of asynchronous steps: each ends when its gate is opened.
        taken: the deliveries that the trainer has taken, and holds.
    """

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup, self.loop = setup, SimulatedLoop(seed)
        self.workers = Workers(shares_memory=setup.shares_memory, shares_objects=setup.shares_objects)
        self.gates: list[asyncio.Future[None]] = []
        self.taken: list[Delivery] = []
        self.opened: deque[Arrived] = deque()  # of batches that came together, those that the trainer has not asked for
        self.received = self.used = 0
        self.meters, self.arena, self.trainer = LoaderMeters(), Arena(), Trainer(setup.depth)
        self.slabs = Slabs(self._forget, lambda _: True)
        self.slabs.limit = self.slabs.kept = setup.depth + 3
        self.budget = Budget(setup.budget, lambda: self.arena.leased_bytes, lambda: self.arena.leased_bytes)
        self.settle(self._begin)

    def _begin(self) -> None:
        setup = self.setup
        self.source = HandFed(setup.samples, setup.sizes, setup.cuts, setup.breaks)
        self.queue = TaskQueue(setup.workers, self.workers, self.meters)
        for number, chain in setup.chains.items():
            self.queue.chains.learn(number, KnownChain(chain))
        boundaries: BatchBoundaries = EvenBoundaries(setup.batch_size)
        if setup.cuts is not None:
            boundaries = GivenBoundaries()
        elif setup.last is not None:
            boundaries = EvenBoundaries(setup.batch_size, *setup.last)
        kinds = [type(stage) for stage in setup.stages if isinstance(stage, GroupStage | LimitStage)]
        self.spec = EpochSpec(
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
            boundaries=boundaries,
            position_map=PositionMap(
                kept_from=None if setup.keeps_count else 0,
                levels=[Origins(), *(GroupOrigins() if kind is GroupStage else Origins() for kind in kinds)],
                is_limited=any(limit is not None for limit in setup.limits),
            ),
            limits=setup.limits,
            skips=setup.skips,
        )
        self.epoch = Epoch(self.spec, self.resources, self.trainer)
        self._opener = BatchOpener(Views(self.slabs.segments, lambda _: None, lambda _: None))
        self.running = self.loop.create_task(self._run())

    @property
    def resources(self) -> Resources:
        return Resources(
            works=self.queue,
            slabs=self.slabs,
            arena=self.arena,
            budget=self.budget,
            meters=LoaderMeters(),
            wrap=self._wrap,
            copies=1,
            pack_error=serialize.pack_error,
        )

    async def _run(self) -> None:
        await self.queue.open()
        await self.epoch.run()

    def _forget(self, number: int) -> None:
        self.queue.forget_segment(number)

    def _wrap(self, samples: list[Any]) -> Part:
        if self.setup.shares_objects:
            return ListPart(samples)
        parts = serialize.pack(samples)
        lease = self.arena.lease(serialize.packed_size(parts))
        failures = [k for k, sample in enumerate(samples) if isinstance(sample, Failure)]
        return PackedPart(lease, serialize.write(parts, lease.view), 0, len(samples), failures)

    async def _on_loop(self, part: Part, positions: Sequence[int], key: int) -> tuple[Part, Sequence[int]]:
        samples = open_part(part)
        part.release()
        gate: asyncio.Future[None] = self.loop.create_future()
        self.gates.append(gate)
        await gate
        return self._wrap(samples), range(len(samples))

    def settle(self, *calls: Callable[[], Any]) -> None:
        settle(self.loop, *calls)

    # What may be done.

    def start(self) -> None:
        while self.workers.starting:
            may = self.workers.starting.pop(0)
            if not may.done():
                self.settle(partial(may.set_result, None))
                return

    def open(self, which: int) -> None:
        gate = self.gates.pop(which)
        if not gate.done():
            self.settle(partial(gate.set_result, None))

    def take(self) -> Any:
        """Ask for a batch; gives (its number, the batch or the exception in its place), or None: there is none yet."""
        if self.opened:
            return self._next_of_chunk()
        if self.trainer.asked == self.received:
            self.settle(self.trainer.ask)
        if self.received == len(self.trainer.sent):
            return None
        delivery = self.trainer.sent[self.received]
        self.received += 1
        if isinstance(delivery, ChunkDelivery):
            self.opened.extend(self._opener.arrived(delivery))
            self.settle(partial(self.slabs.returned, delivery.segment))  # all of it was copied
            return self._next_of_chunk()
        self._count(delivery.late, delivery.after)
        try:
            batch = self._opener.open(delivery)
        except Exception as error:
            return delivery.batch, error
        self.taken.append(delivery)
        return delivery.batch, batch

    def _next_of_chunk(self) -> tuple[int, Any]:
        """(its number, a batch of those that came together, or the exception in its place)."""
        arrived = self.opened.popleft()
        assert arrived.after is not None
        self._count(arrived.late, *arrived.after.said(arrived.number, arrived.number + 1))
        number = self.spec.boundaries.find(self.used - 1)[0]  # those before it may have been skipped
        try:
            return number, arrived.open()
        except Exception as error:
            return number, error

    def _count(self, *said: ProgressDelta | None) -> None:
        self.used += sum(change.used for change in said if change is not None)

    def let_go(self, which: int) -> None:
        self.settle(partial(self.slabs.returned, self.taken.pop(which).segment))

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
