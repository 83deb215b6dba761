"""Iterators outlive event loops: one that was begun in a loop is gone on with in the next."""

from __future__ import annotations

import asyncio
from typing import Self

import anyio
import anyio.to_thread


class TaskLock:
    """Lets one task in at a time, of those of the event loop that runs.

    Each loop has a lock of its own: who was inside when a loop ended never comes out, and locks of asyncio's are of no
    use to trio.
    """

    def __init__(self) -> None:
        self._loop: object = None
        self._lock: anyio.Lock | None = None

    @property
    def here(self) -> anyio.Lock:
        """The lock of the loop that runs."""
        loop = running_loop()
        if self._lock is None or self._loop is not loop:
            self._loop, self._lock = loop, anyio.Lock()
        return self._lock


def running_loop() -> object:
    """What runs the current task."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from trio.lowlevel import current_trio_token

        return current_trio_token()


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs, where that is asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Closing:
    """What is closed behind a `with`, or an `async with`."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's loop."""
        await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
