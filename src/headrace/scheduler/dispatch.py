"""Has tasks worked on to their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.memory import Lease
from headrace.scheduler.budget import Budget
from headrace.scheduler.recipe import Works
from headrace.tasks import Reply, Task


class Dispatch:
    """The tasks of one epoch that workers have.

    Args:
        works: the workers.
        budget: told when something was released, and when the workers have nothing left to do.
    """

    def __init__(self, works: Works, budget: Budget) -> None:
        self._works, self._budget = works, budget
        self._under_way = 0
        self.has_begun = False  # a first batch was delivered: idle workers mean from now on that reading is too slow

    def learn_spec(self, chain: int, spec: bytes) -> None:
        """Make known in which form the samples of a chain are written into slots."""
        self._works.learn_spec(chain, spec)

    async def work(self, task: Task, find_place: Callable[[Reply], Awaitable[Lease | None]] | None = None) -> Reply:
        """Have a task worked on to its end.

        Args:
            find_place: finds a place for what was made before it had one; None: it is not wanted any more, and the
                reply is "mismatch".
        """
        self._under_way += 1
        try:
            reply = await self._works.run(task)
            while reply.kind == "held":
                place = None if find_place is None else await find_place(reply)
                if place is None:
                    self._works.abandon(task)
                    return Reply("mismatch")
                reply = await self._works.place(task, place)
        except BaseException:
            self._works.abandon(task)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way and self.has_begun:
                self._budget.starved()
            self._budget.changed()
        return reply
