"""One HTTP/1.1 connection, the bodies of its answers, and the unread rest of a body for the next read."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections.abc import Callable
from typing import Any, cast

from headrace._util.reads import ReportedVersion
from headrace.errors import BadResponseError, ShortReadError
from headrace.fetch.web.http1 import HEAD_BYTES, Chunks, Head, head_end, parse_head
from headrace.types import Answer, Buffer

# Bytes received with a head are copied once more, so steps are small. One step does not fill the buffer, because to
# pause and resume reading costs 25 µs.
_STEP_BYTES = 16 * 1024
_BUFFER_BYTES = 2 * _STEP_BYTES
_INTERIM_ANSWERS = 16


class EndedError(Exception): ...


class Connection(asyncio.BufferedProtocol):
    """A connection with at most one running request.

    Bytes are received directly into the reader's memory while a `fill` waits, and else into a small buffer. When that
    is full, reading pauses until its bytes are taken.

    Attributes:
        filled: Bytes received by the latest `fill`. Also valid while it waits and after it failed.
        has_begun: True if any byte of the answer has come.
        closed: Done when the connection is closed.

    Args:
        put_back: Called when an answer is complete and another request may follow.
    """

    def __init__(self, put_back: Callable[[Connection], None]) -> None:
        self._put_back = put_back
        self._loop = asyncio.get_running_loop()
        self._memory = bytearray(_BUFFER_BYTES)
        self._room = memoryview(self._memory)
        self._begin = self._end = 0  # range of its valid bytes
        self._target: memoryview | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_idle = self._is_paused = self._is_encrypted = False
        self._ended: str | None = None
        self._transport: asyncio.Transport
        self._poll: Any = None
        self.address = ""
        self.filled = 0
        self.has_begun = False
        self._idle_since = 0.0
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        self.address = str((transport.get_extra_info("peername") or [""])[0])
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self.filled :]
        step = _STEP_BYTES
        if self._is_encrypted and sizehint > step:
            # TLS holds so many decrypted bytes. Those not taken before the other side closes are lost.
            step = sizehint
            if step > self._room.nbytes - self._end:
                self._grow(self._end + step)
        return self._room[self._end : self._end + step]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self.filled += nbytes
            if self.filled == self._target.nbytes:
                self._target = None
                self._wake()
        elif self._is_idle:
            self.abort()  # unrequested: an answer was longer than announced
        else:
            self.has_begun = True
            self._end += nbytes
            if self._end >= _BUFFER_BYTES and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        # As text: the exception's traceback would make a reference cycle.
        self._ended = "closed by the other side" if exc is None else in_words(exc)
        self.closed.set_result(None)
        self._wake(EndedError(self._ended))

    def idle_s(self) -> float:
        return self._loop.time() - self._idle_since

    def is_usable(self) -> bool:
        """True if a request may be sent: the connection is open and has no unread bytes."""
        return not self._transport.is_closing() and (self._poll is None or not self._poll.poll(0))

    def release(self, *, keeps_alive: bool) -> None:
        """Offer the connection for reuse after a complete answer. Close it if it has more bytes."""
        if not keeps_alive or self._begin != self._end or self._transport.is_closing():
            self.abort()
            return
        self._begin = self._end = 0
        self._is_idle = True
        self._idle_since = self._loop.time()
        self._resume()
        self._put_back(self)

    def abort(self) -> None:
        self._target = None
        self._transport.abort()

    async def ask(self, request: bytes) -> Head:
        """Send `request` and return the head of the answer.

        Raises:
            EndedError: the connection ended before the answer.
            ValueError: the answer is malformed.
        """
        self._is_idle = self.has_begun = False
        self._transport.write(request)
        for _ in range(_INTERIM_ANSWERS):
            searched = 0
            while not self._end or (end := head_end(self._memory, searched, self._end)) < 0:
                searched = self._end
                if searched == self._room.nbytes:
                    self._grow(HEAD_BYTES)
                await self._receive()
            head = parse_head(self._memory[:end])
            if head.status >= 200:
                self._begin = end
                return head
            if head.status == 101:
                break
            rest = self._memory[end : self._end]
            self._end = len(rest)
            self._room[: self._end] = rest
        raise ValueError("it only has interim answers")

    def buffered(self) -> memoryview:
        return self._room[self._begin : self._end]

    def take(self, count: int) -> None:
        self._begin += count

    async def more(self) -> None:
        """Receive bytes into the buffer, which must be used up."""
        self._begin = self._end = 0
        await self._receive()

    async def fill(self, target: memoryview) -> None:
        """Receive into `target` until it is full. The buffer must be used up."""
        self._begin = self._end = 0
        self._target, self.filled = target, 0
        try:
            await self._receive()
        finally:
            self._target = None

    def _grow(self, size: int) -> None:
        self._memory = self._memory + bytes(size - len(self._memory))
        self._room = memoryview(self._memory)

    async def _receive(self) -> None:
        if self._ended is not None:
            raise EndedError(self._ended)
        self._resume()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self, error: EndedError | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)


def in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason}"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_PIECE_BYTES = 256 * 1024


class Body:
    """A body that implements `Fills`. Iterating over it gives pieces.

    Its connection is reused when all of the body was read. It ends if the body is closed earlier, cancelled or broken.
    `length` is needed if the framing does not give it.
    """

    def __init__(self, connection: Connection, head: Head, name: str, length: int | None = None) -> None:
        self._connection: Connection | None = connection
        self._name = name
        self._keeps_alive = head.keeps_alive
        self._chunks = Chunks() if head.is_chunked else None
        self._left = head.length if length is None else length  # bytes left; None: until the connection ends
        self._is_cut = False
        self._is_whole = False
        self._received = 0
        self._filling: Connection | None = None
        if self._left == 0:
            self._finish()

    @property
    def received(self) -> int:
        return self._received + (0 if self._filling is None else self._filling.filled)

    async def read_into(self, target: memoryview) -> int:
        if self._connection is None:
            if self._is_whole:
                return 0
            raise ShortReadError("the body was given up", url=self._name)
        if self._left is not None:
            target = target[: self._left]
        before, is_at_end = self._received, False
        try:
            if self._chunks is None:
                await self._fill(self._connection, target)
            else:
                is_at_end = await self._unchunk(self._connection, self._chunks, target)
        except EndedError as error:
            if self._chunks is not None or self._left is not None:
                await self.aclose()
                raise ShortReadError(f"the connection ended within the body: {error}", url=self._name) from error
            is_at_end = True  # the body extends to the connection's end
        except ValueError as error:
            await self.aclose()
            raise BadResponseError(f"the answer cannot be used: {error}", url=self._name) from error
        except BaseException:
            await self.aclose()
            raise
        count = self._received - before
        if self._left is not None:
            self._left -= count
        if is_at_end or self._left == 0:
            self._finish()
        return count

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    async def aclose(self) -> None:
        if self._connection is not None:
            self.abort()

    def abort(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> Buffer:
        piece = bytearray(_PIECE_BYTES if self._left is None else min(_PIECE_BYTES, self._left))
        count = await self.read_into(memoryview(piece))
        if not count:
            raise StopAsyncIteration
        return memoryview(piece)[:count]

    async def skip(self, count: int) -> int:
        """Discard up to `count` next bytes without counting them as received. Return their number."""
        room = memoryview(bytearray(min(count, _PIECE_BYTES)))
        skipped = 0
        while skipped < count and (got := await self.read_into(room[: count - skipped])):
            skipped += got
        self._received = 0
        return skipped

    def cut(self, count: int) -> None:
        if self._connection is not None and (self._left is None or count < self._left):
            self._left, self._is_cut = count, True
            if not count:
                self._finish()

    def _finish(self) -> None:
        connection, self._connection = self._connection, None
        self._is_whole = True
        if connection is not None:
            connection.release(keeps_alive=self._keeps_alive and not self._is_cut)

    async def _fill(self, connection: Connection, target: memoryview) -> None:
        came = connection.buffered()[: target.nbytes]
        target[: came.nbytes] = came
        connection.take(came.nbytes)
        self._received += came.nbytes
        if came.nbytes == target.nbytes:
            return
        self._filling = connection
        try:
            await connection.fill(target[came.nbytes :])
        finally:
            self._filling = None
            self._received += connection.filled

    async def _unchunk(self, connection: Connection, chunks: Chunks, target: memoryview) -> bool:
        at = 0
        # A body of known length must end there.
        is_last = self._left == target.nbytes and not self._is_cut
        while True:
            taken, given = chunks.feed(connection.buffered(), target[at:])
            connection.take(taken)
            at += given
            self._received += given
            if chunks.is_done:
                if self._left is not None and not self._is_cut and at < self._left:
                    raise EndedError("its last chunk came early")
                return True
            if at == target.nbytes:
                if not is_last:
                    return False
                if connection.buffered():
                    raise ValueError("its body is longer than announced")
            await connection.more()


_SKIPPED_BYTES = 256 * 1024


class Rest:
    """The open answer of a server that sends whole objects only, for reading an object in order.

    Each part is read from the same body, so the server sends every byte once. If the connection broke, or a part
    precedes the position, the object is requested again and the bytes before the part are discarded.
    """

    def __init__(self) -> None:
        self._body: Body | None = None
        self._at = 0
        self._size: int | None = None
        self._reported: ReportedVersion | None = None  # version of the first answer

    def go_on(self, start: int, stop: int, name: str) -> Answer | None:
        """Return bytes [start, stop) of the open answer; None without one or if it is past `start`."""
        body, self._body = self._body, None
        if body is None:
            return None
        if start < self._at:
            body.abort()
            return None
        return self._part(body, start, stop, name)

    def begin(
        self, body: Body, start: int, stop: int, name: str, *, size: int | None, reported: ReportedVersion
    ) -> Answer:
        """Return bytes [start, stop) of a new answer.

        Raises:
            ObjectChangedError: the previous answer had another version.
            BadResponseError: the versions cannot be compared.
        """
        if self._reported is not None:
            self._reported.check(reported, name)
        self._at, self._size, self._reported = 0, size, reported
        return self._part(body, start, stop, name)

    def keep(self, body: Body, at: int) -> None:
        self.release()
        if body.is_open:
            self._body, self._at = body, at

    def release(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.abort()

    def _part(self, body: Body, start: int, stop: int, name: str) -> Answer:
        end = stop if self._size is None else min(stop, self._size)
        part = _Part(self, body, start - self._at, start, end, name)
        known, (etag, modified) = None if self._size is None else end, self._reported or ReportedVersion()
        return Answer(start, known, self._size, etag, part, in_order=True, modified=modified)


class _Part:
    """Bytes [start, stop) of a body, after `skip` bytes that are discarded. Implements `Fills`."""

    def __init__(self, rest: Rest, body: Body, skip: int, start: int, stop: int, name: str) -> None:
        self._rest, self._body, self._name = rest, body, name
        self._to_skip, self._left, self._stop = skip, stop - start, stop
        self._before = self._base = body.received  # bytes received before this part, and before its wanted bytes

    @property
    def received(self) -> int:
        return 0 if self._to_skip else self._body.received - self._base

    @property
    def skipped(self) -> int:
        return (self._body.received if self._to_skip else self._base) - self._before

    async def read_into(self, target: memoryview) -> int:
        await self._skip()
        count = await self._body.read_into(target[: self._left])
        self._left -= count
        if not self._left:
            self._rest.keep(self._body, self._stop)
        return count

    async def aclose(self) -> None:
        if self._left:
            await self._body.aclose()

    def __aiter__(self) -> _Part:
        return self

    async def __anext__(self) -> Buffer:
        piece = bytearray(min(_SKIPPED_BYTES, self._left))
        count = await self.read_into(memoryview(piece)) if piece else 0
        if not count:
            raise StopAsyncIteration
        return memoryview(piece)[:count]

    async def _skip(self) -> None:
        room = memoryview(bytearray(min(self._to_skip, _SKIPPED_BYTES)))
        while self._to_skip:
            count = await self._body.read_into(room[: self._to_skip])
            if not count:
                raise BadResponseError(f"the whole ended {self._to_skip} bytes before the part", url=self._name)
            self._base = self._body.received
            self._to_skip -= count
