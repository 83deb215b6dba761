"""The trainer's side of the fork server, which all loaders of the process share."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from headrace._util.shared_memory import Segment
from headrace._util.wakeup import is_readable
from headrace.workers.forkserver.fd_socket import JSON, LoopWire, PolledWire
from headrace.workers.forkserver.inheritance import capture, described, next_number
from headrace.workers.forkserver.interpreter_flags import GRACE_S, boot, executable, stream
from headrace.workers.forkserver.stopped_workers import PATIENCE, Watch, is_stopped

log = logging.getLogger("headrace")

_ENDED = "the fork server has ended"
STOPPED = "the fork server, which starts workers, is stopped, and was waited for; another one takes its place"
_BOOT = (
    "import sys; sys.path[:] = {path}; from headrace.workers.forkserver.server import main; "
    "main({fd}, {pid}, {life}, {torch})"
)


class ForkServer:
    """The fork server. `acquire` starts it in the background or shares it.

    It outlives its last user for a while, as a new loader often follows and a start takes a second or more.
    """

    _lock = threading.RLock()  # reentrant: garbage collection may release another loader's fork server meanwhile
    _shared: ForkServer | None = None

    def __init__(self, *, with_torch: bool = True) -> None:
        self.owner, self._has_torch = os.getpid(), with_torch
        self.users = 0
        self._imported: dict[str, int] = {}  # modification times of modules' files
        python = executable()
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()  # the kernel ends the process if this end is closed while it still imports
        with theirs, os.fdopen(life), _beyond_streams(theirs.fileno()) as control, _beyond_streams(life) as alive:
            path = json.dumps([str(p) for p in sys.path])
            code = _BOOT.format(path=path, fd=control, pid=self.owner, life=alive, torch=with_torch)
            options, environment = boot()
            # Block Ctrl-C until the fork server can ignore it: it inherits this mask.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self.process = subprocess.Popen(
                    [python, *options, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=stream(1),
                    stderr=stream(2),
                    env=environment,
                    pass_fds=[control, alive],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control = PolledWire(ours, JSON)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if getattr(self, "_life", -1) >= 0:
            close(self._life)

    @classmethod
    def acquire(cls, modules: Mapping[str, int] | None = None, *, with_torch: bool = True) -> ForkServer:
        """Return the running fork server of this process. Each call needs a `release`.

        Args:
            modules: The modules of `prepare`. A fork server that has imported an older version of one is replaced.
            with_torch: Import torch before workers are forked for this user. Otherwise each worker that needs torch
                imports it.
        """
        with cls._lock:
            while True:
                shared = cls._shared
                if shared is None or not shared._serves(modules or {}):
                    if shared is not None and shared._is_idle:
                        shared._end()
                    shared = cls._shared = cls(with_torch=with_torch)
                if with_torch and not shared._has_torch:
                    shared._control.send({"torch": True})
                    shared._has_torch = True
                shared.users += 1
                if shared is cls._shared:  # not replaced by garbage collection just now
                    return shared

    def release(self) -> None:
        """Undo `acquire`. Without users the process ends some time later."""
        with self._lock:
            self.users -= 1
            if self._is_idle:
                if ForkServer._shared is self:
                    self._control.send({"idle": True})
                else:
                    self._end()

    @property
    def _is_idle(self) -> bool:
        return not self.users and self.owner == os.getpid()

    @classmethod
    def shut_down(cls, *, only_if_idle: bool = False) -> None:
        """End the process now, or with its last user. Later users get a new one."""
        with cls._lock:
            shared = cls._shared
            if shared is None or (only_if_idle and not shared._is_idle):
                return
            cls._shared = None
            if shared._is_idle:
                shared._end()

    def give_up(self) -> None:
        """Do not use this fork server for new users. Its workers continue."""
        with self._lock:
            if ForkServer._shared is self:
                ForkServer._shared = None

    def connect(self) -> socket.socket:
        """Open another control connection. Workers started over it end with it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._control.send({"attach": True}, [theirs.fileno()])
        return ours

    def prepare(self, orders: ForkServerCommands, modules: Mapping[str, int]) -> None:
        """Import modules once in the fork server, before it forks workers for the same connection."""
        new = sorted(modules.keys() - self._imported.keys())
        if new:
            orders.have_imported(new)
            self._imported.update(modules)

    def _serves(self, modules: Mapping[str, int]) -> bool:
        """True if it runs, belongs to this process, and has imported no older version of a module."""
        if self.owner != os.getpid() or self.process.poll() is not None:
            return False
        if any(self._imported.get(name, written) != written for name, written in modules.items()):
            return False
        return bool(self.users) or self._stays()

    def _stays(self) -> bool:
        """Ask an idle fork server to stay. Return True if it does."""
        self._control.send({"busy": True})
        watch = Watch()
        try:
            while not self._control.receive():
                is_readable(self._control.fileno(), PATIENCE.each_s)
                if watch.look([self.process.pid]):
                    log.warning(STOPPED)
                    return False
        except EOFError:
            return False
        return True

    def _end(self) -> None:
        self._control.close()
        os.close(self._life)
        self._life = -1
        if is_stopped(self.process.pid):
            self.process.kill()
        try:
            self.process.wait(GRACE_S + 1)  # dismissed workers may be in the middle of a sample
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel ends its workers
            self.process.wait()


