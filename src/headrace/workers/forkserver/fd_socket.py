"""Connections to processes: messages with descriptors over a socket pair, and a watch for stopped processes.

A wire blocks in workers, and is asynchronous otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import pickle
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace._util.shared_memory import close_all
from headrace._util.wakeup import is_readable

_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 16
_ASKED_EACH_S = 1.0
_MAX_DESCRIPTORS = 64
_ANCILLARY_BYTES = socket.CMSG_LEN(_MAX_DESCRIPTORS * array("i").itemsize)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)  # arithmetic with the enum member is slow
_AT_ONCE = 32  # descriptors in one message


def in_groups(descriptors: Sequence[int]) -> list[tuple[tuple[str, int], Sequence[int]]]:
    groups = [descriptors[k : k + _AT_ONCE] for k in range(0, len(descriptors), _AT_ONCE)]
    return [(("descriptors", len(group)), group) for group in groups]


class Codec(NamedTuple):
    dumps: Callable[[Any], bytes]
    loads: Callable[[memoryview], object]


PICKLE = Codec(lambda message: pickle.dumps(message, protocol=5), pickle.loads)
JSON = Codec(lambda message: json.dumps(message).encode(), lambda body: json.loads(bytes(body)))


class ObjectCodec:
    """Passes messages by reference, between the two ends of a connection within this process."""

    def __init__(self) -> None:
        self._messages: dict[int, object] = {}
        self._numbers = itertools.count()
        self._is_closed = False

    def dumps(self, message: object) -> bytes:
        number = next(self._numbers)
        self._messages[number] = message
        if self._is_closed:  # checked after the store: the later of two threads clears them
            self._messages.clear()
        return _HEADER.pack(number)

    def loads(self, body: memoryview) -> object:
        try:
            return self._messages.pop(*_HEADER.unpack(body))
        except KeyError:
            raise EOFError from None

    def close(self) -> None:
        """Drop the messages under way, which are not received any more."""
        self._is_closed = True
        self._messages.clear()


def encode(message: object, codec: Codec | ObjectCodec = PICKLE) -> bytes:
    body = codec.dumps(message)
    return _HEADER.pack(len(body)) + body


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, flags, _ = sock.recvmsg(_CHUNK, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
    if not ancillary:
        return data, []
    descriptors = array("i")
    for level, kind, values in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(values[: len(values) // descriptors.itemsize * descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in descriptors:
            os.close(fd)
        raise RuntimeError(
            "Too many open files. Communication with the workers is no longer possible. "
            "Please increase the limit using `ulimit -n` in the shell"
        )
    return data, descriptors.tolist()


class _Wire:
    """One end of a connection. `close` closes the socket, and descriptors that were not taken."""

    def __init__(self, sock: socket.socket, codec: Codec | ObjectCodec = PICKLE) -> None:
        self._sock, self._codec = sock, codec
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def take_descriptor(self) -> int:
        return self._descriptors.popleft()

    def close(self) -> None:
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _received(self) -> list[Any]:
        """Receive once. Return the messages that are complete. Raises EOFError if the other end is gone."""
        data, descriptors = _receive(self._sock)
        if not data:
            raise EOFError
        self._data += data
        self._descriptors.extend(descriptors)
        messages, start = [], 0
        while len(self._data) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, start)
            stop = start + _HEADER.size + length
            if len(self._data) < stop:
                break
            messages.append(self._codec.loads(memoryview(self._data)[start + _HEADER.size : stop]))
            start = stop
        del self._data[:start]
        return messages


class BlockingWire(_Wire):
    """A worker's end, which blocks. Usable only in the process that created it."""

    def __init__(self, sock: socket.socket, codec: Codec | ObjectCodec = PICKLE) -> None:
        from headrace._util.fork_guard import Original

        super().__init__(sock, codec)
        self._original = Original()
        self._waiting: deque[object] = deque()

    def receive(self, is_wanted: Callable[[], bool] | None = None) -> Any:
        """Return the next message.

        Args:
            is_wanted: Called each second. False ends the wait.

        Raises:
            EOFError: the other end is gone, or `is_wanted` returned False.
        """
        self._original.check()
        while not self._waiting:
            while is_wanted is not None and not is_readable(self._sock.fileno(), _ASKED_EACH_S):
                if not is_wanted():
                    raise EOFError
            self._waiting.extend(self._received())
        return self._waiting.popleft()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        self._original.check()
        data = encode(message, self._codec)
        sent = socket.send_fds(self._sock, [data], list(descriptors)) if descriptors else 0
        self._sock.sendall(memoryview(data)[sent:])


