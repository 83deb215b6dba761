"""A disk cache of byte ranges, shared by all processes of a machine."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from headrace._util.reads import Span
from headrace.errors import printable
from headrace.fetch.cache_folder import Cached, CacheFolder, DamagedError
from headrace.fetch.threads import Threads
from headrace.types import Buffer

__all__ = ["Cache", "Cached"]

_READING_THREADS = 3
_WAITING_BYTES = 64 * 2**20
_CLOSING_S = 5.0
_READING_S = 10.0
_OTHERS_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ESTALE)  # may be readable later

# Local files and in-memory objects differ between processes.
_REMOTE = re.compile(r"(?!file:|local:|memory:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# Parameters that identify a kind of signature, and the pattern of all its parameters. Other parameters (also `key=`
# and `token=`) may identify the object.
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
    """A disk cache of reads: returns the bytes of an earlier read or nothing, never an error.

    Correct for objects that do not change under their address, if all users of the folder mean the same objects by the
    same addresses. The folder stores the bytes, readable by its user only, but no addresses and no secrets. Local
    objects (files, `memory:`) are not cached.

    A folder that is not writable is only read; a folder that is not readable is not used. One RuntimeWarning reports
    this. Belongs to one event loop, which never waits for the disk.

    If the folder is full, entries of data sets in use are kept, and new entries are dropped. So in each epoch the part
    that fits comes from the folder, and the rest is read from the store.

    Args:
        limit_bytes: Maximum size of all entries, in blocks of 4 KiB. The least recently used of the entries that are
            not in use are removed first. Each process may exceed the limit by the entry that it writes.
        storage_options: Options of the stores. Other endpoints have other entries.
        data_set: Identifies the data set. "": none; entries of none are never in use.

    Attributes:
        damaged: Misses because the entry was damaged; it is removed.
        dropped: Entries not written: the disk is slow, full or failing, or the entry exceeds the limit.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        storage_options: Mapping[str, object] | None = None,
        *,
        data_set: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.hits = self.misses = self.damaged = self.written = self.dropped = 0
        name = hashlib.blake2b(data_set.encode(errors="surrogatepass"), digest_size=8).hexdigest() if data_set else ""
        self._folder = CacheFolder(Path(folder).expanduser().absolute(), limit_bytes, clock, name)
        self._endpoints = repr(sorted(_endpoints(storage_options or {})))
        self._readers = Threads("headrace-cache-reads", _READING_THREADS)
        # One thread: writes do not delay reads, and need no lock.
        self._writer = Threads("headrace-cache-writes", 1)
        self._waiting_bytes = 0
        self._begun: dict[str, asyncio.Future[None]] = {}  # reads from a store for this cache, by entry name
        self._writing: dict[str, asyncio.Future[bool]] = {}
        self._reads = self._writes = True
        self._closed = False

    async def get(self, url: str, start: int | None, stop: int | None, etag: str | None = None) -> Cached | None:
        """Return the entry of this range, or None if it is missing or not of version `etag`."""
        names = self._names(url, start, stop)
        if not names or not self._reads:
            return None
        return self._counted(await self._look(names), stop, etag)

    async def get_or_begin(
        self, url: str, start: int | None, stop: int | None, etag: str | None = None
    ) -> tuple[Cached | None, bool]:
        """Return the entry or None, and True if the caller must read the range and call `end`.

        Other readers of this machine wait at most 5 seconds for `end`.
        """
        names = self._names(url, start, stop)
        if not names or not self._reads:
            return None, False
        name = names[0]
        begun, keeps = self._begun.get(name), self._writes and not self._folder.is_full
        if begun is not None:
            await asyncio.wait([begun], timeout=_OTHERS_S)
        if begun is not None or not keeps:  # nothing is written, so other readers need not wait
            return await self.get(url, start, stop, etag), False
        until_s, pause_s = time.monotonic() + _OTHERS_S, _PAUSE_S
        self._begun[name] = asyncio.get_running_loop().create_future()
        is_ours = False
        try:
            while True:
                looked = await self._look(names, claims=True)
                is_ours = looked is not None and looked[1]
                if looked is None or looked[0] is not None or is_ours or time.monotonic() > until_s:
                    return self._counted(looked, stop, etag), is_ours
                await asyncio.sleep(pause_s)  # other processes cannot notify this one
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if not is_ours:
                self._begun.pop(name).set_result(None)

    def end(self, url: str, start: int | None, stop: int | None) -> None:
        """End a read that `get_or_begin` started. Waiting readers continue when its entry is ready."""
        name = self._names(url, start, stop)[0]
        writing = self._writing.get(name)
        if writing is None:
            self._end(name)
        else:
            writing.add_done_callback(lambda _: self._end(name))

    def _end(self, name: str) -> None:
        self._begun.pop(name).set_result(None)
        self._folder.claims.give_back(name)

    async def _look(self, names: Sequence[str], *, claims: bool = False) -> tuple[Cached | None, bool] | None:
        """Return (entry or None, whether this process claims the read); None if unreadable."""
        loop = asyncio.get_running_loop()
        look = self._readers.call(partial(self._folder.read, claims=claims), names)
        is_taken = False
        try:
            async with asyncio.timeout(_READING_S):
                found = await asyncio.shield(look)
            is_taken = True
            return found
        except DamagedError:
            self.damaged += 1
        except OSError as error:
            if error.errno not in _PASSING and self._reads:
                self._reads = self._writes = False
                loop.call_soon(self._warn, "is not used any more", error)
        finally:
            if not is_taken:
                look.add_done_callback(partial(self._let_go, names[0]))
        return None

    def _let_go(self, name: str, look: asyncio.Future[tuple[Cached | None, bool]]) -> None:
        if not look.cancelled() and look.exception() is None and look.result()[1]:
            self._folder.claims.give_back(name)

    def _counted(self, looked: tuple[Cached | None, bool] | None, stop: int | None, etag: str | None) -> Cached | None:
        found = None if looked is None else looked[0]
        if found is None or etag not in (None, found.span.etag):
            self.misses += 1
            return None
        self.hits += 1
        if stop is not None and found.span.stop > stop:  # the entry extends to the object's end
            return Cached(found.data[: stop - found.span.start], found.span._replace(stop=stop))
        return found

    async def put(self, url: str, start: int | None, stop: int | None, span: Span, data: Buffer) -> None:
        """Write `data` in the background. It is copied, so the caller may reuse the memory at once.

        At most 64 MiB wait to be written, or one larger read. Further entries are dropped.
        """
        names = self._names(url, start, stop)
        if not names:
            return
        size = memoryview(data).nbytes
        is_behind = self._waiting_bytes and self._waiting_bytes + size > _WAITING_BYTES
        if not self._writes or is_behind or self._folder.is_full:
            self.dropped += 1
            return
        if not isinstance(data, bytes):
            data = np.frombuffer(data, np.uint8).copy().data  # numpy copies without the GIL
        self._waiting_bytes += size
        is_to_end = span.start == (start or 0) and span.stop == span.size
        work = self._writer.call(self._folder.write, names[-1] if is_to_end else names[0], span, data)
        self._writing[names[0]] = work
        work.add_done_callback(partial(self._settle, names[0], size))

    async def flush(self) -> None:
        await self._writer.call(int)

    async def aclose(self) -> None:
        """Write waiting entries for at most five seconds, then close. May be called repeatedly."""
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
            self._folder.close()

    def _names(self, url: str, start: int | None, stop: int | None) -> Sequence[str]:
        """Return the entry names of the range, and of the range that extends to the object's end.

        Callers that read to the end of an object do not request the same `stop` each time. The names are hashes, so
        they do not reveal the address. Ranges that are not cached have no names.
        """
        if not _REMOTE.match(url):
            return ()
        stops = (stop,) if stop is None else (stop, None)
        texts = (f"{start or 0} {stop} {self._endpoints} {_identity(url)}" for stop in stops)
        return [hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest() for text in texts]

    def _settle(self, name: str, size: int, work: asyncio.Future[bool]) -> None:
        if self._writing.get(name) is work:
            del self._writing[name]
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
        warnings.warn(printable(text), RuntimeWarning, stacklevel=2)


def _identity(url: str) -> str:
    """Return the address without signature and credentials, which differ at each signing."""
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
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _endpoints(value)
        elif isinstance(value, str) and re.search("endpoint|url|host|account_name", name, re.IGNORECASE):
            yield name, value
