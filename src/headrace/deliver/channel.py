"""Channels from the engine to the trainer's side: over a queue in one process, or over a socket between two.

Messages go one way, grants the other. Both kinds keep the contract of `headrace.testing.ChannelContract`.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from headrace.failures import PackedError
from headrace.wakeup import Wakeup, is_readable

_HEADER = struct.Struct("<Q")


class ChannelFailedError(Exception):
    """The sender failed; `failure` is its exception."""

    def __init__(self, failure: PackedError) -> None:
        super().__init__("the other end of the channel has failed")
        self.failure = failure


class _End:
    """The last message of a channel."""

    def __init__(self, failure: PackedError | None) -> None:
        self.failure = failure


class _ChannelState:
    def __init__(self, depth: int, post: Callable[..., None], arrived: Wakeup) -> None:
        self.messages: deque[tuple[Any, _End | None]] = deque()
        # The receiver's: who sends may be held by frames of the user's that wait for the garbage collector, and a
        # descriptor must not wait with them.
        self.arrived = weakref.ref(arrived)
        self.is_awaited = True  # the receiver has found nothing, and may wait
        self.granted = self.depth = depth
        self.post = post
        self.on_credit: Callable[[], None] = lambda: None
        self.is_closed = False


class ThreadSender:
    """The engine's end, used on its loop only."""

    def __init__(self, shared: _ChannelState) -> None:
        self._shared = shared
        self.depth = shared.depth
        self._sent = 0
        self._is_ended = False

    @property
    def granted(self) -> int:
        return self._shared.granted

    def send(self, message: object) -> None:
        if self._sent >= self._shared.granted:
            raise anyio.WouldBlock
        self._sent += 1
        self._push(message)

    def fail(self, failure: PackedError) -> None:
        self._end(failure)

    def close(self) -> None:
        self._end(None)

    def on_credit(self, callback: Callable[[], None]) -> None:
        self._shared.on_credit = callback

    def take_back(self) -> Sequence[Any]:
        """The messages that were sent and will not be received, because the receiver has closed."""
        return _drained(self._shared) if self._shared.is_closed else ()

    def _end(self, failure: PackedError | None) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._push(None, _End(failure))

    def _push(self, message: object, end: _End | None = None) -> None:
        self._shared.messages.append((message, end))
        if not self._shared.is_awaited and end is None:
            return  # it finds the message without being woken
        self._shared.is_awaited = False
        arrived = self._shared.arrived()
        if arrived is not None:
            arrived.set()


class ThreadReceiver:
    """The trainer's end."""

    def __init__(self, shared: _ChannelState, arrived: Wakeup) -> None:
        self._shared, self._arrived = shared, arrived
        self._received = 0

    def receive_nowait(self) -> Any:
        shared = self._shared
        if not shared.messages:
            self._arrived.clear()
            shared.is_awaited = True  # and look again: what came between is seen either way
            if shared.messages:
                self._arrived.set()  # others who wait are to see what is not taken here
        if shared.is_closed:
            self._arrived.set()  # for all who wait, however many
            raise anyio.ClosedResourceError
        try:
            message, end = shared.messages.popleft()
        except IndexError:
            raise anyio.WouldBlock from None
        if end is not None:
            shared.messages.append((None, _End(None)))  # the end stays the end, a failure is told once
            self._arrived.set()
            if end.failure is not None:
                raise ChannelFailedError(end.failure)
            raise anyio.EndOfStream
        self._received += 1
        if shared.depth:
            self._grant()
        return message

    def request(self) -> None:
        if not self._shared.depth and self._shared.granted <= self._received:
            self._grant()

    def fileno(self) -> int:
        return self._arrived.fileno()

    def close(self) -> Sequence[Any]:
        """Take no more; gives what was sent and not received."""
        self._shared.is_closed = True
        self._arrived.set()  # whoever waits sees it
        return _drained(self._shared)

    def _grant(self) -> None:
        self._shared.granted += 1
        self._shared.post(self._shared.on_credit)


def _drained(shared: _ChannelState) -> list[Any]:
    left = []
    with contextlib.suppress(IndexError):
        while True:
            left.append(shared.messages.popleft())
    return [message for message, end in left if end is None]


