"""How the workers of the torch regime come to be: from the fork server, by a multiprocessing context, as threads.

All give the same: something with the face of a `multiprocessing.Process`, and our end of a socket pair to it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pickle import PicklingError
from typing import Any, Protocol

from headrace.drop_in.workers.batch_builder import WorkerConfig
from headrace.drop_in.workers.object_table import ObjectTable
from headrace.drop_in.workers.worker_main import main_of_context, main_of_thread
from headrace.memory import Segment, close_all
from headrace.processes import fork_server as protocol
from headrace.processes.fork_client import STOPPED, ForkServer, ForkServerCommands
from headrace.processes.inheritance import capture
from headrace.processes.stopped import PATIENCE, Watch
from headrace.processes.wire import JSON, PolledWire, in_groups
from headrace.torch_compat import serialize
from headrace.torch_compat.why_unpicklable import cannot_carry
from headrace.wakeup import is_readable, is_ready

log = logging.getLogger("headrace")

_STATUS_S = 1.0  # how long the fork server is waited for to say how a worker ended


class WorkerHandle(Protocol):
    """A worker as people reach for it in `iterator._workers`; the names are multiprocessing's."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once it has ended; -1 while there is none."""
        ...


class WorkerStarter(Protocol):
    """Starts workers.

    Attributes:
        greeting: the messages, with descriptors that stay open until `close`, that a new worker is sent first.
    """

    @property
    def greeting(self) -> Sequence[tuple[Any, Sequence[int]]]: ...

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        """A new worker; `start` counts those that had its number before it."""
        ...

    def fileno(self) -> int:
        """What to wait on for news of workers, for `pump`; -1 where there are none."""
        ...

    @property
    def awaits_writing(self) -> bool:
        """Whether to wait there for room to write, too."""
        ...

    def pump(self) -> None:
        """Take in the news that have come, and send what could not be sent yet."""
        ...

    def look(self) -> list[WorkerHandle]:
        """Those of the workers that were asked for in vain, as whoever was to start them does nothing."""
        ...

    def close(self) -> None:
        """Let go of all workers: they end by themselves once their sockets are closed, or are made to."""
        ...


# The fork server.


class ForkedWorkerHandle:
    """A worker that the fork server has forked, or will have."""

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

    # Asked, and told, by the starter.

    @property
    def is_awaited(self) -> bool:
        """Whether it has been ordered, and is not there yet."""
        return self._pid is None and not self._is_over

    def forked(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def over(self, code: int | None) -> None:
        self._exitcode, self._is_over = code, True


class ForkServerStarter:
    """Workers that are forked from the fork server; their job is packed once for all.

    Args:
        config: what they work on.

    Raises:
        CannotCarryError: something in it, or of what workers inherit, cannot be sent to another process.
    """

    def __init__(self, config: WorkerConfig) -> None:
        modules: set[str] = set()
        capture()  # which may not do; while nothing has begun, something else can still be done
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
        self.greeting: list[tuple[Any, Sequence[int]]] = [*in_groups(self._descriptors)]
        self.greeting.append((("job", self._segment.size, lengths), [self._segment.fd]))
        files = serialize.files_of(modules)
        self._fork_server = ForkServer.acquire(files)
        self._files = files
        self._watch = Watch()
        self._left: list[ForkServer] = []  # that have started workers, and start no more
        self._connect()
        self._lock = threading.RLock()
        self._asked: weakref.WeakValueDictionary[int, ForkedWorkerHandle] = weakref.WeakValueDictionary()
        self._by_pid: weakref.WeakValueDictionary[int, ForkedWorkerHandle] = weakref.WeakValueDictionary()
        self._tokens = itertools.count()
        self._owner = os.getpid()
        self._is_closed = False

    def _connect(self) -> None:
        self._wire = PolledWire(self._fork_server.connect(), JSON)
        # Not in `close`: the fork server tells over it how workers ended.
        weakref.finalize(self, self._wire.close).atexit = False
        self.awaits_writing = self._has_ended = False
        self._orders = ForkServerCommands(self._send)
        self._fork_server.prepare(self._orders, self._files)

    def _renew(self) -> None:
        """Have another fork server, which starts all workers from now on."""
        self._fork_server.give_up()
        self._left.append(self._fork_server)
        self._fork_server = ForkServer.acquire(self._files)
        self._connect()

    def look(self) -> list[WorkerHandle]:
        """The workers that a stopped fork server was to start, and will not; another one can be asked for them."""
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
        """Wait for news and take them in; whether there may be more."""
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

    def _send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
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


# A multiprocessing context that the user has named.

_our_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ContextStarter:
    """Workers that a multiprocessing context starts from the trainer, as torch's loader starts its own.

    Args:
        context: such as `multiprocessing.get_context("fork")`.
        config: what they work on.
    """

    greeting, awaits_writing = (), False

    def __init__(self, context: Any, config: WorkerConfig) -> None:
        self._context, self._config = context, config
        self._started: list[Any] = []
        self._owner = os.getpid()

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        ours, theirs = socket.socketpair()
        _our_ends.add(ours)
        with theirs:
            process = self._context.Process(target=_run, args=(theirs, number, start, self._config), daemon=True)
            try:
                process.start()
            except (TypeError, AttributeError, PicklingError):
                ours.close()
                warnings.warn(
                    "Got pickle error when attempting to start a worker Process. What it is given cannot be pickled; "
                    "multiprocessing_context='fork' gives it without.",
                    stacklevel=2,
                )
                raise
            except BaseException:
                ours.close()
                raise
        self._started.append(process)
        return process, ours

    def fileno(self) -> int:
        return -1

    def pump(self) -> None:
        pass

    def look(self) -> list[WorkerHandle]:
        return []

    def close(self) -> None:
        started, self._started = self._started, []
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + protocol.GRACE_S
        for process in started:  # they are children of this process, which has to reap them
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run(sock: socket.socket, number: int, start: int, config: WorkerConfig) -> None:
    for end in list(_our_ends):  # forked: the trainer alone must hold them, so that their closing is seen
        end.close()
    main_of_context(sock, number, start, config)


# Threads.


class ThreadWorkerHandle:
    """A worker that is a thread of the trainer's process."""

    sentinel = -1

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    @property
    def pid(self) -> int | None:
        return os.getpid()

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else 0

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def terminate(self) -> None:
        """A thread cannot be ended from outside: it ends with its task, once its socket is closed."""

    kill = terminate


class ThreadStarter:
    """Workers that are threads of the trainer's process.

    Args:
        config: what they work on; the data set is the trainer's own object.
    """

    greeting, awaits_writing = (), False

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._shelves: list[ObjectTable] = []  # kept until then: batches of a thread that has ended may be in its table

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        ours, theirs = socket.socketpair()
        table = ObjectTable()
        self._shelves.append(table)
        arguments = (theirs, number, start, self._config, table)
        thread = threading.Thread(target=main_of_thread, args=arguments, name=f"headrace-worker-{number}", daemon=True)
        thread.start()
        _ends_of_threads[thread] = ours
        return ThreadWorkerHandle(thread), ours

    def fileno(self) -> int:
        return -1

    def pump(self) -> None:
        pass

    def look(self) -> list[WorkerHandle]:
        return []

    def close(self) -> None:
        for table in self._shelves:
            table.close()


_ends_of_threads: weakref.WeakKeyDictionary[threading.Thread, socket.socket] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """What a thread does in torch while the interpreter ends would abort it."""
    for end in list(_ends_of_threads.values()):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + protocol.GRACE_S
    for thread in list(_ends_of_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
