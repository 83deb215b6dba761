"""Cache entries as files that several processes read, write and remove at once.

An entry is written to a temporary file and renamed, so reading and writing need no lock. Lengths and CRCs detect
damage. The total size must be known to all processes: it is the length of the file `tally`, to which a process appends
one byte for each block that it adds. A process that holds the lock of `tally` recounts the entries and removes the
least recently used. An entry's modification time is its time of last use.

Each data set has a subfolder, which processes lock while they use the data set. Entries of a locked subfolder are not
removed: an epoch reads all samples equally often, so replacing one by another saves nothing, and least recently used
entries would be those that are needed next.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from headrace._util.reads import Span
from headrace.errors import printable
from headrace.fetch.threads import Threads
from headrace.types import Buffer

_BLOCK_BYTES = 4096
_TOUCH_S, _ABANDONED_S = 60.0, 3600.0
_ENTRY, _PART = ".range", ".part"
_IN_USE, _CLAIMS = "in_use", "claims"
_DATA_SET = re.compile("[0-9a-f]{16}")
_LOOK_S = 60.0  # interval of looking for other data sets
_FULL_S, _PATIENCE = 60.0, 20  # a full folder is checked again after 60 seconds, or 20 times the duration of a check
_MAGIC = b"HRcache1"
_PREFIX = struct.Struct("<8sII")  # magic and version; length of the header; CRC of the entry's name and the header


@dataclass(frozen=True, slots=True)
class Cached:
    data: bytes
    span: Span


class DamagedError(Exception): ...


class CacheFolder:
    """The entries on disk. Several threads may call `read` at once, but only one `write`.

    Args:
        clock: Seconds since 1970.
        data_set: Hex digits that identify the data set. "": none; its entries are replaced by last use.
    """

    def __init__(self, path: Path, limit_bytes: int, clock: Callable[[], float], data_set: str = "") -> None:
        self.path = path
        self._limit = limit_bytes // _BLOCK_BYTES  # in blocks
        self._clock = clock
        self._own = path / data_set
        self._others: tuple[float, Sequence[Path]] = 0.0, ()  # time of the search for other data sets' folders, result
        self._lock = threading.Lock()
        self._use: int | None = None  # descriptor that locks the own subfolder
        self._is_tried = self._is_closed = False
        self.claims = Claims(path / _CLAIMS)
        self._tidied = False
        self._full_until = 0.0

    @property
    def is_full(self) -> bool:
        """True if nothing can be written for some time, as all entries are in use."""
        return self._clock() < self._full_until

    def read(self, names: Sequence[str], *, claims: bool = False) -> tuple[Cached | None, bool]:
        """Return the first existing entry of `names`, and True if one was claimed instead.

        With `claims`, a missing entry is claimed under the first name, unless another process has it. So one process
        reads the entry from the store, and the others wait.

        Raises:
            DamagedError: the entry was damaged; it is removed.
            OSError: the disk is failing or not readable.
        """
        found = self._found(names)
        if found is not None or not claims or not self.claims.take(names[0]):
            return found, False
        try:
            found = self._found(names)  # another process may have written it meanwhile
        except BaseException:
            self.claims.give_back(names[0])
            raise
        if found is not None:
            self.claims.give_back(names[0])
        return found, found is None

    def write(self, name: str, span: Span, data: Buffer) -> bool:
        """Write or replace an entry. Return False if there is no room.

        Raises:
            OSError: the disk is full, failing or not writable.
        """
        head = json.dumps((span.start, span.stop, span.size, span.etag, zlib.crc32(data))).encode()
        head = _PREFIX.pack(_MAGIC, len(head), _check(name, head)) + head
        blocks = _blocks(len(head) + len(data))
        path = _place(self._own, name)
        self._make(path.parent)
        try:
            self._hold()
            with self._tally() as tally:
                if not self._make_room(tally, blocks):
                    return False
                os.write(tally, bytes(blocks))  # first: a kill in between must not leave too low a count
                self._add(path, head, data)
        except FileNotFoundError:  # the folder is being emptied
            return False
        return True

    def close(self) -> None:
        self.claims.close()
        with self._lock:
            self._is_closed = True
            if self._use is not None:
                os.close(self._use)
                self._use = None

    def _found(self, names: Sequence[str]) -> Cached | None:
        for folder in (self._own, *self._other_folders()):
            for name in names:
                found = self._read_in(folder, name)
                if found is None:
                    continue
                if folder != self._own:
                    self._adopt(folder, name)
                elif not self._is_tried:
                    self._is_tried = True
                    with suppress(OSError):  # not writable: nothing is removed
                        self._hold()
                return found
        return None

    def _read_in(self, folder: Path, name: str) -> Cached | None:
        path = _place(folder, name)
        try:
            with FileIO(open_own(path, os.O_RDONLY)) as file:
                status = os.fstat(file.fileno())
                found = _checked(file, name, status.st_size)
        except FileNotFoundError:
            return None
        except DamagedError:
            with suppress(OSError):
                path.unlink()
            raise
        now = self._clock()
        if now - status.st_mtime > _TOUCH_S:
            with suppress(OSError):  # not writable: the time of use is not stored
                os.utime(path, (now, now))
        return found

    def _other_folders(self) -> Sequence[Path]:
        looked_s, found = self._others
        if self._own != self.path and not 0 <= self._clock() - looked_s < _LOOK_S:
            found = [folder for folder in self._data_sets() if folder != self._own]
            self._others = self._clock(), found
        return found

    def _data_sets(self) -> list[Path]:
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return [self.path, *(Path(entry) for entry in entries if _DATA_SET.fullmatch(entry.name))]
        return []

    def _adopt(self, other: Path, name: str) -> None:
        place = _place(self._own, name)
        with suppress(OSError):
            self._make(place.parent)
            self._hold()  # before locking the other one: two processes may adopt from each other
            with _unused(other, self.path) as is_unused:
                if is_unused:
                    _place(other, name).rename(place)

    def _hold(self) -> None:
        with self._lock:
            while self._use is None and self._own != self.path and not self._is_closed:
                path = self._own / _IN_USE
                descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits briefly while another process removes entries
                    if os.path.samestat(os.fstat(descriptor), path.stat()):  # the folder was not removed meanwhile
                        self._use, descriptor = descriptor, -1
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)

    def _make(self, part: Path) -> None:
        above = [folder for folder in self.path.parents if not folder.exists()]
        for folder in (*reversed(above), self.path, self._own, part):
            folder.mkdir(mode=0o700, exist_ok=True)

    @staticmethod
    def _add(path: Path, head: bytes, data: Buffer) -> None:
        descriptor, temporary = tempfile.mkstemp(_PART, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
                file.write(head)
                file.write(data)
            Path(temporary).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise

    @contextmanager
    def _tally(self) -> Iterator[int]:
        descriptor = open_own(self.path / "tally", os.O_WRONLY | os.O_APPEND | os.O_CREAT, is_regular=False)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, tally: int, blocks: int) -> bool:
        if blocks > self._limit:
            return False
        if self._tidied and self._has_room(tally, blocks):
            return True
        if self.is_full:
            return False
        self._tidied = True
        try:
            fcntl.flock(tally, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing entries
            return self._has_room(tally, blocks)
        began = time.perf_counter()
        try:
            self._tidy(tally, blocks)
        finally:
            fcntl.flock(tally, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        has_room = self._has_room(tally, blocks)
        if not has_room:  # a scan of millions of entries takes seconds
            self._full_until = self._clock() + max(_FULL_S, _PATIENCE * (time.perf_counter() - began))
        return has_room

    def _has_room(self, tally: int, blocks: int) -> bool:
        return os.fstat(tally).st_size + blocks <= self._limit

    def _tidy(self, tally: int, blocks: int) -> None:
        before = os.fstat(tally).st_size
        abandoned = self._clock() - _ABANDONED_S
        total, times, sizes = 0, array("d"), array("q")  # numbers only: there may be millions
        with ExitStack() as locks:
            unused = [folder for folder in self._data_sets() if locks.enter_context(_unused(folder, self.path))]
            for folder in self._data_sets():
                for file, status in _files(folder):
                    if file.name.endswith(_ENTRY):
                        total += _blocks(status.st_size)
                        if folder in unused:
                            times.append(status.st_mtime)
                            sizes.append(_blocks(status.st_size))
                    elif file.name.endswith(_PART) and status.st_mtime < abandoned:
                        Path(file).unlink(missing_ok=True)
            if total + blocks > self._limit and sizes:
                excess = total - min(self._limit * 9 // 10, self._limit - blocks)
                order = np.argsort(times)
                sums = np.cumsum(np.asarray(sizes)[order])
                last = int(order[min(int(np.searchsorted(sums, excess)), len(order) - 1)])
                total -= _remove(unused, excess, times[last])
            for folder in unused:
                if folder != self.path and not any(_files(folder)):
                    shutil.rmtree(folder, ignore_errors=True)
        # Entries that other processes added meanwhile may be counted twice until the next scan.
        os.ftruncate(tally, total + max(0, os.fstat(tally).st_size - before))


@contextmanager
def _unused(folder: Path, root: Path) -> Iterator[bool]:
    """Yield True if no process uses the data set in `folder`. None can start inside the block."""
    if folder == root:  # entries of no data set
        yield True
        return
    descriptor, is_unused = -1, False
    with suppress(OSError):  # locked, another user's, or just gone
        descriptor = open_own(folder / _IN_USE, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_unused = True
    try:
        yield is_unused
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove(folders: Sequence[Path], excess: int, until: float) -> int:
    """Remove entries last used up to `until`, up to `excess` blocks. Return the number removed."""
    removed = 0
    for folder in folders:
        for file, status in _files(folder):
            if removed >= excess:
                return removed
            if file.name.endswith(_ENTRY) and status.st_mtime <= until:
                Path(file).unlink(missing_ok=True)
                removed += _blocks(status.st_size)
    return removed


def _files(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for part in sorted(folder.glob("[0-9a-f][0-9a-f]")):
        with os.scandir(part) as files:
            for file in files:
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield file, status


def _place(folder: Path, name: str) -> Path:
    return folder / name[:2] / f"{name[2:]}{_ENTRY}"


def _checked(file: FileIO, name: str, size: int) -> Cached:
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise DamagedError
    magic, length, check = _PREFIX.unpack(prefix)
    head = file.read(min(length, size))
    if magic != _MAGIC or _check(name, head) != check:
        raise DamagedError
    *fields, check = json.loads(head)
    span = Span(*fields)
    if size != _PREFIX.size + length + span.stop - span.start:
        raise DamagedError
    data = file.readall()
    if zlib.crc32(data) != check:
        raise DamagedError
    return Cached(data, span)


def _check(name: str, head: bytes) -> int:
    return zlib.crc32(head, zlib.crc32(name.encode()))


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES)


_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_DIGITS = 15  # of a name, as the byte to lock; names that share a byte wait for each other


def open_own(path: Path, flags: int, *, is_regular: bool = True) -> int:
    """Open or create a file of this user. With `is_regular`, refuse pipes and devices.

    Raises:
        PermissionError: the file belongs to another user except root, or others may write to it.
        OSError: the path is a symbolic link, or cannot be opened.
    """
    flags |= os.O_NONBLOCK if is_regular else 0
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    is_own = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_own and (stat.S_ISREG(status.st_mode) or not is_regular):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} may have been written by others: give a folder that this user alone can write to")


class Claims:
    """Locks by name, each held by at most one process of a machine until it exits. Thread-safe.

    They are Linux's open file description locks of single bytes of a file. Where these are missing (some network file
    systems, a read-only folder), each process gets every claim, so work may be duplicated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_closed = not hasattr(fcntl, "F_OFD_SETLK")

    def take(self, name: str) -> bool:
        """Return True if this process holds the claim, newly or already. `name`: a hex hash."""
        with self._lock, suppress(OSError):
            if self._descriptor is None and not self._is_closed:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._set(fcntl.F_WRLCK, name)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def give_back(self, name: str) -> None:
        with suppress(OSError):
            self._set(fcntl.F_UNLCK, name)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _set(self, kind: int, name: str) -> None:
        with self._lock:
            if self._descriptor is not None:
                order = _FLOCK.pack(kind, os.SEEK_SET, int(name[:_DIGITS], 16), 1, 0)
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, order)


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
