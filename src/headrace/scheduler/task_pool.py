"""Tasks that do one thing after another: to start one takes longer than what most of them have to do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from anyio.abc import TaskGroup

_Work = tuple[Callable[..., Awaitable[None]], tuple[object, ...]]


class TaskPool:
    """As many tasks of a group as have had something to do at once; they end when the group is cancelled.

    What they do runs in the context of whoever was the first to have something done.

    Args:
        group: the group.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._idle: deque[asyncio.Future[_Work]] = deque()

    def start_soon(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Have `work(*args)` awaited by a task that has nothing to do; where it raises, the group ends with that."""
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():  # as one that was cancelled is
                idle.set_result((work, args))
                return
        self._group.start_soon(self._serve, work, args)

    async def _serve(self, work: Callable[..., Awaitable[None]] | None, args: tuple[object, ...]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert work is not None
            await work(*args)
            work, args = None, ()  # nothing is held of what is done
            if self._group.cancel_scope.cancel_called:
                return  # the cancellation may have come while `work` ended
            idle: asyncio.Future[_Work] = loop.create_future()
            self._idle.append(idle)
            work, args = await idle
