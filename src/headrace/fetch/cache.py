"""What was read before, kept in a folder for all processes of a machine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from headrace.fetch.cache_folder import Cached, CacheFolder, DamagedError
from headrace.fetch.threads import Threads
from headrace.protocols import Span
from headrace.types import Buffer

__all__ = ["Cache", "Cached"]

_READING_THREADS = 3
_WAITING_BYTES = 64 * 2**20
_CLOSING_S = 5.0
_READING_S = 10.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ESTALE)  # another time it may be there

# Files, and what a process holds in its memory, are no other process's objects.
_REMOTE = re.compile(r"(?!file:|local:|memory:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# Parameters that tell the kind of a signature, and all that belong to it. Other parameters, `key=` and `token=` among
# them, may be what names the object.
_SIGNATURES = tuple(
    (frozenset(markers.split()), re.compile(parameters))
    for markers, parameters in (
        ("x-amz-signature", "x-amz-.*"),
        ("x-goog-signature", "x-goog-.*"),
        ("signature awsaccesskeyid", "signature|awsaccesskeyid|expires|x-amz-security-token"),
        ("signature googleaccessid", "signature|googleaccessid|expires"),
        ("signature key-pair-id", "signature|key-pair-id|expires|policy|hash-algorithm"),
        ("sig se sv", "sig|s[eprstv]|sdd|ses|sip|spr|srt|sk[estv]|scid|saoid|skoid|sktid|suoid"),
    )
)


class Cache:
    """What was read before, byte for byte as it was then, or nothing; never an error.

    It is right for objects that do not change under their name, and where all who use the folder mean the same objects
    by the same addresses. The folder has the bytes, for its user alone to read, but no address and no secret. Objects
    of this machine (files, `memory:`) are never kept.

    A folder that cannot be written to is only read from, one that cannot be read is left alone; a RuntimeWarning says
    so once. Belongs to one event loop, which never waits for the disk.

    Args:
        folder: made when it is first written to; other processes may use it at the same time.
        limit_bytes: what all entries together may take, in whole blocks of 4 KiB; what was used longest ago goes
            first. Each process may be over it by the one entry that it writes.
        storage_options: of the stores that are read: another endpoint has other entries.
        clock: seconds of the day, as the times of files are.

    Attributes:
        hits, misses: what `get` found and did not find.
        damaged: misses because the entry was not what had been written; it is removed.
        written: what `put` has kept.
        dropped: what `put` has not kept: the disk is too slow, full or out of order, or the entry over the limit.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        storage_options: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.hits = self.misses = self.damaged = self.written = self.dropped = 0
        self._folder = CacheFolder(Path(folder).expanduser().absolute(), limit_bytes, clock)
        self._endpoints = repr(sorted(_endpoints(storage_options or {})))
        self._readers = Threads("headrace-cache-reads", _READING_THREADS)
        # One thread: writes do not hold up reads, and need no lock among themselves.
        self._writer = Threads("headrace-cache-writes", 1)
        self._waiting_bytes = 0
        self._reads = self._writes = True
        self._closed = False

    async def get(self, url: str, start: int | None, stop: int | None, etag: str | None = None) -> Cached | None:
        """What was put for this address and range, unless it is of another version than `etag`; None without such."""
        name = self._name(url, start, stop)
        if name is None or not self._reads:
            return None
        found = None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_READING_S):
                found = await self._readers.call(self._folder.read, name)
        except DamagedError:
            self.damaged += 1
        except OSError as error:
            if error.errno not in _PASSING and self._reads:
                self._reads = self._writes = False
                loop.call_soon(self._warn, "is not used any more", error)
        if found is None or etag not in (None, found.span.etag):
            self.misses += 1
            return None
        self.hits += 1
        return found

    async def put(self, url: str, start: int | None, stop: int | None, span: Span, data: Buffer) -> None:
        """Keep `data`, soon: the caller waits for no disk, and may use the memory again at once (it is copied).

        At most 64 MiB wait to be written, or one read that is larger; what comes beyond that is dropped.
        """
        name = self._name(url, start, stop)
        if name is None:
            return
        size = memoryview(data).nbytes
        if not self._writes or (self._waiting_bytes and self._waiting_bytes + size > _WAITING_BYTES):
            self.dropped += 1
            return
        if not isinstance(data, bytes):
            data = np.frombuffer(data, np.uint8).copy().data  # numpy copies without the GIL
        self._waiting_bytes += size
        work = self._writer.call(self._folder.write, name, span, data)
        work.add_done_callback(partial(self._settle, size))

    async def flush(self) -> None:
        """Wait until all that was put is written or dropped."""
        await self._writer.call(int)

    async def aclose(self) -> None:
        """Write what waits, for five seconds at most, and let the threads go. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self.flush()
        finally:
            self._reads = self._writes = False
            for threads in (self._readers, self._writer):
                threads.close()

    def _name(self, url: str, start: int | None, stop: int | None) -> str | None:
        """A hash, from which nobody learns the address; None for what is not kept."""
        if not _REMOTE.match(url):
            return None
        text = f"{start or 0} {stop} {self._endpoints} {_identity(url)}"
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()

    def _settle(self, size: int, work: asyncio.Future[bool]) -> None:
        """A write has ended, well or not."""
        self._waiting_bytes -= size
        error = None if work.cancelled() else work.exception()
        if error is None and not work.cancelled() and work.result():
            self.written += 1
        else:
            self.dropped += 1
        if error is not None and self._writes:
            self._writes = False
            self._warn("keeps nothing more", error)

    def _warn(self, what: str, error: BaseException) -> None:
        text = f"the cache {self._folder.path} {what}; reads do without ({type(error).__name__}: {error})"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _identity(url: str) -> str:
    """The address without what only proves the right to read it, which is another one each time it is signed."""
    if not url.lower().startswith("http") or ("?" not in url and "@" not in url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    named = [(parameter.partition("=")[0].lower(), parameter) for parameter in parts.query.split("&")]
    for markers, belongs in _SIGNATURES:
        if markers <= {name for name, _ in named}:
            named = [(name, parameter) for name, parameter in named if not belongs.fullmatch(name)]
    query = "&".join(parameter for _, parameter in named)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))


def _endpoints(options: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The options that say which store an address means."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _endpoints(value)
        elif isinstance(value, str) and re.search("endpoint|url|host|account_name", name, re.IGNORECASE):
            yield name, value
