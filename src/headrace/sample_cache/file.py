"""Samples in one file, by number, which several processes read and extend concurrently.

A file has a header, a table with an entry for each number, and the added pieces. Each piece is appended by one call,
which the system does not interleave with others, and its entry is written last. So an existing entry refers to a
complete piece, and a killed process leaves only unused bytes. The checksums of entries and pieces include the number
and the file's identity. Anything else is ignored.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import crc32c_of
from headrace._util.shared_memory import anonymous_file, memory_bytes, receive_descriptor, send_descriptor
from headrace.types import Buffer

_MAGIC = b"HRkept01"
_HEAD = struct.Struct("<8s32sQ")  # magic and version; identity; number of samples
_ENTRY = struct.Struct("<QQII")  # start and size of the piece; its checksum; the entry's checksum


class NotAtOnceError(Exception): ...


class SampleFile:
    """A file of samples. Thread-safe.

    Its size may exceed the limit by the piece that each process is writing.

    Args:
        fd: A file prepared by `begin`. Owned and closed by this object.
        identity: 32 bytes that identify these samples.
        room: Returns the file's size limit, called if the last one is too low. It is also sent to workers.
        is_on_disk: True if reading may be slow.
    """

    def __init__(
        self, fd: int, identity: bytes, count: int, room: Callable[[int], int], *, is_on_disk: bool = False
    ) -> None:
        self._fd, self.identity, self.count, self._room = fd, identity, count, room
        self.is_on_disk = is_on_disk
        self._limit = 0  # last result of `room`
        # Opened again for its own file position, which gives the offset of an added piece.
        self._end = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._adding = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (send_descriptor(self._fd), self.identity, self.count, self._room)

    @staticmethod
    def begin(fd: int, identity: bytes, count: int) -> None:
        os.pwrite(fd, _HEAD.pack(_MAGIC, identity, count), 0)
        os.ftruncate(fd, table_end(count))

    @staticmethod
    def is_of(fd: int, identity: bytes, count: int) -> bool:
        """True if the file was created for these samples and has a complete table."""
        is_whole = os.fstat(fd).st_size >= table_end(count)
        return is_whole and os.pread(fd, _HEAD.size, 0) == _HEAD.pack(_MAGIC, identity, count)

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def has_room(self, nbytes: int) -> bool:
        if nbytes > self._limit:
            self._limit = self._room(nbytes)
        return nbytes <= self._limit

    def read(self, number: int, *, flags: int = 0) -> NDArray[np.uint8] | None:
        """Return the piece of a number; None if missing or damaged. `flags` are for `os.preadv`.

        Raises:
            NotAtOnceError: with RWF_NOWAIT, it would have to wait for a disk.
        """
        entry = self._entry(number)
        if entry is None:
            return None
        offset, size, checksum = entry
        if offset + size > self.nbytes:
            return None
        data = np.empty(size, np.uint8)
        try:
            if size and os.preadv(self._fd, [data.data], offset, flags) != size:
                raise BlockingIOError
        except BlockingIOError:
            if flags:
                raise NotAtOnceError from None
            return None
        except OSError:  # the disk is failing
            return None
        return data if crc32c_of(data.data) == checksum else None

    def add(self, number: int, data: Buffer) -> bool:
        """Store or replace the piece of a number. Return False if there is no room."""
        size = memoryview(data).nbytes
        if not self.has_room(self.nbytes + size):
            return False
        with self._adding:
            if os.write(self._end, data) != size:  # the disk is full
                return False
            offset = os.lseek(self._end, 0, os.SEEK_CUR) - size
        entry = self._packed(number, offset, size, crc32c_of(data))
        return os.pwrite(self._fd, entry, _HEAD.size + number * _ENTRY.size) == len(entry)

    def __contains__(self, number: int) -> bool:
        return self._entry(number) is not None

    def _entry(self, number: int) -> tuple[int, int, int] | None:
        try:
            packed = os.pread(self._fd, _ENTRY.size, _HEAD.size + number * _ENTRY.size)
        except OSError:
            return None
        if len(packed) != _ENTRY.size:
            return None
        offset, size, checksum, _ = _ENTRY.unpack(packed)
        return (offset, size, checksum) if packed == self._packed(number, offset, size, checksum) else None

    def _packed(self, number: int, offset: int, size: int, checksum: int) -> bytes:
        own = _ENTRY.pack(offset, size, checksum, 0)
        return own[:-4] + struct.pack("<I", crc32c_of(b"%d %b %b" % (number, own, self.identity)))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at interpreter exit `os` is cleared first
        for fd in (self._fd, getattr(self, "_end", -1)):
            if fd >= 0:
                close(fd)


def table_end(count: int) -> int:
    return _HEAD.size + count * _ENTRY.size


def _received(number: int, identity: bytes, count: int, room: Callable[[int], int]) -> SampleFile:
    return SampleFile(receive_descriptor(number), identity, count, room)


_SUFFIX, _PART = ".samples", ".part"
_ABANDONED_S = 3600.0
_MEMORY_SHARE, _DISK_SHARE = 4, 2  # default limit: the machine's memory, or the disk's free bytes, divided by this
_ATTEMPTS = 100


@dataclass(frozen=True)
class MemoryPlace:
    """The memory of this process and its workers. Each file is new.

    Attributes:
        max_bytes: Limit for all workers together. None: a quarter of the machine's memory.
    """

    max_bytes: int | None
    is_shared = False  # with other and later processes

    def __str__(self) -> str:
        return "memory"

    def open(self, identity: bytes, count: int) -> SampleFile:
        """Create the file of `count` samples. An OSError if that fails."""
        most = memory_bytes() // _MEMORY_SHARE if self.max_bytes is None else self.max_bytes
        fd = anonymous_file()
        try:
            SampleFile.begin(fd, identity, count)
        except BaseException:
            os.close(fd)
            raise
        return SampleFile(fd, identity, count, lambda _: most)


@dataclass(frozen=True)
class FolderPlace:
    """A folder. An open file is locked, so that other processes do not remove it to make room.

    Attributes:
        path: Created if needed.
        max_bytes: Limit of all its files. None: half of the disk's free bytes, plus the files.
    """

    path: Path
    max_bytes: int | None
    is_shared = True

    def __str__(self) -> str:
        return repr(str(self.path))

    def open(self, identity: bytes, count: int) -> SampleFile:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.path / f"{identity.hex()[:40]}{_SUFFIX}"
        for _ in range(_ATTEMPTS):
            fd = self._opened(file, identity, count)
            if fd is not None:
                os.utime(fd)
                room = partial(_folder_room, self.path, file.name, self.max_bytes)
                return SampleFile(fd, identity, count, room, is_on_disk=True)
            self._begin(file, identity, count)
        raise OSError(f"{file} changes each time it is opened")

    @staticmethod
    def _opened(file: Path, identity: bytes, count: int) -> int | None:
        """Open and lock the file; None if it is missing, or was damaged and is removed."""
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(f"{file} is another user's: what is kept there is loaded as pickles")
            fcntl.flock(fd, fcntl.LOCK_SH)
            is_whole = SampleFile.is_of(fd, identity, count)
            with suppress(FileNotFoundError):  # another process may have removed it before it was locked
                if not is_whole:
                    file.unlink()
                elif os.path.samestat(os.fstat(fd), file.stat()):
                    opened, fd = fd, -1
                    return opened
            return None
        finally:
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def _begin(file: Path, identity: bytes, count: int) -> None:
        fd, temporary = tempfile.mkstemp(_PART, dir=file.parent)
        try:
            SampleFile.begin(fd, identity, count)
            with suppress(FileExistsError):
                os.link(temporary, file)
        finally:
            os.close(fd)
            Path(temporary).unlink()


def _folder_room(folder: Path, name: str, most: int | None, nbytes: int) -> int:
    """Return the size limit of a file in a folder. Remove unused files if needed, oldest use first."""
    own, others = 0, list[tuple[float, int, Path]]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.lstat()
            if path.name == name:
                own = status.st_size
            elif path.name.endswith(_SUFFIX):
                others.append((status.st_mtime, status.st_size, path))
            elif path.name.endswith(_PART) and status.st_mtime < time.time() - _ABANDONED_S:
                path.unlink()
    taken = sum(size for _, size, _ in others)
    if most is None:
        disk = os.statvfs(folder)
        most = taken + own + disk.f_bavail * disk.f_frsize // _DISK_SHARE
    for _, size, path in sorted(others):
        if most - taken >= nbytes:
            break
        if _remove_unused(path):
            taken -= size
    return most - taken


def _remove_unused(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


KeepingPlace = MemoryPlace | FolderPlace


def place_of(place: str | os.PathLike[str] | None, max_bytes: int | None) -> KeepingPlace:
    if place is None:
        return MemoryPlace(max_bytes)
    return FolderPlace(Path(place).expanduser().absolute(), max_bytes)
