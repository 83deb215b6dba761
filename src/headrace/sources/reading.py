"""Reads of data sets: by the running loader's reader, or by a separate one."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace._util.context import reader_here, running_loop, running_reader
from headrace._util.reads import Reads, Version
from headrace.errors import StorageError
from headrace.fetch import Reader
from headrace.fetch.meter import unwatched
from headrace.fetch.stores.addresses import split
from headrace.options import Fetch
from headrace.types import Listed

Options = Mapping[str, object] | None

_READS = 64  # at once
_QUICK = Fetch(attempts=2)  # unreadable objects are reported as missing


def _reader(storage_options: Options, options: Fetch | None = None) -> Reader:
    return Reader(options, concurrency=1, storage_options=storage_options)


async def read(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Read bytes [start, stop) of the object at `url`; all of it without a range.

    Inside a loader the read goes through the loader's fetch stage and counts there. Elsewhere it opens its own
    connections, which end with it. For many reads outside a loader keep one `Reader`.

    Raises:
        StorageError: the read failed for good; the message names the address, the range and the attempts.
        OptionError: no store supports the scheme of the address.
    """
    running = reader_here()
    if running is None:
        return await read_from(None, url, start, stop)
    return await unwatched(running.read(url, start, stop))


async def read_from(
    storage_options: Options,
    url: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    version: Version | None = None,
) -> bytes:
    """Read one version of the object. Outside a loader `storage_options` apply."""
    running = reader_here()
    if running is not None:
        return await unwatched(running.read(url, start, stop, version=version))
    async with _reader(storage_options) as reader:
        return await reader.read(url, start, stop, version=version)


async def found(url: str, count: int | None, storage_options: Options) -> bytes | None:
    """Read the start of an object, or all of it. None if it cannot be read. Needs no loader.

    Args:
        count: Number of bytes. None: all.
    """
    async with _reader(storage_options, _QUICK) as reader:
        try:
            return await reader.read(url, *(() if count is None else (0, count)))
        except (StorageError, OSError):
            return None


async def listed(folder: str, levels: int | None, storage_options: Options) -> AsyncGenerator[Sequence[Listed], None]:
    """List the objects in a folder by address, page by page. Needs no loader."""
    async with _reader(storage_options) as reader:
        async for page in reader.listing(folder, levels=levels):
            yield page


def number_of(key: int, count: int, what: str) -> int:
    """Return the number of one of `count` items. `key` may be negative."""
    try:
        return range(count)[operator.index(key)]
    except IndexError:
        raise IndexError(f"there is no {what} {key}: there are {count}") from None


def is_file(url: str) -> bool:
    """True for a path or a `file:` address."""
    return split(url)[0] == "file"


def as_listed(folder: str) -> str:
    """Return the prefix of the addresses listed in a folder: for `file://` the path."""
    scheme, _, path = split(folder)
    return path if scheme == "file" else folder


async def pinned(folder: str, storage_options: Options) -> str | None:
    """Return the folder at its current revision. None without revisions."""
    async with _reader(storage_options) as reader:
        return await reader.pinned(folder)


class OwnReaders:
    """Provides the running loader's reader if its store options match, else one per event loop.

    `closing`, if given, is awaited on the loop before an own reader is closed.
    """

    def __init__(self, storage_options: Options, closing: Callable[[], Awaitable[None]] | None = None) -> None:
        self._storage_options, self._closing = dict(storage_options or {}), closing
        self._shared: dict[asyncio.AbstractEventLoop, _SharedReader] = {}

    @asynccontextmanager
    async def use(self) -> AsyncGenerator[Reads, None]:
        """Yield the reader, and make it the running one."""
        running = reader_here()
        if running is not None and running.storage_options == self._storage_options:
            yield running
            return
        loop = asyncio.get_running_loop()
        if loop not in self._shared:
            self._shared[loop] = _SharedReader(Reader(concurrency=_READS, storage_options=self._storage_options))
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
                if self._closing is not None:
                    await self._closing()
                await shared.reader.aclose()


@dataclass(slots=True)
class _SharedReader:
    reader: Reader
    users: int = 0