def thread_channel(depth: int, post: Callable[..., None]) -> tuple[ThreadSender, ThreadReceiver]:
    """Both ends of a channel within one process.

    Args:
        depth: how many messages are granted beforehand.
        post: has the sender's loop call a function soon.
    """
    arrived = Wakeup()
    shared = _ChannelState(depth, post, arrived)
    return ThreadSender(shared), ThreadReceiver(shared, arrived)


def _send(sock: socket.socket, message: object) -> None:
    body = pickle.dumps(message, protocol=5)
    sock.sendall(_HEADER.pack(len(body)) + body)


class _Inbox:
    """Messages out of a socket's bytes, without waiting for more than is there."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self.is_ended = False

    def take(self) -> Any:
        """The next message, or anyio.WouldBlock."""
        while True:
            if len(self._data) >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._data)
                stop = _HEADER.size + length
                if len(self._data) >= stop:
                    message = pickle.loads(memoryview(self._data)[_HEADER.size : stop])
                    del self._data[:stop]
                    return message
            if self.is_ended or not is_readable(self._sock.fileno(), 0):
                raise anyio.WouldBlock
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._sock.recv(1 << 16)
            self.is_ended = not data
            self._data += data


class ProcessSender:
    """The engine's end of a channel to another process. Messages are small: sending waits only for the socket's buffer.

    Its owner calls `poll` whenever `fileno()` is readable, so that grants are seen.
    """

    def __init__(self, sock: socket.socket, depth: int) -> None:
        self._sock, self._inbox = sock, _Inbox(sock)
        self.depth = self.granted = depth
        self._sent = self._received = 0
        self._unreceived: deque[Any] = deque()
        self._is_ended = False
        self._on_credit: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        return self._sock.fileno()

    def poll(self) -> None:
        """Take in the grants that have come."""
        before = self.granted
        with contextlib.suppress(anyio.WouldBlock):
            while True:
                self.granted, received = self._inbox.take()
                while self._received < received:
                    self._received += 1
                    self._unreceived.popleft()
        if self.granted > before:
            self._on_credit()

    def send(self, message: object) -> None:
        if self._sent >= self.granted:
            self.poll()
        if self._sent >= self.granted:
            raise anyio.WouldBlock
        self._sent += 1
        self._unreceived.append(message)
        self._push(("message", message))

    def fail(self, failure: PackedError) -> None:
        self._end(("failed", failure))

    def close(self) -> None:
        self._end(("end", None))

    def on_credit(self, callback: Callable[[], None]) -> None:
        self._on_credit = callback

    def take_back(self) -> Sequence[Any]:
        """The messages that were sent and will not be received, because the receiver has closed, or is gone."""
        self.poll()
        if not self._inbox.is_ended:
            return ()
        left = list(self._unreceived)
        self._unreceived.clear()
        self._received = self._sent
        return left

    def _end(self, message: object) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._push(message)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _push(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the receiver is gone: so are its grants
            _send(self._sock, message)


class ProcessReceiver:
    """The trainer's end of a channel from another process."""

    def __init__(self, sock: socket.socket, depth: int) -> None:
        self._sock, self._inbox = sock, _Inbox(sock)
        self._depth = self._granted = depth
        self._received = 0
        self._is_at_end = self._is_closed = False

    def receive_nowait(self) -> Any:
        if self._is_closed:
            raise anyio.ClosedResourceError
        if self._is_at_end:
            raise anyio.EndOfStream
        try:
            kind, value = self._inbox.take()
        except anyio.WouldBlock:
            if self._is_closed:  # meanwhile, by another thread
                raise anyio.ClosedResourceError from None
            if self._inbox.is_ended:
                raise anyio.BrokenResourceError from None
            raise
        if kind != "message":
            self._is_at_end = True
            if kind == "failed":
                raise ChannelFailedError(value)
            raise anyio.EndOfStream
        self._received += 1
        if self._depth:
            self._granted += 1
        self._tell()
        return value

    def request(self) -> None:
        if not self._depth and self._granted <= self._received:
            self._granted += 1
            self._tell()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> Sequence[Any]:
        """Take no more. What was sent and not received is known to the sender's process only."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return ()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            _send(self._sock, (self._granted, self._received))


def process_channel(sock: socket.socket, depth: int, *, sends: bool) -> ProcessSender | ProcessReceiver:
    """One end of a channel between processes, over a connected stream socket whose other end has the other process."""
    return ProcessSender(sock, depth) if sends else ProcessReceiver(sock, depth)
