"""Entries of the cache as files, which several processes read, write and remove at once.

An entry is written to a temporary name and renamed, so reading and writing need no lock; lengths and CRCs tell what is
damaged. Only how much the folder holds must be known to all: it is the length of the file `tally`, to which a process
appends a byte for each block that it adds; whoever holds the lock of that file counts anew, and removes what was used
longest ago. An entry's time of change is the time of its last use.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from headrace.protocols import Span
from headrace.types import Buffer

_BLOCK_BYTES = 4096
_TOUCH_S, _ABANDONED_S = 60.0, 3600.0
_ENTRY, _PART = ".range", ".part"
_MAGIC = b"HRcache1"
_PREFIX = struct.Struct("<8sII")  # magic and version; length of the head; CRC of the entry's name and the head


@dataclass(frozen=True, slots=True)
class Cached:
    """What the cache has of a read.

    Attributes:
        data: the bytes.
        span: which bytes of which version of the object they are.
    """

    data: bytes
    span: Span


class DamagedError(Exception):
    """An entry is not what was written."""


class CacheFolder:
    """What is on the disk. `read` may be called by several threads at once, `write` by one."""

    def __init__(self, path: Path, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.path = path
        self._limit = limit_bytes // _BLOCK_BYTES  # in blocks
        self._clock = clock
        self._tidied = False

    def read(self, name: str) -> Cached | None:
        """The entry, if there is one, and note that it was used.

        Raises:
            DamagedError: it is not what was written; it is gone now.
            OSError: the disk is out of order or not to be read.
        """
        path = self._place(name)
        try:
            with path.open("rb", buffering=0) as file:
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
            with suppress(OSError):  # a folder that is only read has no order of use
                os.utime(path, (now, now))
        return found

    def write(self, name: str, span: Span, data: Buffer) -> bool:
        """Put an entry in place of any that is there; gives whether there is room for it.

        Raises:
            OSError: the disk is full, out of order or not to be written to.
        """
        head = json.dumps((span.start, span.stop, span.size, span.etag, zlib.crc32(data))).encode()
        head = _PREFIX.pack(_MAGIC, len(head), _check(name, head)) + head
        blocks = _blocks(len(head) + len(data))
        path = self._place(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with self._tally() as tally:
                if not self._make_room(tally, blocks):
                    return False
                os.write(tally, bytes(blocks))  # first: who is killed in between has counted too much, not too little
                self._add(path, head, data)
        except FileNotFoundError:  # somebody empties the folder at this moment
            return False
        return True

    def _place(self, name: str) -> Path:
        return self.path / name[:2] / f"{name[2:]}{_ENTRY}"

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
        descriptor = os.open(self.path / "tally", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, tally: int, blocks: int) -> bool:
        """Whether `blocks` more are within the limit, now that what was used longest ago is gone if need be."""
        if blocks > self._limit:
            return False
        if self._tidied and self._has_room(tally, blocks):
            return True
        self._tidied = True
        try:
            fcntl.flock(tally, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is at it
            return self._has_room(tally, blocks)
        try:
            self._tidy(tally, blocks)
        finally:
            fcntl.flock(tally, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
        return self._has_room(tally, blocks)

    def _has_room(self, tally: int, blocks: int) -> bool:
        return os.fstat(tally).st_size + blocks <= self._limit

    def _tidy(self, tally: int, blocks: int) -> None:
        """Count what is there; if `blocks` more are too many, remove down to nine tenths of the limit."""
        before = os.fstat(tally).st_size
        abandoned = self._clock() - _ABANDONED_S
        times, sizes = array("d"), array("q")  # numbers only: there may be millions
        for file, status in self._files():
            if file.name.endswith(_ENTRY):
                times.append(status.st_mtime)
                sizes.append(_blocks(status.st_size))
            elif file.name.endswith(_PART) and status.st_mtime < abandoned:
                Path(file).unlink(missing_ok=True)
        total = sum(sizes)
        if total + blocks > self._limit:
            excess = total - min(self._limit * 9 // 10, self._limit - blocks)
            order = np.argsort(times)
            last = order[np.searchsorted(np.cumsum(np.asarray(sizes)[order]), excess)]
            total -= self._remove(excess, times[last])
        # What others have added meanwhile may be counted twice, until the next time.
        os.ftruncate(tally, total + max(0, os.fstat(tally).st_size - before))

    def _remove(self, excess: int, until: float) -> int:
        """Remove entries not used after `until`, of `excess` blocks if there are as many; gives how many."""
        removed = 0
        for file, status in self._files():
            if removed >= excess:
                break
            if file.name.endswith(_ENTRY) and status.st_mtime <= until:
                Path(file).unlink(missing_ok=True)
                removed += _blocks(status.st_size)
        return removed

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for folder in sorted(self.path.glob("[0-9a-f][0-9a-f]")):
            with os.scandir(folder) as files:
                for file in files:
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield file, status


def _checked(file: FileIO, name: str, size: int) -> Cached:
    """The entry in `file`, if it is all there and all as it was written."""
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
