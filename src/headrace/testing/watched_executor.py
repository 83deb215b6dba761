"""An executor that is watched, and that may tell more than is true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headrace.memory import Segment
from headrace.tasks import Reply
from headrace.work.chains import SharedChain
from headrace.work.executor import Executor, Loss, OnLost, OnReply, WorkerLink
from headrace.work.messages import Message


class WatchedExecutor:
    """An executor as it is, and what it was given and has answered; it may tell more than is true.

    Attributes:
        given: the numbers of the tasks that were sent.
        answered: those that were answered, in that order.
        repeats: whether each answer comes three times, the last time when others have come.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.shares_memory, self.shares_objects = executor.shares_memory, executor.shares_objects
        self.given: list[int] = []
        self.answered: list[int] = []
        self.repeats = False
        self._late: list[Callable[[], None]] = []
        self._on_lost: list[OnLost] = []

    async def start(self, worker: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        def answer(number: int, reply: Reply) -> None:
            self.answered.append(number)
            on_reply(number, reply)
            if self.repeats:
                on_reply(number, reply)
                late, self._late = self._late, [partial(on_reply, number, reply)]
                for again in late:
                    again()

        self._on_lost.append(on_lost)
        return WatchedLink(await self._executor.start(worker, answer, on_lost), self.given)

    def lose_one(self) -> None:
        """Say that a worker was lost, which works on."""
        self._on_lost[0](Loss())

    async def aclose(self) -> None:
        await self._executor.aclose()


class WatchedLink:
    def __init__(self, link: WorkerLink, given: list[int]) -> None:
        self._link, self._given = link, given

    @property
    def pid(self) -> int:
        return self._link.pid

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        self._link.send(message, segments)
        if message.is_answered:
            self._given.append(message.number)

    def learn(self, number: int, chain: SharedChain) -> None:
        self._link.learn(number, chain)
