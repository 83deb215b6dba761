"""Workers forked by the fork server: clean processes, for which the job is pickled once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from headrace.drop_in.workers.messages import WorkerConfig
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.memory import Segment, close_all
from headrace.processes.fork_client import STOPPED, ForkServer, ForkServerCommands
from headrace.processes.inheritance import capture
from headrace.processes.stopped import PATIENCE, Watch
from headrace.processes.wire import JSON, PolledWire, in_groups
from headrace.torch_compat import serialize
from headrace.torch_compat.why_unpicklable import cannot_carry
from headrace.wakeup import is_readable, is_ready

log = logging.getLogger("headrace")

_STATUS_S = 1.0  # longest wait for the fork server to report a worker's exit code


class ForkedWorkerHandle:
    def __init__(self, starter: ForkServerStarter) -> None:
        self._starter = starter
        self._pid: int | None = None
        self._pidfd = -1
        self._exitcode: int | None = None
        self._is_over = False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._pidfd >= 0:
            close(self._pidfd)

    @property
    def pid(self) -> int | None:
        while self._pid is None and not self._is_over:
            self._starter.wait(PATIENCE.each_s)
            self._starter.look()
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._pidfd

    @property
    def exitcode(self) -> int | None:
        deadline = time.monotonic() + _STATUS_S
        while self._exitcode is None and not self.is_alive() and time.monotonic() < deadline:
            if not self._starter.wait(deadline - time.monotonic()):
                break
        return self._exitcode

    def is_alive(self) -> bool:
        if self._is_over or self.pid is None:
            return False
        return self._pidfd < 0 or not is_readable(self._pidfd, 0)

    def join(self, timeout: float | None = None) -> None:
        if not self._is_over and self.pid is not None and self._pidfd >= 0:
            is_readable(self._pidfd, timeout)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive() and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    # For the starter.

    @property
    def is_awaited(self) -> bool:
        return self._pid is None and not self._is_over

    def forked(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def over(self, code: int | None) -> None:
        self._exitcode, self._is_over = code, True


class ForkServerStarter:
    """Starts workers through the fork server. Their job is pickled once for all.

    Raises:
        CannotCarryError: a part of the job, or of the inherited settings, cannot be sent.
    """

    def __init__(self, config: WorkerConfig) -> None:
        modules: set[str] = set()
        capture()  # raise early, before anything was started
        self._descriptors: list[int] = []
        try:
            parts = serialize.pack_for_workers(config, self._descriptors, modules)
        except Exception as error:
            parts_of_job = {
                "dataset": config.dataset,
                "collate_fn": config.collate_fn,
                "worker_init_fn": config.init_fn,
            }
            raise cannot_carry(error, parts_of_job) from error
        self._segment = Segment.create(max(1, serialize.packed_size(parts)))
        lengths = serialize.write(parts, self._segment.view)
        self.greeting: list[tuple[object, Sequence[int]]] = [*in_groups(self._descriptors)]
        self.greeting.append((("job", self._segment.size, lengths), [self._segment.fd]))
        files = serialize.files_of(modules)
        self._fork_server = ForkServer.acquire(files)
        self._files = files
        self._watch = Watch()
        self._left: list[ForkServer] = []  # replaced ones, whose workers still run
        self._connect()
        self._lock = threading.RLock()
        self._asked: weakref.WeakValueDictionary[int, ForkedWorkerHandle] = weakref.WeakValueDictionary()
        self._by_pid: weakref.WeakValueDictionary[int, ForkedWorkerHandle] = weakref.WeakValueDictionary()
        self._tokens = itertools.count()
        self._owner = os.getpid()
        self._is_closed = False

    def _connect(self) -> None:
        self._wire = PolledWire(self._fork_server.connect(), JSON)
        # Not in `close`: the fork server reports exit codes over it.
        weakref.finalize(self, self._wire.close).atexit = False
        self.awaits_writing = self._has_ended = False
        self._orders = ForkServerCommands(self._send)
        self._fork_server.prepare(self._orders, self._files)

    def _renew(self) -> None:
        self._fork_server.give_up()
        self._left.append(self._fork_server)
        self._fork_server = ForkServer.acquire(self._files)
        self._connect()

    def look(self) -> list[WorkerHandle]:
        """Replace a stopped fork server. Return the workers that it did not start."""
        asked = [handle for handle in self._asked.values() if handle.is_awaited]
        if not self._watch.look([self._fork_server.process.pid] if asked else ()):
            return []
        log.warning(STOPPED)
        with self._lock:
            for handle in asked:
                handle.over(None)
            self._asked.clear()
            self._renew()
        return list(asked)

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        if self.is_lost:
            self._renew()
        token = next(self._tokens)
        ours, theirs = socket.socketpair()
        handle = ForkedWorkerHandle(self)
        with theirs, self._lock:
            self._asked[token] = handle
            try:
                self._orders.fork(token, number, theirs, start)
            except BaseException:
                ours.close()
                raise
        return handle, ours

    def fileno(self) -> int:
        return -1 if self._has_ended else self._wire.fileno()

    @property
    def is_lost(self) -> bool:
        return self._has_ended or self._fork_server.process.poll() is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for messages and handle them. Return False if there will be no more."""
        if self._wire.fileno() < 0 or self._has_ended:
            for handle in (*self._asked.values(), *self._by_pid.values()):
                handle.over(None)
            return False
        if is_ready(self._wire.fileno(), timeout_s, to_write=self.awaits_writing):
            self.pump()
        return True

    def pump(self) -> None:
        with self._lock:
            self.awaits_writing = not self._wire.flush()
            try:
                while self._wire.fileno() >= 0 and not self._has_ended and (messages := self._wire.receive()):
                    for message in messages:
                        self._take_in(message)
            except EOFError:
                self._has_ended = True

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        self.awaits_writing |= not self._wire.send(message, descriptors)

    def _take_in(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            handle = self._asked.pop(message["forked"], None)
            if handle is not None:
                handle.forked(message["pid"])
                self._by_pid[message["pid"]] = handle
        elif "failed" in message:
            handle = self._asked.pop(message["failed"], None)
            if handle is not None:
                handle.over(None)
        elif "exited" in message:
            handle = self._by_pid.pop(message["exited"], None)
            if handle is not None:
                handle.over(message["code"])

    def close(self) -> None:
        if self._owner == os.getpid() and not self._is_closed:
            self._is_closed = True
            with self._lock:
                self._send({"dismiss": True})
            for fork_server in (self._fork_server, *self._left):
                fork_server.release()
        self._segment.close()
        close_all(self._descriptors)
