"""Files, read by threads of our own: file systems know no asynchronous reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import AccessDeniedError, ObjectChangedError, ObjectMissingError
from headrace.types import Answer, Buffer

_THREADS = 8
_CHUNK_BYTES = 4 * 2**20


class LocalStore:
    """Files of this machine; the path is the file's."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-files")

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`. The version is made of the file's time of change, number and size."""
        loop = asyncio.get_running_loop()
        first, last, size, etag, head = await loop.run_in_executor(
            self._threads, _read, path, start or 0, stop, if_match
        )
        return Answer(first, last, size, etag, self._chunks(path, first, last, etag, head))

    async def _chunks(self, path: str, first: int, last: int, etag: str, piece: bytes) -> AsyncIterator[Buffer]:
        loop = asyncio.get_running_loop()
        while piece:
            yield piece
            first += len(piece)
            if first >= last:
                return
            # Each piece opens the file anew: an answer that nobody goes on with keeps nothing open.
            piece = (await loop.run_in_executor(self._threads, _read, path, first, last, etag))[4]

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        self._threads.shutdown(wait=False, cancel_futures=True)  # one of them may be stuck in a read


def _read(path: str, start: int, stop: int | None, if_match: str | None) -> tuple[int, int, int, str, bytes]:
    """The range that there is, the file's size and version, and the range's first bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectMissingError(_missing(path), url=path) from error
    except PermissionError as error:
        raise AccessDeniedError("this user may not read the file", url=path) from error
    try:
        status = os.fstat(descriptor)
        size, etag = status.st_size, f'"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"'
        if if_match is not None and if_match != etag:
            raise ObjectChangedError(f"the file changed: its version was {if_match}, now {etag}", url=path)
        first = min(start, size)
        last = size if stop is None else max(first, min(stop, size))
        return first, last, size, etag, _pread(descriptor, min(last - first, _CHUNK_BYTES), first)
    except IsADirectoryError as error:
        raise ObjectMissingError("this is a folder, not a file", url=path) from error
    finally:
        os.close(descriptor)


if hasattr(os, "pread"):
    _pread = os.pread
else:  # Windows

    def _pread(descriptor: int, size: int, offset: int, /) -> bytes:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def _missing(path: str) -> str:
    """Says which part of `path` is not there: a forgotten mount looks unlike a misspelt name."""
    whole = Path.cwd() / path
    if whole.parent.is_dir():
        return f"the folder {whole.parent} has no file {whole.name}"
    missing = whole.parent
    while not missing.parent.exists():
        missing = missing.parent
    if missing.exists():
        return f"{missing} is no folder"
    return f"the folder {missing.parent} has no folder {missing.name}"
