"""Locations of sample files: memory, for one stream, or a folder, for all processes."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace._util.file_limits import memory_bytes
from headrace._util.shared_memory import anonymous_file
from headrace.sample_cache.file import SampleFile

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
        return SampleFile(fd, identity, count, _FixedRoom(most))


@dataclass(frozen=True)
class _FixedRoom:
    max_bytes: int

    def __call__(self, nbytes: int) -> int:
        return self.max_bytes


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
                room = _FolderRoom(self.path, file.name, self.max_bytes)
                return SampleFile(fd, identity, count, room, is_on_disk=True)
            self._begin(file, identity, count)
        raise OSError(f"{file} is another one whenever it is opened")

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


@dataclass(frozen=True)
class _FolderRoom:
    """Size limit of a file in a folder. Removes unused files if needed, oldest use first."""

    path: Path
    name: str
    max_bytes: int | None

    def __call__(self, nbytes: int) -> int:
        own, others = 0, list[tuple[float, int, str]]()
        for entry, status in self._files():
            if entry.name == self.name:
                own = status.st_size
            elif entry.name.endswith(_SUFFIX):
                others.append((status.st_mtime, status.st_size, entry.path))
            elif entry.name.endswith(_PART) and status.st_mtime < time.time() - _ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)
        taken = sum(size for _, size, _ in others)
        most = self.max_bytes
        if most is None:
            disk = os.statvfs(self.path)
            most = taken + own + disk.f_bavail * disk.f_frsize // _DISK_SHARE
        for _, size, path in sorted(others):
            if most - taken >= nbytes:
                break
            if _remove_unused(path):
                taken -= size
        return most - taken

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield entry, entry.stat(follow_symlinks=False)


def _remove_unused(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink()
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
