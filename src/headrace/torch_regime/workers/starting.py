"""Starts workers: with a multiprocessing context, with the fork server, or as threads.

Each starter returns a handle with the interface of `multiprocessing.Process`, and the trainer's end of a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any

from headrace._util.shared_memory import require_descriptors
from headrace._util.wakeup import is_readable, is_ready
from headrace.torch_compat import serialize
from headrace.torch_compat.picklers import begin_forked_worker, share_classes
from headrace.torch_compat.serialize import cannot_carry
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_regime.workers.worker_main import WorkerConfig, main_of_context, main_of_thread
from headrace.workers.chains import PackedChains
from headrace.workers.forkserver.client import GRACE_S, ForkServer, Spawner
from headrace.workers.forkserver.fd_socket import JSON, PATIENCE, ObjectCodec, PolledWire, in_groups
from headrace.workers.forkserver.inheritance import capture

_STATUS_S = 1.0  # longest wait for the fork server to report a worker's exit code

log = logging.getLogger("headrace")


def starter(loader: TorchLoader[object], config: WorkerConfig) -> WorkerStarter:
    """Return the starter of an iterator's workers.

    Where processes are not forked by default (Python 3.14, macOS), headrace's fork server forks them. Unlike the
    standard library's, it accepts lambdas, and scripts without a main guard.

    Raises:
        CannotCarryError: a part of the job cannot be sent to the fork server's workers.
        OptionError: this process cannot open as many files as the workers need.
    """
    if loader.workers == "thread":
        return _ThreadStarter(config)
    require_descriptors(loader.num_workers, reads=False)
    if has_fork_server(loader):
        return _ForkServerStarter(config)
    return _ContextStarter(loader.multiprocessing_context or multiprocessing, config)


def has_fork_server(loader: TorchLoader[object]) -> bool:
    """True if headrace's fork server starts workers. Leaves multiprocessing's start method open."""
    if loader.workers == "thread" or loader.multiprocessing_context is not None:
        return False
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) != "fork"


# Workers started by a multiprocessing context, as torch's loader does.

_our_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class _ContextStarter:
    greeting = ()

    def __init__(self, context: Any, config: WorkerConfig) -> None:
        self._context, self._config = context, config
        self._started: list[BaseProcess] = []
        self._owner = os.getpid()
        # Forked workers have the script's own classes, not copies: both sides refer to them.
        self._classes = share_classes() if context.get_start_method() == "fork" else []

    def start(self, number: int, start: int) -> tuple[WorkerHandle, PolledWire]:
        ours, theirs = socket.socketpair()
        _our_ends.add(ours)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            process = self._context.Process(target=_run, args=(theirs, number, start, self._config), daemon=True)
            try:
                process.start()
            except (TypeError, AttributeError, PicklingError):
                warnings.warn(
                    "Got pickle error when attempting to start a worker Process. What it is given cannot be pickled; "
                    "multiprocessing_context='fork' gives it without.",
                    stacklevel=2,
                )
                raise
            failed.pop_all()
        self._started.append(process)
        return process, PolledWire(ours)

    def close(self) -> None:
        started, self._started = self._started, []
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + GRACE_S
        for process in started:  # this process must reap its children
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run(sock: socket.socket, number: int, start: int, config: WorkerConfig) -> None:
    for end in list(_our_ends):  # forked copies would hide the trainer's close
        end.close()
    begin_forked_worker()
    main_of_context(sock, number, start, config)


# Threads of the trainer's process. Their data set is the trainer's own object.


class _WorkerThread(threading.Thread):
    """A thread with the interface of a worker process."""

    sentinel = -1

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else 0

    def terminate(self) -> None:
        """Do nothing: a thread ends after its task, once its socket is closed."""

    kill = terminate


class _ThreadStarter:
    greeting = ()

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._codecs: list[ObjectCodec] = []

    def start(self, number: int, start: int) -> tuple[WorkerHandle, PolledWire]:
        ours, theirs = socket.socketpair()
        codec = ObjectCodec()
        self._codecs.append(codec)
        arguments = (theirs, number, start, self._config, codec)
        thread = _WorkerThread(target=main_of_thread, args=arguments, name=f"headrace-worker-{number}", daemon=True)
        thread.start()
        _ends_of_threads[thread] = ours
        return thread, PolledWire(ours, codec)

    def close(self) -> None:
        for codec in self._codecs:
            codec.close()


_ends_of_threads: weakref.WeakKeyDictionary[threading.Thread, socket.socket] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End all threads: one that runs torch code during interpreter shutdown would abort it."""
    for end in list(_ends_of_threads.values()):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + GRACE_S
    for thread in list(_ends_of_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


# Processes forked by the fork server: clean ones, for which the job is pickled once.


class _ForkServerHandle:
    """A worker process of the fork server. `pid` is None if it could not be forked."""

    def __init__(self, starter: _ForkServerStarter, pid: int | None) -> None:
        self._starter, self.pid = starter, pid
        self.sentinel = -1
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self.sentinel = os.pidfd_open(pid)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.sentinel >= 0:
            close(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        return None if self.pid is None or self.is_alive() else self._starter.exit_code(self.pid)

    def is_alive(self) -> bool:
        return self.sentinel >= 0 and not is_readable(self.sentinel, 0)

    def join(self, timeout: float | None = None) -> None:
        if self.sentinel >= 0:
            is_readable(self.sentinel, timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, number)


class _ForkServerStarter(Spawner[PolledWire]):
    """Raises CannotCarryError if a part of the job, or of the inherited settings, cannot be sent."""

    def __init__(self, config: WorkerConfig) -> None:
        modules: set[str] = set()
        capture()  # raise early, before anything was started
        descriptors: list[int] = []
        try:
            parts = serialize.pack_for_workers(config, descriptors, modules)
        except Exception as error:
            parts_of_job = {
                "dataset": config.dataset,
                "collate_fn": config.collate_fn,
                "worker_init_fn": config.init_fn,
            }
            raise cannot_carry(error, parts_of_job) from error
        self._job = job = PackedChains(parts, descriptors)
        self.greeting: list[tuple[object, Sequence[int]]] = [*in_groups(descriptors)]
        self.greeting.append((("job", job.segment.size, job.lengths), [job.segment.fd]))
        self._lock = threading.RLock()
        self._pids: dict[int, int | None] = {}  # by token. None: the fork failed
        self._codes: dict[int | None, int] = {}  # exit code by process
        self._owner = os.getpid()
        self._is_closed = False
        files = serialize.files_of(modules)
        super().__init__(ForkServer.acquire(files), self._codes.__setitem__, files)
        self._acquired.append(self.fork_server)

    def _wire_of(self, sock: socket.socket) -> PolledWire:
        self._has_ended = False
        wire = PolledWire(sock, JSON)
        # Not in `close`: the fork server reports exit codes over it.
        weakref.finalize(self, wire.close).atexit = False
        return wire

    def start(self, number: int, start: int) -> tuple[WorkerHandle, PolledWire]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._forked(number, theirs, start)
            except BaseException:
                ours.close()
                raise
        return _ForkServerHandle(self, pid), PolledWire(ours)

    def _forked(self, number: int, worker: socket.socket, start: int) -> int | None:
        """Wait for the fork of a worker. None: it failed."""
        while True:
            if self._is_lost or self._has_ended or self.fork_server.process.poll() is not None:
                self._renew()
            token = next(self._tokens)
            self._order(token, number, worker, start)
            while token not in self._pids and not self._has_stopped():
                if not self._wait(PATIENCE.each_s):
                    return None
            if not self._is_lost:
                return self._pids.pop(token)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended. None: it is not known."""
        deadline = time.monotonic() + _STATUS_S
        while pid not in self._codes and self._wait(deadline - time.monotonic()) and time.monotonic() < deadline:
            pass
        return self._codes.get(pid)

    def _wait(self, timeout_s: float) -> bool:
        """Handle the fork server's messages, after at most `timeout_s` seconds. Return False after its end."""
        with self._lock:
            if self._has_ended or self._wires[-1].fileno() < 0:
                return False
            wire, is_sent = self._wires[-1], self._wires[-1].flush()
        if is_ready(wire.fileno(), timeout_s, to_write=not is_sent):
            with self._lock:
                try:
                    for message in wire.receive():
                        self._on_message(message)
                except EOFError:
                    self._has_ended = True
        return True

    def _answer(self, token: int, pid: int | None, why: str | None = None) -> None:
        del why
        self._pids[token] = pid
        self._codes.pop(pid, None)  # of an earlier process with this number

    def close(self) -> None:
        if self._owner == os.getpid() and not self._is_closed:
            self._is_closed = True
            with self._lock:
                self._dismiss()
            self._release()
        self._job.close()


WorkerHandle = BaseProcess | _WorkerThread | _ForkServerHandle
"""A worker in `iterator._workers`, with multiprocessing's names. `sentinel` is -1 if there is no such descriptor."""

WorkerStarter = _ContextStarter | _ThreadStarter | _ForkServerStarter
"""`start` starts a worker. Its argument `start` counts earlier workers with this number. `greeting` has the first
messages to each worker, with descriptors that stay open until `close`. After `close`, workers end once their connection
is closed, or are made to."""
