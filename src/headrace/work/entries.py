"""The task queue's records of tasks and workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.tasks import Finish, Reply, Task
from headrace.work.open_blocks import OpenBlocks

if TYPE_CHECKING:
    from headrace.work.executor import WorkerLink


class QueueEntry:
    """A queued task with the future of its reply."""

    def __init__(self, number: int, task: Task, reply: asyncio.Future[Reply]) -> None:
        self.number, self.task, self.reply = number, task, reply
        self.asked = number  # number of the awaited reply
        self.worker: QueueWorker | None = None
        self.is_abandoned = False
        self.blocks = list(dict.fromkeys(number for part in task.parts for number in part.blocks))

    @property
    def at(self) -> tuple[int, int]:
        """Priority. Within a batch, tasks of inner stages go in order of position."""
        return self.task.batch, self.task.position if self.task.finish.is_inner else -1

    def answer(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class QueueWorker:
    def __init__(self, number: int, at_once: int) -> None:
        self.number, self._at_once = number, at_once
        self.link: WorkerLink | None = None  # None: starting or lost
        self.is_lost = False
        self.tasks: dict[int, QueueEntry] = {}  # in the order of sending
        self.segments: set[int] = set()
        self.held: dict[int, QueueEntry] = {}  # results without memory to write to
        self.blocks = OpenBlocks()

    def may_take(self, entry: QueueEntry) -> bool:
        """True if the worker may get this task now.

        A worker that holds unplaced results takes only tasks those results may wait for: older batches, or, if it holds
        no batch, a collate task.
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
        """True if messages may be sent to the worker."""
        return self.link is not None and self.link.is_open

    @property
    def load(self) -> int:
        """Estimated work of its tasks. Scanning takes much less time than making samples."""
        return sum(1 if entry.task.finish is Finish.SCAN else 1 + 4 * entry.task.count for entry in self.tasks.values())
