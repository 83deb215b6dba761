"""Tasks in the queue's books, and workers with those that they were given."""

from __future__ import annotations

import asyncio

from headrace.tasks import Finish, Reply, Task
from headrace.work.executor import WorkerLink
from headrace.work.open_blocks import OpenBlocks


class QueueEntry:
    """A task in the queue's books, with whoever waits for its reply."""

    def __init__(self, number: int, task: Task, reply: asyncio.Future[Reply]) -> None:
        self.number, self.task, self.reply = number, task, reply
        self.asked = number  # by which the answer that is waited for is known
        self.worker: QueueWorker | None = None
        self.is_abandoned = False
        self.blocks = list(dict.fromkeys(number for part in task.parts for number in part.blocks))

    @property
    def at(self) -> tuple[int, int]:
        """Its place in the order: where the samples of a batch are not its own yet, the earlier of them go first."""
        return self.task.batch, self.task.position if self.task.finish.is_inner else -1

    def answer(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class QueueWorker:
    def __init__(self, number: int, at_once: int) -> None:
        self.number, self._at_once = number, at_once
        self.link: WorkerLink | None = None  # None: it is starting, or lost
        self.is_lost = False
        self.tasks: dict[int, QueueEntry] = {}  # in the order in which they were given
        self.segments: set[int] = set()
        self.held: dict[int, QueueEntry] = {}  # what it has made and has no place for
        self.blocks = OpenBlocks()

    def may_take(self, entry: QueueEntry) -> bool:
        """Whether it may be given this task now.

        What it holds, or will hold, is placed before it begins something else: nothing may come between the first
        samples and their batch. Only what a place may have to wait for may: older batches; and while it holds no batch,
        one whose samples have been made, for older ones may wait until that is collated.
        """
        if not self.is_open or len(self.tasks) >= self._at_once:
            return False
        if entry.task.finish is Finish.SCAN:
            return True
        will_hold = any(e.task.place is None for e in self.tasks.values())
        held = (e for e in self.held.values() if e.task.finish.is_of_made or not entry.task.finish.is_of_made)
        return not will_hold and all(entry.at < e.at for e in held)

    @property
    def is_open(self) -> bool:
        """Whether it may be told anything."""
        return self.link is not None and self.link.is_open

    @property
    def load(self) -> int:
        """How much it has to do before another task; finding samples takes much less time than making them."""
        return sum(1 if entry.task.finish is Finish.SCAN else 1 + 4 * entry.task.count for entry in self.tasks.values())
