"""Locks and closing for iterators that outlive event loops."""

from __future__ import annotations

import asyncio
from typing import Self

import anyio
import anyio.to_thread


class TaskLock:
    """A lock for the tasks of the running event loop.

    Each loop gets a new lock. A task that held the old one when its loop ended never releases it, and trio cannot use a
    lock of asyncio.
    """

    def __init__(self) -> None:
        self._loop: object = None
        self._lock: anyio.Lock | None = None

    @property
    def here(self) -> anyio.Lock:
        loop = running_loop()
        if self._lock is None or self._loop is not loop:
            self._loop, self._lock = loop, anyio.Lock()
        return self._lock


def running_loop() -> object:
    """Return the event loop of the current task: asyncio's loop, or trio's token."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from trio.lowlevel import current_trio_token

        return current_trio_token()


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Closing:
    """Mixin: an object that `with` and `async with` close."""

    def close(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
