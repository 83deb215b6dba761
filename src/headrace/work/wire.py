"""Messages over a socket pair, with file descriptors beside them: blocking in a worker, on the loop in the trainer."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.wakeup import is_readable

_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 16
_ASKED_EACH_S = 1.0
_MAX_DESCRIPTORS = 64


def encode(message: Any) -> bytes:
    """A message as it goes over the wire: its length, then its pickle."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


class _Decoder:
    """Messages out of the bytes and descriptors that have come so far."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int]) -> list[Any]:
        self._data += data
        self.descriptors.extend(descriptors)
        messages, start = [], 0
        while len(self._data) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, start)
            stop = start + _HEADER.size + length
            if len(self._data) < stop:
                break
            messages.append(pickle.loads(memoryview(self._data)[start + _HEADER.size : stop]))
            start = stop
        del self._data[:start]
        return messages


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors, flags, _ = socket.recv_fds(sock, _CHUNK, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        for fd in descriptors:
            os.close(fd)
        raise RuntimeError(
            "Too many open files. Communication with the workers is no longer possible. "
            "Please increase the limit using `ulimit -n` in the shell"
        )
    return data, descriptors


class BlockingWire:
    """A worker's end: waits for messages, sends at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = _Decoder()
        self._waiting: deque[Any] = deque()

    def receive(self, is_wanted: Callable[[], bool] | None = None) -> Any:
        """The next message.

        Args:
            is_wanted: asked each second whether to go on waiting.

        Raises:
            EOFError: the other end is gone, or the message is not wanted any more.
        """
        while not self._waiting:
            while is_wanted is not None and not is_readable(self._sock.fileno(), _ASKED_EACH_S):
                if not is_wanted():
                    raise EOFError
            data, descriptors = _receive(self._sock)
            if not data:
                raise EOFError
            self._waiting.extend(self._decoder.feed(data, descriptors))
        return self._waiting.popleft()

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._decoder.descriptors.popleft()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send, waiting until the socket has taken it all."""
        data = encode(message)
        sent = socket.send_fds(self._sock, [data], list(descriptors)) if descriptors else 0
        self._sock.sendall(memoryview(data)[sent:])


class PolledWire:
    """The trainer's end: never blocks. Its owner polls the socket, for reading and, while `flush` says so, for writing.

    Args:
        sock: the connected socket; closed by `close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = _Decoder()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> bool:
        """Send now, or in `flush`; whether all was sent. `descriptors` must stay open until then."""
        self._unsent.append((encode(message), list(descriptors)))
        return self.flush() if len(self._unsent) == 1 else False

    def flush(self) -> bool:
        """Send what the socket takes; whether all was sent, or never can be (reading shows the end too)."""
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = socket.send_fds(self._sock, [data], descriptors) if descriptors else self._sock.send(data)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], [])
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    def receive(self) -> list[Any]:
        """Messages that have come; there may be more, unless there are none.

        Raises:
            EOFError: the other end is gone, and all that it has sent was received.
        """
        while True:
            try:
                data, descriptors = _receive(self._sock)
            except BlockingIOError:
                return []
            except OSError:
                data, descriptors = b"", []
            if not data:
                raise EOFError
            messages = self._decoder.feed(data, descriptors)
            if messages:
                return messages

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._decoder.descriptors.popleft()

    def close(self) -> None:
        """Close the socket, and descriptors that nobody took."""
        self._sock.close()
        while self._decoder.descriptors:
            os.close(self._decoder.descriptors.popleft())


class LoopWire:
    """The trainer's end, served by its event loop.

    Args:
        sock: the connected socket; closed by `close`.
        received: called with each message.
        lost: called once when the other end is gone.
    """

    def __init__(self, sock: socket.socket, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._wire = PolledWire(sock)
        self._received, self._lost = received, lost
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send now, or as soon as the socket takes it. `descriptors` must stay open until then."""
        if self._open and not self._wire.send(message, descriptors):
            self._loop.add_writer(self._wire.fileno(), self._flush)

    def close(self) -> None:
        """Close the socket; nothing is called any more."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._wire.fileno())
            self._loop.remove_writer(self._wire.fileno())
            self._wire.close()

    def _flush(self) -> None:
        if self._wire.flush():
            self._loop.remove_writer(self._wire.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._wire.receive()
        except EOFError:
            self._loop.remove_reader(self._wire.fileno())
            self._lost()
            return
        for message in messages:
            if self._open:
                self._received(message)
