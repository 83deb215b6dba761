"""The protocol of executors, which run workers. Implement it to run workers elsewhere.

A worker handles one message after the other, and replies to tasks. All methods are called on the engine's loop and must
not wait for a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace._util.shared_memory import Segment
from headrace.workers.chains import SharedChains
from headrace.workers.task_runner import TaskRunner
from headrace.workers.tasks import Message, Reply


@dataclass(frozen=True, slots=True)
class Loss:
    """An unexpected end of a worker.

    Attributes:
        pid: Process id. 0: the worker had no process, or it is not known.
        code: Exit status as in `subprocess`. None: not known.
        task: Number of its current task. 0: not known, so that all its tasks are suspected.
        sample: Index of the current sample in that task. -1: none, or not known.
    """

    pid: int = 0
    code: int | None = None
    task: int = 0
    sample: int = -1


class WorkerLink(Protocol):
    """The trainer's end of one worker.

    Attributes:
        pid: Process id. 0: the worker has no process.
        is_open: True if messages may be sent. False once the worker's end was noticed.
    """

    @property
    def pid(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message, in order and without waiting.

        Args:
            segments: Shared memory that the message refers to and that was not sent to this worker before. Empty if the
                executor shares none.
        """
        ...

    def learn(self, stream: int, chains: SharedChains) -> None:
        """Register the chains of a stream with the worker, before the next message."""
        ...


OnReply = Callable[[int, Reply], None]
"""Takes the number of a message, and the worker's reply to it."""

OnLost = Callable[[Loss], None]
"""Takes the details of a worker's end."""


class Executor(Protocol):
    """Starts the workers of one loader.

    Attributes:
        shares_memory: True if workers see the memory of this process's segments. Otherwise inputs are sent with
            messages as bytes, and results with replies.
        shares_objects: True if workers are threads of this process, so that objects need no pickling.
    """

    shares_memory: bool
    shares_objects: bool

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        """Start the worker with this number, also to replace a lost one.

        Args:
            on_reply: To be called on the loop for each reply.
            on_lost: To be called on the loop once, if the worker has ended unexpectedly. Later replies are ignored.

        Raises:
            Exception: no worker can be started, now or later. Raised to all who wait.
        """
        ...

    async def aclose(self) -> None:
        """End all workers, also in the middle of a sample. No callback is called afterwards."""
        ...


class Worker:
    """A worker for an executor that shares nothing. Messages and replies can be pickled."""

    def __init__(self, number: int) -> None:
        self._runner = TaskRunner(everywhere=True, progress=[-1], number=number)

    def answer(self, message: Message) -> tuple[int, Reply] | None:
        """Handle a message. Returns the arguments for `on_reply`, if it has a reply."""
        if not message.is_answered:
            message.carry_out(self._runner)
            return None
        reply = message.carry_out(self._runner)
        self._runner.tidy()
        return message.number, reply
