"""Workers that are threads of the trainer's process: one for `num_workers=0`, or as many as were asked for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, Literal

from headrace.forks import Original
from headrace.memory import Segment
from headrace.tasks import Reply
from headrace.torch_compat.serialize import pack_error
from headrace.work.chains import SharedChain
from headrace.work.executor import OnLost, OnReply
from headrace.work.messages import Message
from headrace.work.task_runner import TaskRunner, untold

_END_S = 2.0
_A_STEP = "a function of the loader's"


@dataclass(frozen=True, slots=True)
class _Learn:
    """A chain as it is, in the place of an older one with its number."""

    number: int
    chain: SharedChain

    is_answered: ClassVar[Literal[False]] = False

    def carry_out(self, runner: TaskRunner) -> None:
        runner.learn(self.number, self.chain.load)


_Job = tuple[Message | _Learn, Sequence[Segment]] | None


class _Thread:
    """One worker; see `headrace.work.executor.WorkerLink`."""

    pid = 0
    is_open = True

    def __init__(self, number: int, on_reply: OnReply) -> None:
        self._on_reply = on_reply
        self._original = Original()
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.runner = TaskRunner(everywhere=False, progress=untold, number=number)
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._serve, name="headrace-work", daemon=True).start()

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        self._jobs.put((message, segments))

    def learn(self, number: int, chain: SharedChain) -> None:
        self._jobs.put((_Learn(number, chain), ()))

    def close(self) -> None:
        """End it once the function that it is in returns."""
        self._is_closed = True
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            message, segments = job
            for segment in segments:
                self.runner.attach(segment.number, segment.view)
            del job, segments
            reply = self._carried_out(message)
            if message.is_answered and reply is not None:
                self._tell(self._answer, message.number, reply)
            del message, reply
        self._tell(self.ended.set)

    def _carried_out(self, message: Message | _Learn) -> Reply | None:
        try:
            reply = message.carry_out(self.runner)
            self._original.check(_A_STEP)
        except BaseException as error:  # a SystemExit of the user's ends this thread no more than another error
            self._original.check(_A_STEP, error)
            return Reply("failed", errors=[(message.slot, pack_error(error))]) if message.is_answered else None
        return reply

    def _answer(self, number: int, reply: Reply) -> None:
        if not self._is_closed:
            self._on_reply(number, reply)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the loader is gone
            self._loop.call_soon_threadsafe(callback, *args)


class ThreadExecutor:
    """Threads that work on tasks.

    The global random number generators belong to the trainer's own code in this process and are left alone; `hr.rng()`
    gives each sample the same numbers as in a worker process.
    """

    shares_memory = True
    shares_objects = True

    def __init__(self) -> None:
        self._threads: list[_Thread] = []

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> _Thread:  # noqa: ARG002 (none is lost)
        thread = _Thread(number, on_reply)
        self._threads.append(thread)
        return thread

    async def aclose(self) -> None:
        """End each thread once the function that it is in returns; that is waited for, but not for long."""
        for thread in self._threads:
            thread.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(thread.ended.wait() for thread in self._threads)), _END_S)
        for thread in self._threads:
            thread.runner.detach_all()  # with its last view the memory goes, which may be much
