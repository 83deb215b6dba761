"""Reusable tasks: starting one takes longer than most of their work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from anyio.abc import TaskGroup

_Work = tuple[Callable[..., Awaitable[None]], tuple[object, ...]]


class TaskPool:
    """A pool of tasks of a group, which grows as needed. Tasks end when the group is cancelled.

    A task runs all its work in the context of the caller that it was started for.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._idle: deque[asyncio.Future[_Work]] = deque()

    def start_soon(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Await `work(*args)` in an idle task or a new one. An exception ends the group."""
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():  # a cancelled task's future is done
                idle.set_result((work, args))
                return
        self._group.start_soon(self._serve, work, args)

    async def _serve(self, work: Callable[..., Awaitable[None]] | None, args: tuple[object, ...]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert work is not None
            await work(*args)
            work, args = None, ()  # drop references to finished work
            if self._group.cancel_scope.cancel_called:
                return  # the cancellation may have come while `work` ended
            idle: asyncio.Future[_Work] = loop.create_future()
            self._idle.append(idle)
            work, args = await idle
