"""What data sets read with: the reader of the loader that is running, or else one of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.errors import StorageError
from headrace.fetch import Reader
from headrace.fetch.held import unwatched
from headrace.fetch.stores.addresses import split
from headrace.options import FetchOptions
from headrace.protocols import Reads, Version
from headrace.running import reader_here, running_loop, running_reader
from headrace.types import Listed

_READS = 64  # at once
_QUICK = FetchOptions(attempts=2)  # what cannot be read is said to be missing


async def read(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes [start, stop) of the object at `url`; all of it without a range.

    Inside a loader the read goes through the loader's fetch stage and counts there; elsewhere it has connections of
    its own, which end with it: for many reads outside a loader keep one `Reader`.

    Raises:
        StorageError: the read failed for good; the message names the address, the range and the attempts.
        OptionError: no store knows the address's scheme.
    """
    running = reader_here()
    if running is None:
        return await read_from(None, url, start, stop)
    return await unwatched(running.read(url, start, stop))


async def read_from(
    storage_options: Mapping[str, object] | None,
    url: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    version: Version | None = None,
) -> bytes:
    """The same, of one version of the object; outside a loader with these settings for the store."""
    running = reader_here()
    if running is not None:
        return await unwatched(running.read(url, start, stop, version=version))
    async with Reader(FetchOptions(), concurrency=1, storage_options=dict(storage_options or {})) as reader:
        return await reader.read(url, start, stop, version=version)


async def found(url: str, count: int | None, storage_options: Mapping[str, object] | None) -> bytes | None:
    """The first bytes of an object, or all of it; None where it cannot be read. No loader need run.

    Args:
        count: how many; negative: so many of the last ones; None: all.
    """
    async with Reader(_QUICK, concurrency=1, storage_options=dict(storage_options or {})) as reader:
        try:
            if count is not None and count < 0:
                span = await reader.read_into(url, 0, memoryview(bytearray(1)))
                return await reader.read(url, max(0, span.size + count), span.size)
            return await reader.read(url, *(() if count is None else (0, count)))
        except (StorageError, OSError):
            return None


async def listed(
    folder: str, levels: int | None, storage_options: Mapping[str, object] | None
) -> AsyncGenerator[Sequence[Listed], None]:
    """The objects below a folder, by their addresses, a page after the other. No loader need run.

    Raises:
        OptionError: its store cannot say what it has.
        StorageError, OSError: it did not.
    """
    async with Reader(FetchOptions(), concurrency=1, storage_options=dict(storage_options or {})) as reader:
        async for page in reader.listing(folder, levels=levels):
            yield page


def as_listed(folder: str) -> str:
    """A folder as the addresses of what is listed in it begin: one of `file://` as the path that it is."""
    scheme, _, path = split(folder)
    return path if scheme == "file" else folder


async def pinned(folder: str, storage_options: Mapping[str, object] | None) -> str | None:
    """The folder at the revision that it is now; None where it has none, or its store does not say it.

    Raises:
        StorageError, OSError: the store failed.
    """
    async with Reader(FetchOptions(), concurrency=1, storage_options=dict(storage_options or {})) as reader:
        return await reader.pinned(folder)


class OwnReaders:
    """Gives the running loader's reader, if it is for the same store; else one for each event loop that uses it.

    Args:
        storage_options: for the store.
        closing: awaited before a reader of ours is closed, on its loop.
    """

    def __init__(self, storage_options: Mapping[str, object] | None, closing: Callable[[], Awaitable[None]]) -> None:
        self._storage_options, self._closing = dict(storage_options or {}), closing
        self._shared: dict[asyncio.AbstractEventLoop, _SharedReader] = {}

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[Reads, None]:
        """The reader, which is also the one that is found to be running."""
        running = reader_here()
        if running is not None and running.storage_options == self._storage_options:
            yield running
            return
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop] = _SharedReader(
                Reader(FetchOptions(), concurrency=_READS, storage_options=self._storage_options)
            )
        shared = self._shared[loop]
        shared.users += 1
        token, of_loop = running_reader.set(shared.reader), running_loop.set(loop)
        try:
            yield shared.reader
        finally:
            running_reader.reset(token)
            running_loop.reset(of_loop)
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
