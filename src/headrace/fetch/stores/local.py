"""Local files, read in threads, as file systems have no asynchronous reads."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Self

from headrace._util.reads import check_match, clamped
from headrace.errors import AccessDeniedError, ObjectChangedError, ObjectMissingError, StorageError, masked
from headrace.fetch.threads import Threads
from headrace.types import Answer, Buffer, Listed

_THREADS = 8
# A range up to this size is read with the answer, by one call in a thread. Longer ones are copied in such pieces, which
# fit in the processor's cache.
_PIECE_BYTES = 256 * 1024
# O_NONBLOCK: opening a FIFO would block the thread until there is a writer.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

OpenFile = Callable[[str | None], tuple[int, int, str]]
"""Opens a file, which must have the given version. Returns its descriptor (owned by the caller), size and version."""


class LocalStore:
    is_local = gives_ends = True

    def __init__(self) -> None:
        self._threads = Threads("headrace-files", _THREADS)

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`. The version is made from the file's modification time and size.

        It does not contain the inode, as a mounted bucket may give an unchanged file another one each time. The inode
        must not change while one answer is read.
        """
        return await answer_from(self._threads, _File(path).open, start, stop, if_match)

    async def get_each(self, ranges: Sequence[tuple[str, str | None, tuple[int, int]]]) -> list[tuple[int, bytes]]:
        """Return the size of the file and the bytes of each range, given by path, version and range."""
        return await self._threads.call(_read_each, ranges)

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        folders: list[tuple[str, tuple[tuple[int, int], ...]]] = [(prefix, ())]
        while folders:
            folder, above = folders.pop()
            files, inner, this = await self._threads.call(_entries, folder, above)
            if files:
                yield files
            if levels is None or len(above) + 1 < levels:
                folders += [(name, (*above, this)) for name in inner]

    async def aclose(self) -> None:
        self._threads.close()


async def answer_from(
    threads: Threads, opened: OpenFile, start: int | None, stop: int | None, if_match: str | None
) -> Answer:
    """Return a range of a file. Each read opens the file, so abandoned answers hold nothing."""
    first, last, size, etag, head = await threads.call(_begin, opened, start or 0, stop, if_match)
    return Answer(first, last, size, etag, _Body(threads, opened, etag, first, last, head))


def _begin(opened: OpenFile, start: int, stop: int | None, if_match: str | None) -> tuple[int, int, int, str, bytes]:
    descriptor, size, etag = opened(if_match)
    try:
        first, last = clamped(start, stop, size)
        head = os.pread(descriptor, last - first, first) if last - first <= _PIECE_BYTES else b""
        return first, last, size, etag, head
    finally:
        os.close(descriptor)


def _read_each(ranges: Sequence[tuple[str, str | None, tuple[int, int]]]) -> list[tuple[int, bytes]]:
    read = list[tuple[int, bytes]]()
    for (path, etag), some in groupby(ranges, itemgetter(0, 1)):
        descriptor, size, _ = _File(path).open(etag)
        try:
            spans = [span for _, _, span in some]
            for start, stop in spans if hasattr(os, "posix_fadvise") else ():  # then a disk serves all of them at once
                os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
            read += [(size, os.pread(descriptor, stop - start, start)) for start, stop in spans]
        finally:
            os.close(descriptor)
    return read


