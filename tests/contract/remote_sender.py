"""A channel's sender in a process of its own, and an object that has it do what the tests tell it."""

from __future__ import annotations

import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from headrace.deliver.channel import ProcessReceiver, ProcessSender
from headrace.failures import PackedError

_LENGTH = struct.Struct("<I")


def say(sock: socket.socket, message: Any) -> None:
    body = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def hear(sock: socket.socket) -> Any:
    data = b""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        piece = sock.recv(1 << 16)
        if not piece:
            raise EOFError
        data += piece
    return pickle.loads(data[_LENGTH.size :])


class RemoteSender:
    """Keeps the protocol of senders; the sender itself is in another process, whose end `kill` is."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        orders, theirs = socket.socketpair()
        ours, channel = socket.socketpair()
        with theirs, channel:
            code = f"import sys; sys.path[:] = {sys.path!r}; from contract.remote_sender import serve; serve("
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}{theirs.fileno()}, {channel.fileno()}, {depth})"],
                pass_fds=[theirs.fileno(), channel.fileno()],
            )
        self._orders, self.channel = orders, ours
        self.receiver = ProcessReceiver(ours, depth)
        self._lock = threading.Lock()
        self._callback: Callable[[], None] = lambda: None

    @property
    def granted(self) -> int:
        return self._do("granted")

    def send(self, message: Any) -> None:
        self._do("send", message)

    def fail(self, failure: PackedError) -> None:
        self._do("fail", failure)

    def close(self) -> None:
        self._do("close")

    def on_credit(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def take_back(self) -> Sequence[Any]:
        return self._do("take_back")

    def send_by_itself(self, count: int) -> None:
        """Have the other process send the numbers below `count`, as the grants come, without being told each time."""
        self._do("send_by_itself", count)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        self._orders.close()
        self.channel.close()

    def _do(self, name: str, *args: Any) -> Any:
        with self._lock:
            say(self._orders, (name, args))
            value, calls = hear(self._orders)
        for _ in range(calls):
            self._callback()
        if isinstance(value, Exception):
            raise value
        return value


def serve(orders_fd: int, channel_fd: int, depth: int) -> None:
    """In the other process: do what is told."""
    orders = socket.socket(fileno=orders_fd)
    sender = ProcessSender(socket.socket(fileno=channel_fd), depth)
    calls: list[int] = []
    sender.on_credit(lambda: calls.append(1))
    while True:
        try:
            name, args = hear(orders)
        except EOFError:
            return
        sender.poll()
        value: Any = None
        try:
            if name == "granted":
                value = sender.granted
            elif name == "send_by_itself":
                say(orders, (None, 0))
                _send_by_itself(sender, *args)
                continue
            else:
                value = getattr(sender, name)(*args)
        except (anyio.WouldBlock, AttributeError) as error:
            value = error
        say(orders, (value, len(calls)))
        calls.clear()


def _send_by_itself(sender: ProcessSender, count: int) -> None:
    number = 0

    def send() -> None:
        nonlocal number
        while number < min(count, sender.granted):
            sender.send(number)
            number += 1

    from headrace.wakeup import is_readable

    sender.on_credit(send)
    send()
    while number < count and is_readable(sender.fileno(), None):
        sender.poll()
    sender.close()
