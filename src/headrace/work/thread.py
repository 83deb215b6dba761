"""Workers that are threads of the trainer's process: one for `num_workers=0`, or as many as were asked for."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from headrace.errors import LoaderClosedError
from headrace.memory import Lease, Segment
from headrace.tasks import Chain, Finish, Reply, Task
from headrace.torch_compat.packing import pack_error
from headrace.types import Meters
from headrace.work.orders import address_of, order_of
from headrace.work.workbench import Workbench, untold

_END_S = 2.0

# What a thread does at its bench.
_Job = Callable[[Workbench], None]


class ThreadWorkers:
    """Threads that work on tasks, those of the earliest batch first; which one takes a task is nobody's choice.

    The global random number generators belong to the trainer's own code in this process and are left alone; `hr.rng()`
    gives each sample the same numbers as in a worker process.

    Args:
        count: how many.
        meters: where busy times are counted.
    """

    def __init__(self, count: int, meters: Meters) -> None:
        self._meters = meters
        self._benches = [Workbench(everywhere=False, progress=untold, number=number) for number in range(count)]
        self._jobs: list[tuple[int, int, int, _Job]] = []
        self._numbers = itertools.count(1)
        self._tasks: dict[Task, int] = {}
        self._holders: dict[Task, Workbench] = {}  # the bench that has made what a task asked for
        self._under_way: set[Task] = set()
        self._running = 0
        self._ended = asyncio.Event()
        self._wake = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(bench,), name="headrace-work", daemon=True)
            for bench in self._benches
        ]

    async def open(self) -> None:
        """Start the threads."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()
            self._running += 1
        self._meters.count_started()

    def pack(self, chain: Chain) -> Chain:
        """A chain as `learn` wants it."""
        return chain

    def learn(self, number: int, chain: Chain) -> None:
        """Make a chain known, without keeping it: its functions may refer to the loader, which may be forgotten."""
        known = weakref.ref(chain)

        def load() -> Chain:
            found = known()
            if found is None:
                raise LoaderClosedError("the loader is gone")
            return found

        for bench in self._benches:
            bench.learn(number, load)

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Make known in which form a chain's samples are written into slots; none: the next one made will tell."""
        for bench in self._benches:
            bench.learn_spec(number, spec)

    async def run(self, task: Task) -> Reply:
        """Have a task worked on."""
        number = self._tasks[task] = next(self._numbers)
        parts = []
        segments = [] if task.place is None else [task.place.segment]
        for part in task.parts:
            description, needed = part.describe()
            parts.append(description)
            segments += needed
        for segment in segments:
            self._attach(segment)
        order = order_of(number, task, parts)

        def work(bench: Workbench) -> Reply:
            self._holders[task] = bench
            return bench.work(order)

        return await self._do(task, work)

    async def place(self, task: Task, place: Lease) -> Reply:
        """Say where what is held for a task goes; takes the lease over."""
        if task.place is not None:
            task.place.release()
        task.place = place
        number = self._tasks[task]
        self._attach(place.segment)
        address, holder = address_of(place), self._holders[task]
        return await self._do(task, lambda _: holder.place(number, address))

    def abandon(self, task: Task) -> None:
        """Let go of what is held for a task that nobody waits for."""
        number = self._tasks.get(task)
        if number is not None and task not in self._under_way:
            self._holders[task].let_go(number)
            self._release(task)

    def forget_segment(self, number: int) -> None:
        """A segment is gone."""
        for bench in self._benches:
            bench.detach(number)

    async def close(self) -> None:
        """End each thread once the function that it is in returns; that is waited for, but not for long."""
        with self._wake:
            self._is_closed = True
            self._jobs.clear()
            self._wake.notify_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _END_S)
        for task in list(self._tasks):
            self._release(task)

    def _attach(self, segment: Segment) -> None:
        for bench in self._benches:
            bench.attach(segment.number, segment.view)

    async def _do(self, task: Task, work: Callable[[Workbench], Reply]) -> Reply:
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._under_way.add(task)

        def job(bench: Workbench) -> None:
            try:
                reply = work(bench)
            except BaseException as error:  # a SystemExit of the user's ends this thread no more than another error
                reply = Reply("failed", errors=[(task.slot, pack_error(error))])
            self._tell(self._finish, task, future, reply)

        with self._wake:
            first = 0 if task.finish is Finish.SCAN else 1
            heapq.heappush(self._jobs, (first, task.batch, next(self._numbers), job))
            self._wake.notify()
        return await future

    def _finish(self, task: Task, future: asyncio.Future[Reply], reply: Reply) -> None:
        """Back on the loop. Only now may what the task names be used for something else."""
        self._under_way.discard(task)
        for step, seconds in reply.busy_s.items():
            self._meters.count_work(step, seconds)
        if future.cancelled():
            self.abandon(task)
            self._release(task)
            return
        if reply.kind != "held":
            self._release(task)
        future.set_result(reply)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the loader is gone
            self._loop.call_soon_threadsafe(callback, *args)

    def _release(self, task: Task) -> None:
        self._holders.pop(task, None)
        if self._tasks.pop(task, None) is not None:
            for part in task.parts:
                part.release()
            if task.place is not None:
                task.place.release()

    def _serve(self, bench: Workbench) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    break
                job = heapq.heappop(self._jobs)[3]
            job(bench)
        self._tell(self._count_end)

    def _count_end(self) -> None:
        self._running -= 1
        if not self._running:
            self._ended.set()
