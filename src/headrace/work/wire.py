"""Messages over a socket pair, with file descriptors beside them: blocking in a worker, on the loop in the trainer."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 18
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
    data, descriptors, _, _ = socket.recv_fds(sock, _CHUNK, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return data, descriptors


class BlockingWire:
    """A worker's end: waits for messages, sends at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = _Decoder()
        self._waiting: deque[Any] = deque()

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is gone.
        """
        while not self._waiting:
            data, descriptors = _receive(self._sock)
            if not data:
                raise EOFError
            self._waiting.extend(self._decoder.feed(data, descriptors))
        return self._waiting.popleft()

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._decoder.descriptors.popleft()

    def send(self, message: Any) -> None:
        """Send, waiting until the socket has taken it all."""
        self._sock.sendall(encode(message))


class LoopWire:
    """The trainer's end, served by its event loop; never blocks.

    Args:
        sock: the connected socket; closed by `close`.
        received: called with each message.
        lost: called once when the other end is gone.
    """

    def __init__(self, sock: socket.socket, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received, self._lost = received, lost
        self._decoder = _Decoder()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send now, or as soon as the socket takes it. `descriptors` must stay open until then."""
        if not self._open:
            return
        self._unsent.append((encode(message), list(descriptors)))
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Close the socket; nothing is called any more."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = socket.send_fds(self._sock, [data], descriptors) if descriptors else self._sock.send(data)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], [])
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        except OSError:
            self._unsent.clear()  # the reader sees the end of the connection too, and says so
            self._loop.remove_writer(self._sock.fileno())
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            data, descriptors = _receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._loop.remove_reader(self._sock.fileno())
            self._lost()
            return
        for message in self._decoder.feed(data, descriptors):
            if self._open:
                self._received(message)
