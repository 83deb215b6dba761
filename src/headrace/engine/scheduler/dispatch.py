"""Runs tasks to their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace._util.shared_memory import Arena, Lease
from headrace.engine.scheduler.budget import Budget
from headrace.workers.sample_chunks import ApartPart, PackedPart, TablePart
from headrace.workers.tasks import Finish, Reply, Task

if TYPE_CHECKING:
    from headrace.workers.queue import TaskQueue

_MORE = 1.1  # factor of memory reserved over the recent sizes
_ALIKE = 0.02  # share: sizes closer than this differ by their pickles only


class Dispatch:
    """The tasks of one epoch that workers have."""

    def __init__(self, works: TaskQueue, budget: Budget, arena: Arena) -> None:
        self._works, self._budget, self._arena = works, budget, arena
        self._sizes: dict[int, float] = {}  # by chain: bytes of the result per sample or group
        self.under_way = 0
        self.has_begun = False  # after the first delivery idle workers mean that reading is too slow
        self.has_waiting: Callable[[], bool] = lambda: False  # except if samples wait that are not requested yet

    def learn_spec(self, chain: int, spec: bytes) -> None:
        self._works.learn_spec(chain, spec)

    async def work(self, task: Task, find_place: Callable[[Reply], Awaitable[Lease | None]] | None = None) -> Reply:
        """Run a task to its end.

        `find_place` returns memory for a result that was made without, or None to discard it (the reply is then
        "mismatch").
        """
        self.under_way += 1
        try:
            reply = await self._works.run(task)
            made_s = _made_s(reply)
            while reply.kind == "held":
                place = None if find_place is None else await find_place(reply)
                if place is None:
                    self._works.abandon(task)
                    return Reply("mismatch")
                reply = await self._works.place(task, place)
                made_s += _made_s(reply)
        except BaseException:
            self._works.abandon(task)
            raise
        finally:
            self.under_way -= 1
            if not self.under_way and self.has_begun and not self.has_waiting():
                self._budget.starved()
            self._budget.changed()
        reply.made_s = made_s
        return reply

    async def samples(
        self, task: Task, is_urgent: Callable[[], bool]
    ) -> tuple[Reply, PackedPart | ApartPart | TablePart | None]:
        """Make samples and store them for the next stage. The part is None if the whole task failed."""
        room: list[Lease] = []
        count = 1 if task.finish is Finish.GROUP else task.count
        expected = int(count * self._sizes.get(task.chain, 0.0))
        if expected and self._budget.has_room(expected):  # else requested when the size is known
            with suppress(MemoryError):
                room.append(self._arena.lease(expected))
                task.place = room[0].retain()

        async def find_room(reply: Reply) -> Lease:
            while room:
                room.pop().release()

            def grant() -> None:
                room.append(self._arena.lease(reply.size))

            # The worker holds them in the meantime and starts no later task, so this is bounded too.
            rank = (-1, task.position)
            await self._budget.admit(reply.size, rank, grant, is_urgent=is_urgent, is_early=lambda: False)
            return room[0].retain()

        try:
            reply = await self.work(task, find_room)
        except BaseException:
            for lease in room:
                lease.release()
            raise
        if reply.kind == "written":
            self._sizes[task.chain] = _expected(self._sizes.get(task.chain, 0.0), reply.size / max(1, count))
            if reply.size < room[0].size:
                self._arena.trim(room[0], reply.size)
            if reply.pieces:
                return reply, ApartPart(room[0], reply.pieces, reply.failed)
            if reply.is_table:
                return reply, TablePart(room[0], reply.lengths, range(len(reply.kept)))
            return reply, PackedPart(room[0], reply.lengths, 0, len(reply.kept), reply.failed)
        for lease in room:
            lease.release()
        return reply, None


def _expected(known: float, size: float) -> float:
    """Estimate the next size, with a margin if sizes vary."""
    if not known or abs(size - known) <= _ALIKE * known:
        return max(known, size)
    return max(_MORE * size, (known + _MORE * size) / 2)


def _made_s(reply: Reply) -> float:
    """Seconds spent on samples, without collation and writing."""
    return sum(seconds for step, seconds in reply.busy_s.items() if step not in ("collate", "write"))
