"""What data sets read with where no loader is running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.fetch import Reader
from headrace.options import FetchOptions
from headrace.protocols import Reads
from headrace.running import running_reader

_READS = 64  # at once


class OwnReaders:
    """Gives the running loader's reader, if it is for the same store; else one for each event loop that uses it.

    Args:
        storage_options: for the store.
        closing: awaited before a reader of ours is closed, on its loop.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None, closing: Callable[[], Awaitable[None]]) -> None:
        self._storage_options, self._closing = dict(storage_options or {}), closing
        self._shared: dict[asyncio.AbstractEventLoop, _SharedReader] = {}

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[Reads, None]:
        """The reader, which is also the one that is found to be running."""
        running = running_reader.get()
        if isinstance(running, Reader) and running.storage_options == self._storage_options:
            yield running
            return
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop] = _SharedReader(
                Reader(FetchOptions(), concurrency=_READS, storage_options=self._storage_options)
            )
        shared = self._shared[loop]
        shared.users += 1
        token = running_reader.set(shared.reader)
        try:
            yield shared.reader
        finally:
            running_reader.reset(token)
            shared.users -= 1
            if not shared.users:
                del self._shared[loop]
                await self._closing()
                await shared.reader.aclose()


@dataclass(slots=True)
class _SharedReader:
    """A reader, and how many use it."""

    reader: Reader
    users: int = 0
