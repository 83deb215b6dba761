"""The fork server: imports the workers' modules once, then forks workers in milliseconds.

The trainer starts it without forking itself and without importing `__main__` there. It never unpickles the user's
objects, imports the user's modules on demand, and has one thread. Workers end with it, and it ends with the trainer. It
watches its control sockets and the trainer's process descriptor. The socket alone is not enough, as a forked child of
the user may hold it open. PR_SET_PDEATHSIG would fire when the trainer's *thread* that started the fork server ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from headrace._util.shared_memory import close_all, mapped
from headrace._util.wakeup import is_readable
from headrace.workers.forkserver.client import GRACE_S
from headrace.workers.forkserver.fd_socket import JSON, PolledWire, is_stopped

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_IDLE_S = 30.0  # wait for a next loader
_REFUSING_S = 1.0  # time in which each order to fork is refused that was sent before the trainer knew
# Without these settings libraries start threads on import, and forks of a process with threads may hang.
_BLAS = "OPENBLAS_NUM_THREADS"
_WITHOUT_THREADS = {_BLAS: "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class _Forked:
    def __init__(self, pid: int, connection: int) -> None:
        self.pid, self.connection = pid, connection
        self.end_s: float | None = None  # deadline of a dismissed worker

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class _ForkServer:
    def __init__(self, primary: socket.socket, trainer: int, file_limits: tuple[int, int]) -> None:
        self.primary, self.trainer = primary.fileno(), trainer
        self.file_limits = file_limits  # limits of workers: soft, hard
        self.poll = select.poll()
        self.connections: dict[int, PolledWire] = {}
        self.places: dict[int, dict[str, object]] = {}  # the trainer's surroundings, by connection
        self.inbox: deque[tuple[int, Any]] = deque()
        self.workers: dict[int, _Forked] = {}  # by process descriptor
        self.is_ending = False
        self.idle_end_s = math.inf
        self.has_torch = False
        self.refusal: dict[str, object] | None = None  # names the module that has started a thread
        self.trainer_fd = _process_descriptor(trainer)
        if self.trainer_fd is not None:
            self.poll.register(self.trainer_fd, select.POLLIN)
        self._attach(primary)

    def serve(self) -> None:
        while not (self.is_ending and not self.workers):
            for fd, events in self.poll.poll(_PARENT_CHECK_S * 1000):
                if fd == self.trainer_fd:
                    return
                if fd in self.workers:
                    self._reap(fd)
                elif fd in self.connections and not self._on_event(fd, events):
                    self.is_ending |= fd == self.primary
                    for lost in list(self.connections) if self.is_ending else [fd]:
                        self._drop(lost)
                    break  # descriptor numbers may be reused: poll again
            while self.inbox:
                self._answer(*self.inbox.popleft())
            if os.getppid() != self.trainer:
                return
            now = time.monotonic()
            if now > self.idle_end_s and not self.workers:
                return
            for worker in self.workers.values():
                if worker.end_s is not None and worker.end_s <= now:
                    worker.kill()

    def _attach(self, connection: socket.socket) -> PolledWire:
        wire = self.connections[connection.fileno()] = PolledWire(connection, JSON)
        self.poll.register(wire, select.POLLIN)
        return wire

    def _on_event(self, fd: int, events: int) -> bool:
        """Send and receive without blocking. Return False at the connection's end."""
        wire = self.connections[fd]
        if events & select.POLLOUT and wire.flush():
            self.poll.modify(wire, select.POLLIN)
        if events & ~select.POLLOUT:
            try:
                self.inbox.extend((fd, message) for message in wire.receive())
            except EOFError:
                return False
        return True

    def _answer(self, fd: int, message: dict[str, Any]) -> None:
        wire = self.connections[fd]
        if "attach" in message:
            self._attach(socket.socket(fileno=wire.take_descriptor()))
        elif "idle" in message:
            self.idle_end_s = time.monotonic() + _IDLE_S
        elif "busy" in message:
            self.idle_end_s = math.inf
            self._tell(fd, {"ready": True})
        elif "torch" in message:
            self.import_torch()
        elif "place" in message:
            self.places[fd] = _read(wire.take_descriptor(), message["place"])
        elif "import" in message:
            self._import(self.places[fd], message["import"])
        elif "dismiss" in message:
            for worker in self.workers.values():
                if worker.connection == fd:
                    worker.end_s = time.monotonic() + (0 if is_stopped(worker.pid) else GRACE_S)
        else:
            self._fork(fd, message, *(wire.take_descriptor() for _ in range(message["descriptors"])))

    def import_torch(self) -> None:
        if self.has_torch:
            return
        self.has_torch = True
        with _frozen():
            import torch

            torch.set_num_threads(1)  # forks of a process with threads are not safe
            for name in ("workers.map_dataset_steps", "torch_regime.workers.worker_main"):
                importlib.import_module(f"headrace.{name}")
            importlib.import_module("headrace.torch_compat.worker_info").warm_up()

    def _import(self, place: dict[str, Any], names: Sequence[str]) -> None:
        """Import modules for all workers. A module that fails here fails again in each of them.

        After a module that starts a thread nothing is forked any more: a fork would never see the thread's locks
        released. The trainer then starts another fork server, which does without that module.
        """
        before = sys.path[:]
        _take_place(place)
        for variable, value in _WITHOUT_THREADS.items():  # workers get the trainer's values
            os.environ.setdefault(variable, value)
        for name in names:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
            if _has_threads():
                self.refusal = {"server": os.getpid(), "threaded": name}
                break
        sys.path[:] = before
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        gc.freeze()

    def _fork(self, connection: int, order: dict[str, object], worker_fd: int, *tracker_fd: int) -> None:
        if self.refusal is not None:
            self._close_and_tell([worker_fd, *tracker_fd], connection, {"failed": order["fork"], **self.refusal})
            self.idle_end_s = time.monotonic() + _REFUSING_S
            return
        fork_server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._close_and_tell([worker_fd, *tracker_fd], connection, {"failed": order["fork"], "why": str(error)})
            return
        if pid == 0:
            self._become_worker(fork_server, {**self.places[connection], **order}, worker_fd, *tracker_fd)
        fd = os.pidfd_open(pid)
        self.workers[fd] = _Forked(pid, connection)
        self.poll.register(fd, select.POLLIN)
        self._close_and_tell([worker_fd, *tracker_fd], connection, {"forked": order["fork"], "pid": pid})

    def _become_worker(
        self, fork_server: int, message: dict[str, object], worker_fd: int, *tracker_fd: int
    ) -> NoReturn:
        status = 1
        try:
            for wire in self.connections.values():
                wire.close()  # with the descriptors of workers to be forked next
            for fd in self.workers:
                os.close(fd)
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == fork_server:
                resource.setrlimit(resource.RLIMIT_NOFILE, self.file_limits)
                _take_place(message)
                run = partial(_work, message, worker_fd)
                live = importlib.import_module("headrace.workers.forkserver.inheritance").live
                status = live(message["inherited"], message["process"], run, self.trainer_fd, *tracker_fd)
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
        if worker.connection in self.connections:
            self._tell(worker.connection, {"exited": worker.pid, "code": os.waitstatus_to_exitcode(status)})

    def _drop(self, fd: int) -> None:
        """End a loader's workers, before the number of its descriptor is reused.

        Dismissed workers may end by themselves. So may all workers once the trainer ends this process.
        """
        self.poll.unregister(fd)
        self.connections.pop(fd).close()
        self.places.pop(fd, None)
        self.inbox = deque((of, message) for of, message in self.inbox if of != fd)
        for worker_fd, worker in list(self.workers.items()):
            if worker.connection == fd:
                worker.connection = -1
                if worker.end_s is None and self.is_ending:
                    worker.end_s = time.monotonic() + (0 if is_stopped(worker.pid) else GRACE_S)
                elif worker.end_s is None:
                    worker.kill()
                    self._reap(worker_fd)

    def _close_and_tell(self, descriptors: list[int], connection: int, message: dict[str, object]) -> None:
        close_all(descriptors)
        self._tell(connection, message)

    def _tell(self, connection: int, message: dict[str, object]) -> None:
        wire = self.connections[connection]
        if not wire.send(message):
            self.poll.modify(wire, select.POLLIN | select.POLLOUT)