atexit.register(ForkServer.shut_down, only_if_idle=True)


def shutdown() -> None:
    """End the processes that loaders keep for later ones: the fork server and released workers.

    Without this call the fork server ends 30 seconds after the last loader was closed, or with this process. The call
    waits for the end: some milliseconds, or some seconds if a worker is in the middle of a sample. Open loaders
    continue, and the fork server ends with the last of them. A later loader starts a new one, which takes a second or
    two. May be called at any time and repeatedly.

    Example:
        >>> sum(hr.DataLoader(range(4), batch_size=2, num_workers=1), start=0).tolist()
        [2, 4]
        >>> hr.shutdown()
    """
    ForkServer.shut_down()


class ForkServerCommands:
    """Commands to the fork server over one connection. None of them waits."""

    def __init__(self, send: Callable[[object, Sequence[int]], object]) -> None:
        self._send = send
        self._announced = b""

    def have_imported(self, modules: Sequence[str]) -> None:
        self._tell_place()
        self._send({"import": modules}, ())

    def fork(self, token: int, number: int, worker: socket.socket, start: int | None = None) -> None:
        """Fork a worker with one end of a socket pair. The answer has the token."""
        self._tell_place()
        descriptors = [worker.fileno(), *_tracker()]
        order = {"fork": token, "number": number, "start": start, "process": next_number()}
        self._send({**order, "descriptors": len(descriptors)}, descriptors)

    def _tell_place(self) -> None:
        """Send this process's surroundings if changed, in shared memory, as they may be large."""
        surroundings = json.dumps({**_place(), "child": described(), "inherited": capture()}).encode()
        if surroundings != self._announced:
            segment = Segment.create(len(surroundings))
            segment.view[:] = surroundings
            self._send({"place": segment.size}, [segment.fd])
            segment.close()
            self._announced = surroundings


class WorkerSpawner:
    """Starts the workers of one loader through the fork server, on the loader's event loop.

    Args:
        exited: Called with (pid, exit code) of each worker that ended. A negative code is a signal.
    """

    def __init__(self, fork_server: ForkServer, exited: Callable[[int, int], None], modules: Mapping[str, int]) -> None:
        self.fork_server = fork_server
        self._exited, self._modules = exited, modules
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._watch = Watch()
        self._left: list[LoopWire] = []  # to replaced fork servers, whose workers still run
        self._acquired: list[ForkServer] = []
        self._connect()

    def _connect(self) -> None:
        self._is_lost = False
        self._wire = LoopWire(self.fork_server.connect(), self._on_message, self._on_lost, JSON)
        self._orders = ForkServerCommands(self._wire.send)
        self.fork_server.prepare(self._orders, self._modules)

    def _renew(self) -> None:
        self.fork_server.give_up()
        self._left.append(self._wire)
        self.fork_server = ForkServer.acquire(self._modules)
        self._acquired.append(self.fork_server)
        self._connect()

    async def start(self, number: int) -> tuple[int, socket.socket]:
        """Start a worker, as soon as the fork server is ready.

        Raises:
            OSError: the fork server is gone or stopped. A new attempt uses another one.
        """
        if self._is_lost:
            self._renew()
        ours, theirs = socket.socketpair()
        token = next(self._numbers)
        self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                self._orders.fork(token, number, theirs)
            return await self._waiting[token], ours
        except BaseException:
            ours.close()
            raise
        finally:
            del self._waiting[token]

    def look(self) -> None:
        if self._watch.look([self.fork_server.process.pid] if self._waiting else ()):
            log.warning(STOPPED)
            self._renew()
            self._fail(STOPPED)

    def close(self) -> None:
        self._wire.send({"dismiss": True})  # workers have finalizers to run
        for wire in (self._wire, *self._left):
            wire.close()
        while self._acquired:
            self._acquired.pop().release()

    def _on_lost(self) -> None:
        self._is_lost = True
        self._fail(_ENDED)

    def _fail(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(OSError(why))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            asked = self._waiting.get(message["forked"])
            if asked is not None and not asked.done():
                asked.set_result(message["pid"])
        elif "failed" in message:
            asked = self._waiting.get(message["failed"])
            if asked is not None and not asked.done():
                asked.set_exception(OSError(message["why"]))
        elif "exited" in message:
            self._exited(message["exited"], message["code"])


@contextmanager
def _beyond_streams(fd: int) -> Iterator[int]:
    """Duplicate a descriptor above the numbers of the standard streams."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        yield copy
    finally:
        os.close(copy)


def _tracker() -> tuple[int, ...]:
    found: Any = resource_tracker._resource_tracker
    return () if found._fd is None else (found._fd,)


def _place() -> dict[str, object]:
    try:
        folder: str | None = str(Path.cwd())
    except OSError:  # the folder was removed
        folder = None
    return {"environment": dict(os.environ), "path": [str(p) for p in sys.path], "folder": folder}
