"""The queue of tasks, driven through every order of replies, deaths and cancellations of workers by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation.loop import SimulatedLoop, simulate
from unit.by_hand import Worker, Workers, settle

from headrace._util.shared_memory import Lease, Segment
from headrace.errors import WorkerDiedError
from headrace.observe import LoaderMeters
from headrace.torch_compat.serialize import unpack_error
from headrace.workers.chains import SharedChains
from headrace.workers.executor import Loss, OnLost, OnReply, WorkerLink
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import ListPart
from headrace.workers.tasks import (
    DEATHS,
    Chain,
    Finish,
    LetGo,
    Message,
    PlaceMessage,
    Reply,
    StreamChains,
    Task,
    TaskMessage,
)

Draw = Callable[[Any], Any]

WEIGHTS = {"give": 4, "answer": 6, "decide": 5, "answer_again": 3, "let_one_start": 3, "lose": 1, "cancel": 1}

MACHINE = settings(max_examples=100, stateful_step_count=50, deadline=None)


class CountedPart(ListPart):
    """Samples whose leases are counted: each must end once, and not while a worker may read them."""

    def __init__(self, samples: list[Any], blocks: Sequence[int] = ()) -> None:
        super().__init__(samples)
        self.released = 0
        self._blocks = tuple(blocks)

    @property
    def blocks(self) -> Sequence[int]:
        return self._blocks

    def release(self) -> None:
        self.released += 1

    def sent(self) -> tuple[ListPart, list[Segment]]:
        return ListPart(self.samples), []


class CountedLease(Lease):
    """A lease that must end once."""

    __slots__ = ("released",)

    def __init__(self) -> None:
        self.released = 0
        segment: Any = type("Memory", (), {"number": 1, "size": 8, "view": memoryview(bytearray(8))})()
        super().__init__(segment, 0, 8, lambda _: None)

    def release(self) -> None:
        self.released += 1


class Link(Worker):
    """A worker that does nothing, and answers as the test has it answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: dict[int, TaskMessage] = {}
        self.chains: list[int] = []

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        assert self.is_open, "a message to a worker that has ended"
        if isinstance(message, LetGo):
            assert message.task in self.held, "a release of what is not held"
            del self.held[message.task]
        elif message.is_answered:
            assert message.number not in [one.number for one in self.to_do], "it was asked the same twice"
            assert not isinstance(message, PlaceMessage) or message.task in self.held, "nothing is held to be placed"
            self.to_do.append(message)

    def learn(self, stream: int, chains: SharedChains) -> None:
        self.chains.append(stream)

    def positions(self) -> list[int]:
        return [
            message.position if isinstance(message, TaskMessage) else self.held[message.task].position
            for message in self.to_do
        ]

    def answer_with(self, kind: Any, at: int = 0, **more: Any) -> None:
        reply, message = Reply(kind, value=self.positions()[at], **more), self.to_do.pop(at)
        if kind != "held":
            self.held.pop(message.task, None)
        elif isinstance(message, TaskMessage):
            self.held[message.task] = message
        self.reply(message.number, reply)


class Caller:
    """A caller that waits for one task, as `Dispatch` does."""

    def __init__(self, machine: QueueMachine, task: Task, part: CountedPart) -> None:
        self.machine, self.task, self.part = machine, task, part
        self.places: list[CountedLease] = []
        self.running = machine.loop.create_task(self._run())

    @property
    def reply(self) -> Reply | None:
        """The answer. None if there is none yet, or if the caller was cancelled."""
        return self.running.result() if self.running.done() else None

    async def _run(self) -> Reply | None:
        queue = self.machine.queue
        try:
            reply = await queue.run(self.task)
            while reply.kind == "held":
                self.machine.holding.append(self)
                self.wake: asyncio.Future[bool] = self.machine.loop.create_future()
                if not await self.wake:
                    raise asyncio.CancelledError
                self.places.append(CountedLease())
                reply = await queue.place(self.task, self.places[-1])
        except asyncio.CancelledError:
            queue.abandon(self.task)
            return None
        return reply


def know(queue: TaskQueue, *, sample_s: float, open_s: float) -> None:
    """Have a queue know how long it takes to open a block, and to make a sample."""
    queue._opening.learn(sample_s, 1, 0)
    queue._opening.learn(open_s, 1, 1)


