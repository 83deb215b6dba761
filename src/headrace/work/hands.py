"""How the workers of the torch regime come to be: from the helper process, by a multiprocessing context, as threads.

All give the same: something with the face of a `multiprocessing.Process`, and our end of a socket pair to it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
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

from headrace.memory import Segment
from headrace.torch_compat import packing
from headrace.torch_compat.carry import cannot_carry
from headrace.wakeup import is_readable
from headrace.work import helper as protocol
from headrace.work.job import Job
from headrace.work.serve import main_of_context, main_of_thread
from headrace.work.shelf import Shelf
from headrace.work.starter import Helper, fork_order, tracker

_AT_ONCE = 32  # descriptors in one message
_STATUS_S = 1.0  # how long the helper is waited for to say how a worker ended


class Hand(Protocol):
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


class Starter(Protocol):
    """Starts workers.

    Attributes:
        greeting: the messages, with descriptors, that a new worker is sent first.
        is_lost: whether no worker can be started any more.
    """

    @property
    def greeting(self) -> Sequence[tuple[Any, Sequence[int]]]: ...

    @property
    def is_lost(self) -> bool: ...

    def start(self, number: int, start: int) -> tuple[Hand, socket.socket]:
        """A new worker; `start` counts those that had its number before it."""
        ...

    def fileno(self) -> int:
        """What to wait on for news of workers, for `pump`; -1 where there are none."""
        ...

    def pump(self) -> None:
        """Take in the news that have come."""
        ...

    def close(self) -> None:
        """Let go of all workers: they end by themselves once their sockets are closed, or are made to."""
        ...


# The helper process.


class ForkedHand:
    """A worker that the helper process has forked, or will have."""

    def __init__(self, starter: HelperStarter) -> None:
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
            self._starter.wait(None)
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

    # Told by the starter.

    def forked(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def over(self, code: int | None) -> None:
        self._exitcode, self._is_over = code, True


class HelperStarter:
    """Workers that are forked from the helper process; their job is packed once for all.

    Args:
        job: what they work on.

    Raises:
        CannotCarryError: something in it cannot be sent to another process.
    """

    def __init__(self, job: Job) -> None:
        modules: set[str] = set()
        self._descriptors: list[int] = []
        try:
            parts = packing.pack_for_workers(job, self._descriptors, modules)
        except Exception as error:
            raise cannot_carry(
                error, dataset=job.dataset, collate_fn=job.collate_fn, worker_init_fn=job.init_fn
            ) from error
        self._segment = Segment.create(max(1, packing.packed_size(parts)))
        lengths = packing.write(parts, self._segment.view)
        groups = [self._descriptors[k : k + _AT_ONCE] for k in range(0, len(self._descriptors), _AT_ONCE)]
        self.greeting: list[tuple[Any, list[int]]] = [(("descriptors", len(group)), group) for group in groups]
        self.greeting.append((("job", self._segment.size, lengths), [self._segment.fd]))
        files = packing.files_of(modules)
        self._helper = Helper.acquire(files)
        self._sock = self._helper.connect()
        # Not in `close`: the helper tells over it how workers ended.
        weakref.finalize(self, self._sock.close).atexit = False
        with contextlib.suppress(OSError):  # `start` hears of it too
            self._helper.prepare(self._sock, files)
        self._lock = threading.RLock()
        self._asked: weakref.WeakValueDictionary[int, ForkedHand] = weakref.WeakValueDictionary()
        self._by_pid: weakref.WeakValueDictionary[int, ForkedHand] = weakref.WeakValueDictionary()
        self._tokens = itertools.count()
        self._owner = os.getpid()
        self._has_ended = self._is_closed = False

    def start(self, number: int, start: int) -> tuple[Hand, socket.socket]:
        token = next(self._tokens)
        order = fork_order(token, number, start)
        ours, theirs = socket.socketpair()
        hand = ForkedHand(self)
        with theirs, self._lock:
            self._asked[token] = hand
            try:
                protocol.send(self._sock, order, [theirs.fileno(), *tracker()])
            except OSError:
                hand.over(None)
                self._has_ended = True
        return hand, ours

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_lost(self) -> bool:
        return self._has_ended or self._helper.process.poll() is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news and take them in; whether there may be more."""
        if self._sock.fileno() < 0 or self._has_ended:
            for hand in (*self._asked.values(), *self._by_pid.values()):
                hand.over(None)
            return False
        if is_readable(self._sock.fileno(), timeout_s):
            self.pump()
        return True

    def pump(self) -> None:
        with self._lock:
            while self._sock.fileno() >= 0 and not self._has_ended and is_readable(self._sock.fileno(), 0):
                try:
                    got = protocol.receive(self._sock)
                except OSError:
                    got = None
                if got is None:
                    self._has_ended = True
                    return
                message = got[0]
                if "forked" in message:
                    hand = self._asked.pop(message["forked"], None)
                    if hand is not None:
                        hand.forked(message["pid"])
                        self._by_pid[message["pid"]] = hand
                elif "failed" in message:
                    hand = self._asked.pop(message["failed"], None)
                    if hand is not None:
                        hand.over(None)
                elif "exited" in message:
                    hand = self._by_pid.pop(message["exited"], None)
                    if hand is not None:
                        hand.over(message["code"])

    def close(self) -> None:
        if self._owner == os.getpid() and not self._is_closed:
            self._is_closed = True
            with self._lock, contextlib.suppress(OSError):
                protocol.send(self._sock, {"dismiss": True})
            self._helper.release()
        self._segment.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


# A multiprocessing context that the user has named.

_our_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ContextStarter:
    """Workers that a multiprocessing context starts from the trainer, as torch's loader starts its own.

    Args:
        context: such as `multiprocessing.get_context("fork")`.
        job: what they work on.
    """

    greeting, is_lost = (), False

    def __init__(self, context: Any, job: Job) -> None:
        self._context, self._job = context, job
        self._started: list[Any] = []
        self._owner = os.getpid()

    def start(self, number: int, start: int) -> tuple[Hand, socket.socket]:
        ours, theirs = socket.socketpair()
        _our_ends.add(ours)
        with theirs:
            process = self._context.Process(target=_run, args=(theirs, number, start, self._job), daemon=True)
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


def _run(sock: socket.socket, number: int, start: int, job: Job) -> None:
    for end in list(_our_ends):  # forked: the trainer alone must hold them, so that their closing is seen
        end.close()
    main_of_context(sock, number, start, job)


# Threads.


class ThreadHand:
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
        job: what they work on; the data set is the trainer's own object.
    """

    greeting, is_lost = (), False

    def __init__(self, job: Job) -> None:
        self._job = job
        self._shelves: list[Shelf] = []  # kept until then: batches of a thread that has ended may be on its shelf

    def start(self, number: int, start: int) -> tuple[Hand, socket.socket]:
        ours, theirs = socket.socketpair()
        shelf = Shelf()
        self._shelves.append(shelf)
        arguments = (theirs, number, start, self._job, shelf)
        thread = threading.Thread(target=main_of_thread, args=arguments, name=f"headrace-worker-{number}", daemon=True)
        thread.start()
        _ends_of_threads[thread] = ours
        return ThreadHand(thread), ours

    def fileno(self) -> int:
        return -1

    def pump(self) -> None:
        pass

    def close(self) -> None:
        for shelf in self._shelves:
            shelf.close()


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
