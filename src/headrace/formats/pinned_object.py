"""An object read in one version, and files of parts of it."""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from headrace._util.reads import Reads
from headrace.errors import ObjectChangedError

T = TypeVar("T")

PIECE_BYTES = 4 * 2**20
_PIECES_AHEAD = 4
_AT_ONCE = 64


class PinnedObject:
    """One object, read in the version of the first read. Before it, `size` is -1."""

    def __init__(self, reader: Reads, url: str, on_bytes: Callable[[int], object] | None = None) -> None:
        self.url = url
        self.size = -1
        self.etag: str | None = None
        self._reader, self._on_bytes = reader, on_bytes
        self._head = memoryview(b"")

    async def read(self, start: int, length: int) -> memoryview:
        """Return `length` bytes from `start`, fewer at the object's end. No request beyond it.

        A negative `start` counts from the end.

        Raises:
            ObjectChangedError: the object has changed since the first read.
        """
        if self.size >= 0:
            start = start if start >= 0 else max(0, self.size + start)
            length = max(min(length, self.size - start), 0)
            if not length:
                return memoryview(b"")
        target = memoryview(bytearray(length))
        span = await self._reader.read_into(self.url, start, target, etag=self.etag)
        if self.size < 0:
            self.size, self.etag = span.size, span.etag
        elif span.size != self.size:
            raise ObjectChangedError(
                f"the object changed while it was indexed: it had {self.size} bytes, now {span.size}", url=self.url
            )
        count = span.stop - span.start
        if self._on_bytes is not None:
            self._on_bytes(count)
        return target[:count]

    async def read_each(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes [start, stop) of each range, read concurrently."""
        return await for_each(len(ranges), lambda k: self.read(ranges[k][0], ranges[k][1] - ranges[k][0]))

    async def head(self, stop: int) -> memoryview:
        """Return the first `stop` bytes. Only those that no earlier call returned are read."""
        is_first, have = self.size < 0, len(self._head)
        if stop > have:
            more = await self.read(have, stop - have)
            self._head = memoryview(b"".join([self._head, more])) if have else more
            if len(self._head) < stop and not is_first:
                raise ValueError("it is cut off in its table")
        return self._head

    async def pieces(self) -> AsyncGenerator[memoryview, None]:
        """Yield the object in pieces of 4 MiB, and read the next four ahead."""
        yield await self.read(0, PIECE_BYTES)
        starts = iter(range(PIECE_BYTES, self.size, PIECE_BYTES))
        ahead: deque[asyncio.Task[memoryview]] = deque()
        try:
            while True:
                while len(ahead) < _PIECES_AHEAD and (start := next(starts, None)) is not None:
                    ahead.append(asyncio.create_task(self.read(start, PIECE_BYTES)))
                if not ahead:
                    return
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)


class SeekableFile(io.RawIOBase):
    """The base of files of `size` bytes that libraries read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at


async def for_each(count: int, do: Callable[[int], Awaitable[T]], at_once: int = _AT_ONCE) -> list[T]:
    """Return `do(0)` … `do(count - 1)`. Up to `at_once` run concurrently, and the first error cancels the rest."""
    if count == 1:
        return [await do(0)]
    results: dict[int, T] = {}
    todo = iter(range(count))

    async def work() -> None:
        for k in todo:
            results[k] = await do(k)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, at_once)):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [results[k] for k in range(count)]
