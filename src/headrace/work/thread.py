"""Workers for `num_workers=0`: a thread of the trainer's process does what worker processes would do."""

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
from headrace.memory import Lease
from headrace.tasks import Chain, Finish, Reply, Task
from headrace.torch_compat.packing import pack_error
from headrace.types import Meters
from headrace.work.orders import address_of, order_of
from headrace.work.workbench import Workbench, untold

_END_S = 2.0


class ThreadWorker:
    """One thread that works on tasks, those of the earliest batch first.

    The global random number generators belong to the trainer's own code in this process and are left alone; `hr.rng()`
    gives each sample the same numbers as in a worker process.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._bench = Workbench(everywhere=False, progress=untold)
        self._jobs: list[tuple[int, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._tasks: dict[Task, int] = {}
        self._under_way: set[Task] = set()
        self._ended = asyncio.Event()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="headrace-work", daemon=True)

    async def open(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._meters.count_started()

    def learn(self, number: int, chain: Chain) -> None:
        """Make a chain known, without keeping it: its functions may refer to the loader, which may be forgotten."""
        known = weakref.ref(chain)

        def load() -> Chain:
            found = known()
            if found is None:
                raise LoaderClosedError("the loader is gone")
            return found

        self._bench.learn(number, load)

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Make known in which form a chain's samples are written into slots."""
        self._bench.learn_spec(number, spec)

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
            self._bench.attach(segment.number, segment.view)
        order = order_of(number, task, parts)
        return await self._do(task, lambda: self._bench.work(order))

    async def place(self, task: Task, place: Lease) -> Reply:
        """Say where what is held for a task goes; takes the lease over."""
        if task.place is not None:
            task.place.release()
        task.place = place
        number = self._tasks[task]
        self._bench.attach(place.segment.number, place.segment.view)
        address = address_of(place)
        return await self._do(task, lambda: self._bench.place(number, address))

    def abandon(self, task: Task) -> None:
        """Let go of what is held for a task that nobody waits for."""
        number = self._tasks.get(task)
        if number is not None and task not in self._under_way:
            self._bench.let_go(number)
            self._release(task)

    def forget_segment(self, number: int) -> None:
        """A segment is gone."""
        self._bench.detach(number)

    async def close(self) -> None:
        """End the thread once the function that it is in returns; that is waited for, but not for long."""
        with self._wake:
            self._is_closed = True
            self._jobs.clear()
            self._wake.notify()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _END_S)
        for task in list(self._tasks):
            self._release(task)

    async def _do(self, task: Task, work: Callable[[], Reply]) -> Reply:
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._under_way.add(task)

        def job() -> None:
            try:
                reply = work()
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
        if self._tasks.pop(task, None) is not None:
            for part in task.parts:
                part.release()
            if task.place is not None:
                task.place.release()

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    self._tell(self._ended.set)
                    return
                job = heapq.heappop(self._jobs)[3]
            job()