class QueueMachine(RuleBasedStateMachine):
    """Tasks of several batches, a few workers, and everything that may become of them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = SimulatedLoop(0)
        self.executor, self.meters = Workers(Link), LoaderMeters()
        self.callers: list[Caller] = []
        self.holding: list[Caller] = []
        self.batch = 0
        self.chains = StreamChains({1: Chain()})

    @initialize(workers=st.integers(1, 3), are_threads=st.booleans(), is_known=st.booleans())
    def begin(self, workers: int, are_threads: bool, is_known: bool) -> None:
        self.workers = workers
        self.executor.shares_objects = are_threads
        self.queue = TaskQueue(workers, self.executor, self.meters)
        if is_known:
            know(self.queue, sample_s=1e-6, open_s=1e6)  # tasks wait for the worker that has their block
        self.queue.chains.learn(0, self.queue.chains.pack(self.chains))
        self.loop.run_until_complete(self.queue.open())
        self.settle()

    def settle(self, *calls: Callable[[], Any]) -> None:
        settle(self.loop, *calls)

    @rule(what=st.sampled_from([step for step, weight in WEIGHTS.items() for _ in range(weight)]), data=st.data())
    def step(self, what: str, data: st.DataObject) -> None:
        getattr(self, what)(data.draw)
        self.settle()

    def let_one_start(self, _: Draw) -> None:
        self.settle(self.executor.let_start)
        for link in self.executor.live:
            assert link.chains, "a new worker does not know the chains"

    def give(self, draw: Draw) -> None:
        self.batch += draw(st.booleans())
        finish = draw(st.sampled_from([Finish.SAMPLES, Finish.SLOTS, Finish.CHECK]))
        part = CountedPart([len(self.callers)], draw(st.lists(st.integers(1, 4), max_size=2)))
        self.callers.append(Caller(self, Task(1, 0, self.batch, finish, [part], len(self.callers)), part))

    def answer(self, draw: Draw) -> None:
        busy = [link for link in self.executor.live if link.to_do]
        if busy:
            kind = draw(st.sampled_from(["held", "held", "written", "failed"]))
            self.settle(partial(draw(st.sampled_from(busy)).answer_with, kind))

    def answer_again(self, draw: Draw) -> None:
        answered = [(link, *answer) for link in self.executor.all for answer in link.answered]
        if answered:
            link, number, reply = draw(st.sampled_from(answered))
            self.settle(partial(link.on_reply, number, reply))

    def lose(self, draw: Draw) -> None:
        if self.executor.live:
            link = draw(st.sampled_from(self.executor.live))
            known = draw(st.sampled_from([0, *(message.task for message in link.to_do[:1])]))
            self.settle(partial(link.lose, Loss(7, -9, known, draw(st.integers(-1, 0)) if known else -1)))

    def decide(self, draw: Draw) -> None:
        if self.holding:
            caller = draw(st.sampled_from(self.holding))
            self.holding.remove(caller)
            if not caller.wake.done():
                caller.wake.set_result(draw(st.sampled_from([True, True, True, False])))

    def cancel(self, draw: Draw) -> None:
        running = [caller for caller in self.callers if not caller.running.done()]
        if running:
            caller = draw(st.sampled_from(running))
            caller.running.cancel()
            if caller in self.holding:
                self.holding.remove(caller)

    @invariant()
    def leases_end_once_and_in_time(self) -> None:
        used = self.positions()
        for position, caller in enumerate(self.callers):
            assert caller.part.released <= 1
            assert all(place.released <= 1 for place in caller.places)
            assert all(place.released for place in caller.places[:-1]), "an old place was kept"
            if position in used:
                assert not caller.part.released, "it was released while a worker may read it"
                assert not caller.places or not caller.places[-1].released, "its place is another's, and is written to"
            assert not caller.reply or caller.part.released, "it was answered, and not released"

    @invariant()
    def no_task_is_at_two_workers(self) -> None:
        positions = self.positions()
        assert len(positions) == len(set(positions))

    @invariant()
    def answers_are_those_of_the_task(self) -> None:
        for position, caller in enumerate(self.callers):
            reply = caller.reply
            if reply is not None and reply.kind == "failed" and reply.errors:
                assert isinstance(unpack_error(reply.errors[0][1]), WorkerDiedError)
                assert max(caller.task.deaths.values()) >= DEATHS
            else:
                assert reply is None or reply.value == position, "an answer to something else was taken"

    def positions(self) -> list[int]:
        return [position for link in self.executor.live for position in link.positions()]

    def teardown(self) -> None:
        try:
            for _ in range(400):  # from here on all goes well: then every task must come to its end
                while self.executor.let_start():
                    pass
                for caller in list(self.holding):
                    self.holding.remove(caller)
                    if not caller.wake.done():
                        caller.wake.set_result(True)
                self.settle()
                for link in self.executor.live:
                    self.settle(*[partial(link.answer_with, "written") for _ in link.to_do])
                if all(caller.running.done() for caller in self.callers):
                    break
            assert all(caller.running.done() for caller in self.callers), "a task was lost"
            self.answers_are_those_of_the_task()
            assert not any(link.held for link in self.executor.live), "a worker still holds what nobody wants"
            assert self.meters.deaths == sum(not link.is_open for link in self.executor.all)
            assert len(self.executor.live) == self.workers
            self.loop.run_until_complete(self.queue.close())
            assert self.queue.is_idle
            assert all(caller.part.released == 1 for caller in self.callers)
            assert all(place.released == 1 for caller in self.callers for place in caller.places)
        finally:
            for caller in self.callers:
                caller.running.cancel()
            self.settle()
            self.loop.close()


TestQueue = QueueMachine.TestCase
TestQueue.settings = MACHINE


class Queued:
    """Tasks, in order, at workers by hand on a simulated loop."""

    def __init__(self, tasks: Sequence[Task], *, workers: int = 1, shares_objects: bool = True) -> None:
        self.executor, self.tasks = Workers(Link, shares_objects=shares_objects), tasks
        self.queue = TaskQueue(workers, self.executor, LoaderMeters())
        self.running: list[asyncio.Task[Reply]] = []

    async def __aenter__(self) -> Self:
        await self.queue.open()
        self.give(self.tasks)
        await self.turns()
        while self.executor.let_start():
            pass
        await self.turns()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        await self.queue.close()

    def give(self, tasks: Sequence[Task]) -> None:
        self.running += [asyncio.ensure_future(self.queue.run(task)) for task in tasks]

    async def turns(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    @property
    def given(self) -> list[set[int]]:
        """The positions of the tasks that each worker has."""
        return [set(link.positions()) for link in sorted(self.executor.all, key=lambda link: link.number)]

    def owner_of(self, position: int) -> int:
        return next(k for k, positions in enumerate(self.given) if position in positions)

    async def answer(self, position: int, seconds: float) -> None:
        link = next(link for link in self.executor.all if position in link.positions())
        link.answer_with("written", link.positions().index(position), busy_s={"open": seconds})
        await self.turns()


def task(finish: Finish, batch: int, position: int, blocks: Sequence[int] = ()) -> Task:
    place = CountedLease() if blocks else None
    return Task(1, 0, batch, finish, [CountedPart([0], blocks)], position, place=place)


def test_tasks_go_by_batch_and_searches_go_first() -> None:
    async def main() -> None:
        scan = Task(0, 0, 9, Finish.SCAN, [], place=CountedLease(), scan=(None, 0, True))
        async with Queued([*(task(Finish.CHECK, batch, 0) for batch in (5, 3, 4)), scan]) as run:
            (link,), given = run.executor.all, list[int]()
            while link.to_do:
                given.append(link.to_do[0].batch)
                link.answer_with("written")
                await run.turns()
            assert given == [9, 3, 4, 5]

    simulate(main())


def run_with(
    check: Callable[[Queued], Any], blocks: Sequence[Sequence[int]], *, sample_s: float = 0.001, open_s: float = 1.0
) -> None:
    """Check tasks of one sample each, of these blocks, at two processes."""

    async def main() -> None:
        tasks = [task(Finish.CHECK, number, number, some) for number, some in enumerate(blocks)]
        run = Queued(tasks, workers=2, shares_objects=False)
        if open_s:
            know(run.queue, sample_s=sample_s, open_s=open_s + sample_s)
        async with run:
            await check(run)

    for seed in range(10):
        simulate(main(), seed)


def test_tasks_of_a_block_are_sent_to_the_worker_that_opened_it() -> None:
    async def check(run: Queued) -> None:
        one = run.owner_of(0)
        assert run.given[one] == {0, 1}
        assert run.given[1 - one] == {4, 5}, "what waits for the first worker keeps the second from the next block"
        await run.answer(0, 1.001)
        assert run.given[one] == {1, 2}
        await run.answer(4, 1.001)
        assert run.given == ([{1, 2}, {5}] if one == 0 else [{5}, {1, 2}])
        await run.answer(1, 0.001)
        assert run.given[one] == {2, 3}

    run_with(check, [[1], [1], [1], [1], [2], [2]])


def test_task_of_two_blocks_is_sent_where_fewer_must_be_opened() -> None:
    async def check(run: Queued) -> None:
        assert run.given[run.owner_of(0)] == {0, 1}
        assert run.given[1 - run.owner_of(0)] == set()
        await run.answer(0, 1.001)
        assert run.given[run.owner_of(1)] == {1, 2}, "the second block is where its first samples were"

    run_with(check, [[1], [1, 2], [2]])


def test_slow_samples_of_a_block_are_divided_among_workers() -> None:
    async def check(run: Queued) -> None:
        assert sorted(map(sorted, run.given)) == [[0, 1], [2, 3]]

    run_with(check, [[1], [1], [1], [1]], sample_s=2.0)
    run_with(check, [[1], [1], [1], [1]], open_s=0.0)  # it is not known yet


def test_threads_share_open_blocks() -> None:
    async def main() -> None:
        run = Queued([task(Finish.CHECK, 0, 0, [1]), task(Finish.CHECK, 1, 1, [1])], workers=2)
        know(run.queue, sample_s=0.001, open_s=1.001)
        run.queue._at_once = 1
        async with run:
            assert sorted(map(sorted, run.given)) == [[0], [1]]

    simulate(main(), 0)


Order = tuple[Finish, int, int]  # and the numbers of batch and position


@pytest.mark.parametrize(("held", "others", "given"), [
    # Room may depend on earlier samples, because asynchronous steps end in any order.
    ((Finish.SAMPLES, 0, 1), [(Finish.SAMPLES, 0, 2), (Finish.SAMPLES, 0, 0)], [0]),
    # A batch whose samples are made may have the only turn of collation, which the held samples wait for.
    ((Finish.SAMPLES, 3, 12), [(Finish.SAMPLES, 4, 16), (Finish.COLLATE, 5, 20)], [20]),
    ((Finish.SAMPLES, 3, 12), [(Finish.SAMPLES, 4, 16), (Finish.CHECK, 5, 20)], [20]),
    # No later batch is collated: a worker would hold ever more of them.
    ((Finish.COLLATE, 3, 12), [(Finish.COLLATE, 5, 20)], []),
    ((Finish.COLLATE, 3, 12), [(Finish.COLLATE, 5, 20), (Finish.SAMPLES, 2, 8)], [8]),
    ((Finish.COLLATE, 3, 12), [(Finish.COLLATE, 5, 20), (Finish.COLLATE, 2, 8)], [8]),
])  # fmt: skip
def test_worker_that_holds_a_result_gets_the_tasks_it_waits_for(
    held: Order, others: list[Order], given: list[int]
) -> None:
    async def main() -> None:
        async with Queued([task(*held)]) as run:
            (link,) = run.executor.all
            link.answer_with("held")
            run.give([task(*other) for other in others])
            await run.turns()
            assert link.positions() == given

    simulate(main())


def test_error_of_starting_workers_is_raised_to_callers() -> None:
    class Broken(Workers):
        async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
            raise OSError("there are no machines")

    async def main() -> None:
        queue = TaskQueue(2, Broken(), LoaderMeters())
        await queue.open()
        early = asyncio.ensure_future(queue.run(task(Finish.CHECK, 0, 0)))
        for running in (early, queue.run(task(Finish.CHECK, 0, 0))):
            with pytest.raises(OSError, match="no machines"):
                await running
        assert queue.is_idle
        await queue.close()

    asyncio.run(main())
