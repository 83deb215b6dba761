"""Worker threads of the trainer's process: one for `num_workers=0`, or several."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace._util.shared_memory import Segment
from headrace.torch_compat.serialize import pack_error
from headrace.workers.chains import SharedChains
from headrace.workers.executor import OnLost, OnReply
from headrace.workers.task_runner import TaskRunner
from headrace.workers.tasks import Message, PlaceMessage, Reply

_END_S = 2.0


@dataclass(frozen=True, slots=True)
class _Learn:
    """Register chains of a stream. They replace older ones."""

    stream: int
    chains: SharedChains

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.learn(self.stream, self.chains.load)


_Job = Message | _Learn


class _Jobs:
    """The jobs of one executor's threads.

    Each thread runs its own jobs in order. Only place messages may be handled by any thread, so that they do not wait
    for a user's function in the thread that made the result.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places: deque[tuple[_Thread, PlaceMessage]] = deque()
        self._own: dict[_Thread, deque[_Job | None]] = {}

    def add(self, thread: _Thread) -> None:
        with self._changed:
            self._own[thread] = deque()

    def put(self, thread: _Thread, job: _Job | None) -> None:
        """Add a job for a thread. None: end the thread."""
        with self._changed:
            if isinstance(job, PlaceMessage):
                self._places.append((thread, job))
            else:
                self._own[thread].append(job)
            self._changed.notify_all()

    def take(self, thread: _Thread) -> tuple[_Thread, _Job | None]:
        """Wait for the next job: (thread that it belongs to, job)."""
        with self._changed:
            while not self._places and not self._own[thread]:
                self._changed.wait()
            return self._places.popleft() if self._places else (thread, self._own[thread].popleft())


class _Thread:
    pid = 0
    is_open = True

    def __init__(self, number: int, jobs: _Jobs, on_reply: OnReply) -> None:
        self._jobs, self._on_reply = jobs, on_reply
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.runner = TaskRunner(everywhere=False, progress=[-1], number=number)
        self._is_closed = False
        jobs.add(self)
        threading.Thread(target=self._serve, name="headrace-work", daemon=True).start()

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        for segment in segments:
            self.runner.attach(segment.number, segment.view)
        self._jobs.put(self, message)

    def learn(self, stream: int, chains: SharedChains) -> None:
        self._jobs.put(self, _Learn(stream, chains))

    def close(self) -> None:
        """End the thread once its current function returns."""
        self._is_closed = True
        self._jobs.put(self, None)

    def _serve(self) -> None:
        while True:
            worker, job = self._jobs.take(self)
            if job is None or self._is_closed:
                break
            worker.carry_out(job)
            del worker, job
        self._tell(self.ended.set)

    def carry_out(self, job: _Job) -> None:
        reply = self._carried_out(job)
        if job.is_answered and reply is not None:
            self._tell(self._answer, job.number, reply)

    def _carried_out(self, job: _Job) -> Reply | None:
        try:
            reply = job.carry_out(self.runner)
        except BaseException as error:  # a SystemExit of user code must not end this thread
            return Reply("failed", errors=[(job.slot, pack_error(error))]) if job.is_answered else None
        return reply

    def _answer(self, number: int, reply: Reply) -> None:
        if not self._is_closed:
            self._on_reply(number, reply)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the loader is gone
            self._loop.call_soon_threadsafe(callback, *args)


class ThreadExecutor:
    """Runs tasks in threads.

    The trainer's code uses the global random number generators of this process, so they are not seeded. `hr.rng()`
    returns the same numbers for each sample as in a worker process.
    """

    shares_memory = True
    shares_objects = True

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._jobs = _Jobs()

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> _Thread:
        thread = _Thread(number, self._jobs, on_reply)
        self._threads.append(thread)
        return thread

    async def aclose(self) -> None:
        """End each thread once its current function returns. Waits for a limited time."""
        for thread in self._threads:
            thread.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(thread.ended.wait() for thread in self._threads)), _END_S)
        for thread in self._threads:
            thread.runner.detach_all()  # frees the memory, which may be large
