"""One HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections.abc import Callable
from typing import Any, cast

from headrace.fetch.web.http1 import HEAD_BYTES, Head, head_end, parse_head

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
