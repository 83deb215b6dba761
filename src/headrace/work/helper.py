"""The helper process: imports once what workers need, and forks them from there, in milliseconds.

It is started from the trainer without a fork of the trainer and without importing its `__main__`; it never unpickles
anything of the user's, and has one thread. Workers end with it, and it ends with the trainer: it watches its control
sockets and the trainer's process descriptor (a user's forked child may hold the socket open, so its end alone would
not do; PR_SET_PDEATHSIG would fire when the trainer's *thread* that started it ends).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

HEADER = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


def send(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one control message (JSON)."""
    body = json.dumps(message).encode()
    data = HEADER.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], list(descriptors))
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next control message with its descriptors, waiting for it; None at the end of the connection."""
    head, descriptors, _, _ = socket.recv_fds(sock, HEADER.size, 4, socket.MSG_CMSG_CLOEXEC)
    while head and len(head) < HEADER.size:
        head += sock.recv(HEADER.size - len(head))
    if not head:
        return None
    (length,) = HEADER.unpack(head)
    body = b""
    while len(body) < length:
        piece = sock.recv(length - len(body))
        if not piece:
            return None
        body += piece
    return json.loads(body), descriptors


class _Helper:
    def __init__(self, primary: socket.socket, trainer: int) -> None:
        self.primary, self.trainer = primary, trainer
        self.poll = select.poll()
        self.connections = {primary.fileno(): primary}
        self.poll.register(primary, select.POLLIN)
        self.workers: dict[int, tuple[int, int]] = {}  # process descriptor -> (pid, connection)
        self.trainer_fd = _process_descriptor(trainer)
        if self.trainer_fd is not None:
            self.poll.register(self.trainer_fd, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _ in self.poll.poll(_PARENT_CHECK_S * 1000):
                if fd == self.trainer_fd:
                    return
                if fd in self.workers:
                    self._reap(fd)
                elif fd in self.connections and not self._answer(self.connections[fd]):
                    if fd == self.primary.fileno():
                        return
                    self._drop(fd)
                    break  # descriptors' numbers may mean something else by now: ask again
            if os.getppid() != self.trainer:
                return

    def _answer(self, connection: socket.socket) -> bool:
        try:
            got = receive(connection)
        except OSError:
            return False
        if got is None:
            return False
        message, descriptors = got
        if "attach" in message:
            added = socket.socket(fileno=descriptors[0])
            self.connections[added.fileno()] = added
            self.poll.register(added, select.POLLIN)
        else:
            self._fork(connection, message, descriptors[0])
        return True

    def _fork(self, connection: socket.socket, message: dict[str, Any], worker_fd: int) -> None:
        helper = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(helper, message, worker_fd)
        os.close(worker_fd)
        fd = os.pidfd_open(pid)
        self.workers[fd] = (pid, connection.fileno())
        self.poll.register(fd, select.POLLIN)
        self._tell(connection, {"forked": message["fork"], "pid": pid})

    def _become_worker(self, helper: int, message: dict[str, Any], worker_fd: int) -> NoReturn:
        status = 1
        try:
            for fd in (*self.connections, *self.workers, self.trainer_fd):
                if fd is not None:
                    os.close(fd)
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == helper:
                os.environ.clear()
                os.environ.update(message["environment"])
                sys.path[:] = message["path"]
                with contextlib.suppress(OSError):
                    os.chdir(message["folder"])
                from headrace.work.worker import main

                main(socket.socket(fileno=worker_fd), message["number"])
            status = 0
        except SystemExit as error:  # of the user's code
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self, fd: int) -> None:
        pid, connection_fd = self.workers.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        connection = self.connections.get(connection_fd)
        if connection is not None:
            self._tell(connection, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _drop(self, fd: int) -> None:
        """A loader is gone: so are its workers, now, and before its place among the descriptors is given away."""
        self.poll.unregister(fd)
        self.connections.pop(fd).close()
        for worker_fd, (pid, connection_fd) in list(self.workers.items()):
            if connection_fd == fd:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._reap(worker_fd)

    def _tell(self, connection: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            send(connection, message)


def _process_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def main(control_fd: int, trainer: int) -> None:
    """Import what workers need, then fork one whenever the trainer asks, until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a helper with threads could not fork safely
    import torch

    torch.set_num_threads(1)
    importlib.import_module("headrace.work.worker")
    with contextlib.suppress(ImportError):  # images are decoded more often than not: 40 ms less for each worker
        importlib.import_module("PIL.Image").preinit()
    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    gc.collect()
    gc.freeze()  # workers share these pages for good
    helper = _Helper(socket.socket(fileno=control_fd), trainer)
    helper.serve()