class _Body:
    def __init__(self, threads: Threads, opened: OpenFile, etag: str, position: int, last: int, head: bytes) -> None:
        self._threads, self._opened, self._etag = threads, opened, etag
        self._position, self._last, self._head = position, last, memoryview(head)
        self._writing = threading.Lock()
        self.received = 0

    async def read_into(self, target: memoryview) -> int:
        """See `Fills.read_into`. After a cancelled call `target` is not written to."""
        if self._head:
            piece, self._head = self._head[: len(target)], self._head[len(target) :]
            target[: len(piece)] = piece
            self._count(len(piece))
            return len(piece)
        before = self.received
        room = [target[: self._last - self._position]]
        try:
            if room[0]:
                await self._threads.call(self._fill, room)
        finally:
            # The thread may hang in its read. When it returns, it finds no memory to write to.
            with self._writing:
                room.clear()
        return self.received - before

    def _fill(self, room: list[memoryview]) -> None:
        descriptor = self._opened(self._etag)[0]
        try:
            while piece := os.pread(descriptor, min(_PIECE_BYTES, self._left(room)), self._position):
                with self._writing:
                    if not room:
                        return
                    room[0][: len(piece)] = piece
                    room[0] = room[0][len(piece) :]
                    self._count(len(piece))
        finally:
            os.close(descriptor)

    def _left(self, room: list[memoryview]) -> int:
        with self._writing:
            return len(room[0]) if room else 0

    def _count(self, nbytes: int) -> None:
        self._position += nbytes
        self.received += nbytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Buffer:
        piece = memoryview(bytearray(min(_PIECE_BYTES, self._last - self._position)))
        count = await self.read_into(piece)
        if not count:
            raise StopAsyncIteration
        return piece[:count]

    async def aclose(self) -> None:
        """Do nothing: no file is open."""


def _entries(folder: str, above: tuple[tuple[int, int], ...]) -> tuple[list[Listed], list[str], tuple[int, int]]:
    """Return (files, folders, identity) of a folder; none if the folder is one of `above`."""
    files: list[Listed] = []
    inner: list[str] = []
    try:
        status = Path(folder or ".").stat()
        this = status.st_dev, status.st_ino
        if this in above:
            return [], [], this
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                if entry.is_dir():
                    inner.append(f"{folder}{entry.name}/")
                else:
                    files.append(_listed(f"{folder}{entry.name}", entry))
    except (FileNotFoundError, NotADirectoryError):
        return [], [], (0, 0)
    except PermissionError as error:
        raise AccessDeniedError("this user may not list the folder", url=folder) from error
    return files, inner, this


def _listed(path: str, entry: os.DirEntry[str]) -> Listed:
    try:
        status = entry.stat()
    except FileNotFoundError:  # a dangling link, or removed since; reading it fails
        return Listed(path)
    return Listed(path, status.st_size, _version_of(status))


def _version_of(status: os.stat_result) -> str:
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


class _File:
    def __init__(self, path: str) -> None:
        self._path = path
        self._number: int | None = None

    def open(self, if_match: str | None) -> tuple[int, int, str]:
        descriptor, status = _open(self._path)
        try:
            etag = _version_of(status)
            check_match(if_match, etag, self._path)
            if self._number not in (None, status.st_ino):
                raise ObjectChangedError("the file changed: another has come in its place", url=self._path)
            self._number = status.st_ino
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status.st_size, etag


def _open(path: str) -> tuple[int, os.stat_result]:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        failure = _failure(error, path)
        if failure is None:
            raise
        # The system's error has the whole path, which may be a misspelled address with a secret.
        raise failure from (error if masked(path) == path else None)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ObjectMissingError("this is a folder, not a file", url=path)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissingError(
                "this is a pipe, a socket or a device, not a file; what a command prints is read by pipe:", url=path
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _failure(error: OSError, path: str) -> StorageError | None:
    if isinstance(error, PermissionError):
        return AccessDeniedError("this user may not read the file", url=path)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectMissingError(_missing(path) if masked(path) == path else "there is no such file", url=path)
    return None


def _missing(path: str) -> str:
    """Report which part of `path` is missing. A forgotten mount differs from a misspelled name."""
    whole = Path.cwd() / path
    if whole.parent.is_dir():
        return f"the folder {whole.parent} has no file {whole.name}"
    missing = whole.parent
    while not missing.parent.exists():
        missing = missing.parent
    if missing.exists():
        return f"{missing} is no folder"
    return f"the folder {missing.parent} has no folder {missing.name}"
