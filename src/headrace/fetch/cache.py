"""What was read before, kept in a folder for all processes of a machine."""

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

from headrace.errors import printable
from headrace.fetch.cache_folder import Cached, CacheFolder, DamagedError
from headrace.fetch.threads import Threads
from headrace.protocols import Span
from headrace.types import Buffer

__all__ = ["Cache", "Cached"]

_READING_THREADS = 3
_WAITING_BYTES = 64 * 2**20
_CLOSING_S = 5.0
_READING_S = 10.0
_OTHERS_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
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

    Where the folder is full, nothing of a data set that some process uses is removed for the sake of what comes; what
    has no room is read again in each epoch. So of an epoch as much comes from the folder as fits in.

    Args:
        folder: made when it is first written to; other processes may use it at the same time.
        limit_bytes: what all entries together may take, in whole blocks of 4 KiB; of what is not in use, that which was
            used longest ago goes first. Each process may be over it by the one entry that it writes.
        storage_options: of the stores that are read: another endpoint has other entries.
        data_set: tells the data set that is read from others; "": none, whose entries are never in use.
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
        data_set: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.hits = self.misses = self.damaged = self.written = self.dropped = 0
        name = hashlib.blake2b(data_set.encode(errors="surrogatepass"), digest_size=8).hexdigest() if data_set else ""
        self._folder = CacheFolder(Path(folder).expanduser().absolute(), limit_bytes, clock, name)
        self._endpoints = repr(sorted(_endpoints(storage_options or {})))
        self._readers = Threads("headrace-cache-reads", _READING_THREADS)
        # One thread: writes do not hold up reads, and need no lock among themselves.
        self._writer = Threads("headrace-cache-writes", 1)
        self._waiting_bytes = 0
        self._begun: dict[str, asyncio.Future[None]] = {}  # by name, what is read from a store to be put here
        self._writing: dict[str, asyncio.Future[bool]] = {}
        self._reads = self._writes = True
        self._closed = False

    async def get(self, url: str, start: int | None, stop: int | None, etag: str | None = None) -> Cached | None:
        """What was put for this address and range, unless it is of another version than `etag`; None without such."""
        names = self._names(url, start, stop)
        if not names or not self._reads:
            return None
        return self._counted(await self._look(names), stop, etag)

    async def get_or_begin(
        self, url: str, start: int | None, stop: int | None, etag: str | None = None
    ) -> tuple[Cached | None, bool]:
        """The same, for who is going to read it from the store where it is not here; and whether to `end` that.

        Until then other readers of this machine wait here for what is put, for 5 seconds at the most.
        """
        names = self._names(url, start, stop)
        if not names or not self._reads:
            return None, False
        name = names[0]
        begun, keeps = self._begun.get(name), self._writes and not self._folder.is_full
        if begun is not None:
            await asyncio.wait([begun], timeout=_OTHERS_S)
        if begun is not None or not keeps:  # who keeps nothing has nobody wait for it
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
                await asyncio.sleep(pause_s)  # no other process can tell when it is done
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if not is_ours:
                self._begun.pop(name).set_result(None)

    def end(self, url: str, start: int | None, stop: int | None) -> None:
        """What was begun was read, or has failed; where it was put, others wait until it is written."""
        name = self._names(url, start, stop)[0]
        writing = self._writing.get(name)
        if writing is None:
            self._end(name)
        else:
            writing.add_done_callback(lambda _: self._end(name))

    def _end(self, name: str) -> None:
        self._begun.pop(name).set_result(None)
        self._folder.unclaim(name)

    async def _look(self, names: Sequence[str], *, claims: bool = False) -> tuple[Cached | None, bool] | None:
        """(the entry, whether nobody else begins to read it); None where the folder does not say."""
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
        """Nobody has waited for what was looked for."""
        if not look.cancelled() and look.exception() is None and look.result()[1]:
            self._folder.unclaim(name)

    def _counted(self, looked: tuple[Cached | None, bool] | None, stop: int | None, etag: str | None) -> Cached | None:
        found = None if looked is None else looked[0]
        if found is None or etag not in (None, found.span.etag):
            self.misses += 1
            return None
        self.hits += 1
        if stop is not None and found.span.stop > stop:  # it goes to the object's end
            return Cached(found.data[: stop - found.span.start], found.span._replace(stop=stop))
        return found

    async def put(self, url: str, start: int | None, stop: int | None, span: Span, data: Buffer) -> None:
        """Keep `data`, soon: the caller waits for no disk, and may use the memory again at once (it is copied).

        At most 64 MiB wait to be written, or one read that is larger; what comes beyond that is dropped.
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
            self._folder.close()

    def _names(self, url: str, start: int | None, stop: int | None) -> Sequence[str]:
        """Of what has the range: itself, and all from its start to the object's end; nothing where it is not kept.

        How much is asked for beyond an object's end is another time another number. They are hashes, from which nobody
        learns the address.
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
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _endpoints(value)
        elif isinstance(value, str) and re.search("endpoint|url|host|account_name", name, re.IGNORECASE):
            yield name, value
