"""The helper process: imports once what workers need, and forks them from there, in milliseconds.

It is started from the trainer without a fork of the trainer and without importing its `__main__`; it never unpickles
anything of the user's, imports the user's modules on demand, and has one thread. Workers end with it, and it ends with
the trainer: it watches its control sockets and the trainer's process descriptor (a user's forked child may hold the
socket open, so its end alone would not do; PR_SET_PDEATHSIG would fire when the trainer's *thread* that started it
ends).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HEADER = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_IDLE_S = 30.0  # how long it is there for a next loader
GRACE_S = 5.0  # how long workers that are not needed any more may go on with what they are in the middle of


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


class _Forked:
    def __init__(self, pid: int, connection: int) -> None:
        self.pid, self.connection = pid, connection
        self.end_s: float | None = None  # when it is ended, if it has not by itself; of those that were dismissed

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class _Helper:
    def __init__(self, primary: socket.socket, trainer: int) -> None:
        self.primary, self.trainer = primary, trainer
        self.poll = select.poll()
        self.connections = {primary.fileno(): primary}
        self.poll.register(primary, select.POLLIN)
        self.workers: dict[int, _Forked] = {}  # by process descriptor
        self.is_ending = False
        self.idle_end_s = math.inf
        self.avoided: list[str] = []  # modules that start threads
        self.trainer_fd = _process_descriptor(trainer)
        if self.trainer_fd is not None:
            self.poll.register(self.trainer_fd, select.POLLIN)

    def serve(self) -> None:
        while not (self.is_ending and not self.workers):
            for fd, _ in self.poll.poll(_PARENT_CHECK_S * 1000):
                if fd == self.trainer_fd:
                    return
                if fd in self.workers:
                    self._reap(fd)
                elif fd in self.connections and not self._answer(self.connections[fd]):
                    self.is_ending |= fd == self.primary.fileno()
                    for lost in list(self.connections) if self.is_ending else [fd]:
                        self._drop(lost)
                    break  # descriptors' numbers may mean something else by now: ask again
            if os.getppid() != self.trainer:
                return
            now = time.monotonic()
            if now > self.idle_end_s and not self.workers:
                return
            for worker in self.workers.values():
                if worker.end_s is not None and worker.end_s < now:
                    worker.kill()

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
        elif "idle" in message:
            self.idle_end_s = time.monotonic() + _IDLE_S
        elif "busy" in message:
            self.idle_end_s = math.inf
            self._tell(connection, {"ready": True})
        elif "import" in message:
            self._import(message)
        elif "dismiss" in message:
            for worker in self.workers.values():
                if worker.connection == connection.fileno():
                    worker.end_s = time.monotonic() + GRACE_S
        else:
            self._fork(connection, message, *descriptors)
        return True

    def _import(self, message: dict[str, Any]) -> None:
        """Import what workers are about to need, once for all; whatever fails there fails again in each of them."""
        before = sys.path[:]
        _take_place(message)
        for name in message["import"]:
            if name not in self.avoided:
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
        sys.path[:] = before
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        tasks = Path("/proc/self/task")
        if tasks.exists() and len(list(tasks.iterdir())) > 1:
            self._begin_again(message["import"])

    def _begin_again(self, names: Sequence[str]) -> NoReturn:
        """A module has started a thread, whose locks no fork would ever see free: be as before, without that module."""
        workers = {str(fd): (worker.pid, worker.connection, worker.end_s) for fd, worker in self.workers.items()}
        state = {"connections": list(self.connections), "workers": workers, "avoided": [*self.avoided, *names]}
        for fd in (*self.connections, *self.workers):
            os.set_inheritable(fd, True)
        path, arguments = sys.path, (self.primary.fileno(), self.trainer, state)
        code = f"import sys; sys.path[:] = {path!r}; from headrace.work.helper import main; main(*{arguments!r})"
        os.execv(sys.executable, [sys.executable, "-c", code])

    def resume(self, state: dict[str, Any]) -> None:
        """Go on with what was there before `_begin_again`."""
        self.avoided = state["avoided"]
        for fd in state["connections"]:
            os.set_inheritable(fd, False)
            if fd not in self.connections:
                self.connections[fd] = socket.socket(fileno=fd)
                self.poll.register(fd, select.POLLIN)
        for name, (pid, connection, end_s) in state["workers"].items():
            os.set_inheritable(int(name), False)
            self.workers[int(name)] = worker = _Forked(pid, connection)
            worker.end_s = end_s
            self.poll.register(int(name), select.POLLIN)

    def _fork(self, connection: socket.socket, message: dict[str, Any], worker_fd: int, *tracker_fd: int) -> None:
        helper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(worker_fd)
            self._tell(connection, {"failed": message["fork"], "why": str(error)})
            return
        finally:
            for fd in tracker_fd if os.getpid() == helper else ():
                os.close(fd)
        if pid == 0:
            self._become_worker(helper, message, worker_fd, *tracker_fd)
        os.close(worker_fd)
        fd = os.pidfd_open(pid)
        self.workers[fd] = _Forked(pid, connection.fileno())
        self.poll.register(fd, select.POLLIN)
        self._tell(connection, {"forked": message["fork"], "pid": pid})

    def _become_worker(self, helper: int, message: dict[str, Any], worker_fd: int, *tracker_fd: int) -> NoReturn:
        status = 1
        try:
            for fd in (*self.connections, *self.workers, self.trainer_fd):
                if fd is not None:
                    os.close(fd)
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == helper:
                _take_place(message)
                _be_related(message["authkey"], *tracker_fd)
                importlib.import_module("headrace.work.inheritance").apply(message["inherited"])
                sock = socket.socket(fileno=worker_fd)
                if message["start"] is None:
                    importlib.import_module("headrace.work.worker").main(sock, message["number"])
                else:
                    importlib.import_module("headrace.work.serve").main(sock, message["number"], message["start"])
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
        worker = self.workers.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(worker.pid, 0)
        connection = self.connections.get(worker.connection)
        if connection is not None:
            self._tell(connection, {"exited": worker.pid, "code": os.waitstatus_to_exitcode(status)})

    def _drop(self, fd: int) -> None:
        """A loader is gone: so are its workers, before its place among the descriptors is given away.

        Those that were dismissed may end by themselves.
        """
        self.poll.unregister(fd)
        self.connections.pop(fd).close()
        for worker_fd, worker in list(self.workers.items()):
            if worker.connection == fd:
                worker.connection = -1
                if worker.end_s is None:
                    worker.kill()
                    self._reap(worker_fd)

    def _tell(self, connection: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            send(connection, message)


def _take_place(message: dict[str, Any]) -> None:
    """Have the trainer's environment, path and folder."""
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.path[:] = message["path"]
    with contextlib.suppress(OSError, TypeError):
        os.chdir(message["folder"])


def _be_related(authkey: str, *tracker_fd: int) -> None:
    """Be to multiprocessing what a process of the trainer's own is: its managers and shared memory can be used."""
    from multiprocessing import current_process, resource_tracker

    current_process().authkey = bytes.fromhex(authkey)
    for fd in tracker_fd:  # with one of its own, what the user shares would be removed when this worker ends
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd, tracker._pid = fd, None


def _process_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def main(control_fd: int, trainer: int, state: dict[str, Any] | None = None) -> None:
    """Import what workers need, then fork one whenever the trainer asks, until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a helper with threads could not fork safely
    import torch

    torch.set_num_threads(1)
    importlib.import_module("headrace.work.worker")
    importlib.import_module("headrace.work.serve")
    importlib.import_module("headrace.work.keyed")
    importlib.import_module("headrace.torch_compat.worker_info").warm_up()
    with contextlib.suppress(ImportError):  # images are decoded more often than not: 40 ms less for each worker
        importlib.import_module("PIL.Image").preinit()
        importlib.import_module("simplejpeg")
    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    gc.collect()
    gc.freeze()  # workers share these pages for good
    helper = _Helper(socket.socket(fileno=control_fd), trainer)
    if state is not None:
        helper.resume(state)
    helper.serve()