class PolledWire(_Wire):
    """One end that never blocks.

    The owner polls the socket for reading, and for writing while `flush` returns False.
    """

    def __init__(self, sock: socket.socket, codec: Codec | ObjectCodec = PICKLE) -> None:
        sock.setblocking(False)
        super().__init__(sock, codec)
        self._unsent: deque[tuple[bytes, Sequence[int], list[int]]] = deque()  # data, descriptors, those to close then

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> bool:
        """Send now, or in `flush`. Return True if all was sent.

        Args:
            are_kept: True if the descriptors stay open until `close`. Otherwise they are duplicated if necessary.
        """
        data = encode(message, self._codec)
        if not self._unsent:
            sent = self._send_now(data, descriptors)
            if sent == len(data):
                return True
            data, descriptors = data[sent:], () if sent else descriptors
        copies = [] if are_kept else [os.dup(fd) for fd in descriptors]
        self._unsent.append((data, copies or descriptors, copies))
        return False

    def flush(self) -> bool:
        """Send what the socket accepts. Return True if nothing remains or the connection is broken."""
        while self._unsent:
            data, descriptors, copies = self._unsent[0]
            sent = self._send_now(data, descriptors)
            if sent:
                close_all(copies)
                self._unsent[0] = data[sent:], (), []
            if sent < len(data):
                return False
            self._unsent.popleft()
        return True

    def _send_now(self, data: bytes, descriptors: Sequence[int]) -> int:
        """Return how many bytes were sent, the first with the descriptors. A broken connection takes all."""
        try:
            return socket.send_fds(self._sock, [data], list(descriptors)) if descriptors else self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            return 0 if error.errno == errno.ETOOMANYREFS else len(data)  # too many descriptors in flight: retry later

    def receive(self) -> list[Any]:
        """Return received messages. An empty list means there are no more for now.

        Raises:
            EOFError: the other end is gone, and everything it has sent was received.
        """
        while True:
            try:
                messages = self._received()
            except BlockingIOError:
                return []
            except OSError:
                raise EOFError from None
            if messages:
                return messages

    def close(self) -> None:
        super().close()
        while self._unsent:
            close_all(self._unsent.popleft()[2])


class LoopWire:
    """The trainer's end, served by its event loop. `close` closes the socket."""

    def __init__(
        self, sock: socket.socket, received: Callable[[Any], None], lost: Callable[[], None], codec: Codec = PICKLE
    ) -> None:
        self._wire = PolledWire(sock, codec)
        self._received, self._lost = received, lost
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send now, or when the socket accepts it. The descriptors may be closed after this call."""
        if self._open and not self._wire.send(message, descriptors):
            self._loop.add_writer(self._wire.fileno(), self._flush)

    def close(self) -> None:
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


@dataclass
class Patience:
    """Tolerance for an awaited process that is stopped.

    Attributes:
        each_s: Seconds between two checks.
        looks: Number of consecutive checks after which a stopped process is given up.
    """

    each_s: float = 1.0
    looks: int = 5


PATIENCE = Patience()


class Watch:
    """Periodic checks of processes, one for each place where processes are awaited.

    A process that gets SIGSTOP, or whose control group is frozen, causes no event: its socket stays open. Checks are
    counted instead of seconds, as there are none while this process is stopped too (Ctrl-Z, later `fg`). A process
    stopped by a debugger is awaited as long as the debugger is attached.
    """

    def __init__(self) -> None:
        self._stopped: dict[int, int] = {}  # number of checks that found a process stopped
        self._last_s = time.monotonic()

    def look(self, pids: Iterable[int]) -> list[int]:
        """Return awaited processes to give up. Checks at most once per `PATIENCE.each_s`."""
        now_s = time.monotonic()
        if now_s - self._last_s < 0.9 * PATIENCE.each_s:
            return []
        self._last_s = now_s
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        given_up = [pid for pid, looks in self._stopped.items() if looks >= PATIENCE.looks]
        for pid in given_up:
            del self._stopped[pid]
        return given_up


def is_stopped(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> bool:
    """True if a process will do nothing until it is continued. False if unknown."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return "\nTracerPid:\t0\n" in (proc / str(pid) / "status").read_text()
        return state in ("S", "D") and _is_frozen(pid, proc, groups)
    except (OSError, IndexError):
        return False


def _is_frozen(pid: int, proc: Path, groups: Path) -> bool:
    """True if the process's control group is frozen. False for this process's group, which runs."""
    group, ours = ((proc / name / "cgroup").read_text() for name in (str(pid), "self"))
    if group == ours:
        return False
    path = next((line[3:] for line in group.splitlines() if line.startswith("0::")), None)
    return path is not None and "frozen 1" in (groups / path.lstrip("/") / "cgroup.events").read_text()
