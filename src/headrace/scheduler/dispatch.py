"""Has tasks worked on to their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.memory import Arena, Lease
from headrace.parts import ApartPart, PackedPart, TablePart
from headrace.scheduler.budget import Budget
from headrace.scheduler.recipe import Works
from headrace.tasks import Finish, Reply, Task

_MORE = 1.1  # bytes are made room for than the largest have had by and by
_ALIKE = 0.02  # sizes differ by no more than their pickles do


class Dispatch:
    """The tasks of one epoch that workers have.

    Args:
        works: the workers.
        budget: told when something was released, and when the workers have nothing left to do.
        arena: where samples lie that have been made and are not in a batch yet.

    Attributes:
        under_way: how many tasks workers have.
    """

    def __init__(self, works: Works, budget: Budget, arena: Arena) -> None:
        self._works, self._budget, self._arena = works, budget, arena
        self._sizes: dict[int, float] = {}  # bytes for what a chain makes of a sample, or of a group
        self.under_way = 0
        self.has_begun = False  # a first batch was delivered: idle workers mean from now on that reading is too slow
        self.has_waiting: Callable[[], bool] = lambda: False  # but not where samples wait that nobody has asked for yet

    def learn_spec(self, chain: int, spec: bytes) -> None:
        """Make known in which form the samples of a chain are written into slots."""
        self._works.learn_spec(chain, spec)

    async def work(self, task: Task, find_place: Callable[[Reply], Awaitable[Lease | None]] | None = None) -> Reply:
        """Have a task worked on to its end.

        Args:
            find_place: finds a place for what was made before it had one; None: it is not wanted any more, and the
                reply is "mismatch".
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
        """Have samples made, and put where the next stage finds them; None where the whole task has failed.

        Args:
            is_urgent: whether the oldest batch waits for them, so that they get room whatever is held.
        """
        room: list[Lease] = []
        count = 1 if task.finish is Finish.GROUP else task.count
        expected = int(count * self._sizes.get(task.chain, 0.0))
        if expected and self._budget.has_room(expected):  # else it is asked for when it is known how much that is
            with suppress(MemoryError):
                room.append(self._arena.lease(expected))
                task.place = room[0].retain()

        async def find_room(reply: Reply) -> Lease:
            while room:
                room.pop().release()

            def grant() -> None:
                room.append(self._arena.lease(reply.size))

            # The worker holds them meanwhile, and takes on nothing that comes later: so much is bounded too.
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
    """How large samples are expected to be, with some room where they differ."""
    if not known or abs(size - known) <= _ALIKE * known:
        return max(known, size)
    return max(_MORE * size, (known + _MORE * size) / 2)


def _made_s(reply: Reply) -> float:
    """Seconds in which samples were made; what is done to batches is not theirs."""
    return sum(seconds for step, seconds in reply.busy_s.items() if step not in ("collate", "write"))