def _has_threads() -> bool:
    tasks = Path("/proc/self/task")
    return tasks.exists() and len(list(tasks.iterdir())) > 1


def _read(fd: int, size: int) -> Any:
    try:
        return json.loads(bytes(mapped(fd, size)))
    finally:
        os.close(fd)


def _take_place(message: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.path[:] = message["path"]
    with contextlib.suppress(OSError, TypeError):
        os.chdir(message["folder"])


def _work(message: dict[str, object], worker_fd: int) -> None:
    with socket.socket(fileno=worker_fd) as sock:  # otherwise users would see a ResourceWarning
        if message["start"] is None:
            importlib.import_module("headrace.workers.worker_main").main(sock, message["number"])
        else:
            importlib.import_module("headrace.torch_regime.workers.worker_main").main(
                sock, message["number"], message["start"]
            )


def _process_descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Return a context for permanent imports, whose memory workers share, without BLAS threads."""
    before = os.environ.get(_BLAS)
    os.environ[_BLAS] = "1"  # forks of a process with threads are not safe
    gc.disable()  # collections would take a sixth of the import time, and find almost nothing
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        del os.environ[_BLAS]
        os.environ.update({} if before is None else {_BLAS: before})


def main(control_fd: int, trainer: int, life_fd: int, with_torch: bool) -> None:
    """Import the workers' modules, then fork workers on request until the trainer is gone.

    Args:
        with_torch: True to import torch too.
        life_fd: A pipe whose other end the trainer has. During imports, which take seconds, this process polls nothing.
            The kernel ends it when the pipe ends.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_fd, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO
    if os.getppid() != trainer or is_readable(life_fd, 0):  # the trainer ended before
        return
    file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limits[1],) * 2)  # it holds descriptors for each worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with _frozen():
        for name in ("workers.forkserver.inheritance", "workers.worker_main"):
            importlib.import_module(f"headrace.{name}")
        with contextlib.suppress(ImportError):  # most data has images: saves each worker 40 ms
            importlib.import_module("PIL.Image").preinit()
            importlib.import_module("simplejpeg")
    fork_server = _ForkServer(socket.socket(fileno=control_fd), trainer, file_limits)
    if with_torch:
        fork_server.import_torch()
    os.close(life_fd)
    fork_server.serve()
