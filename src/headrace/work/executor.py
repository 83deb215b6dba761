"""Whoever runs workers: the seam for those who would have them elsewhere.

A worker carries out one message after the other, and answers those that are tasks. Everything here is called on the
engine's loop, and nothing on it may wait for a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.memory import Segment
from headrace.tasks import Reply
from headrace.work.chains import SharedChain
from headrace.work.messages import Message
from headrace.work.task_runner import TaskRunner


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker that nobody wanted.

    Attributes:
        pid: of its process; 0: it had none of its own, or it is not known.
        code: its exit status, as `subprocess` has it; None: not known.
        task: the number of the task that it was working on; 0: not known, so that all that it had are suspected.
        sample: the index of the sample in that task; -1: it was at none, or it is not known.
    """

    pid: int = 0
    code: int | None = None
    task: int = 0
    sample: int = -1


class WorkerLink(Protocol):
    """The trainer's end of one worker.

    Attributes:
        pid: of the worker's process; 0: it has none of its own.
        is_open: whether it may be told anything; False from the moment on at which its end is seen.
    """

    @property
    def pid(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Pass a message on, in order and without waiting.

        Args:
            segments: what it names of shared memory that was not sent to this worker before; none where the executor
                shares none.
        """
        ...

    def learn(self, number: int, chain: SharedChain) -> None:
        """Have the worker know a chain by its number, before what is sent next."""
        ...


OnReply = Callable[[int, Reply], None]
"""Takes the number of a message, and what the worker answers to it."""

OnLost = Callable[[Loss], None]
"""Takes what is known of a worker's end."""


class Executor(Protocol):
    """Starts workers; one for each loader.

    Attributes:
        shares_memory: whether workers see the memory of this process's segments. Where they do not, what they need goes
            with the messages as bytes, and comes back with the replies.
        shares_objects: whether workers are threads of this process: then objects go as they are.
    """

    shares_memory: bool
    shares_objects: bool

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        """Start the worker with this number; also in the place of one that was lost.

        Args:
            on_reply: to be called on the loop for each answer.
            on_lost: to be called on the loop once, when the worker has ended without being told to; no answer of its
                counts afterwards.

        Raises:
            Exception: no worker can be started, nor another time: it is raised to all who wait.
        """
        ...

    async def aclose(self) -> None:
        """End all workers, also those that are in the middle of a sample; nothing is called any more."""
        ...


class Worker:
    """A worker of an executor that shares nothing: it takes messages, and gives answers, which both can be pickled.

    Args:
        number: the worker's.
    """

    def __init__(self, number: int) -> None:
        self._runner = TaskRunner(everywhere=True, progress=[-1], number=number)

    def answer(self, message: Message) -> tuple[int, Reply] | None:
        """Carry out a message; what `on_reply` is to be called with, if anything."""
        if not message.is_answered:
            message.carry_out(self._runner)
            return None
        reply = message.carry_out(self._runner)
        self._runner.tidy()
        return message.number, reply
