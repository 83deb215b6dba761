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

import fcntl
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from headrace._util.reads import Span
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
