"""The trainer's side of the fork server: one for all loaders, there while any of them needs it."""

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

from headrace.memory import Segment
from headrace.processes import fork_server as protocol
from headrace.processes.boot import boot, executable, stream
from headrace.processes.child import described, next_number
from headrace.processes.inheritance import capture
from headrace.processes.stopped import PATIENCE, Watch, is_stopped
from headrace.processes.wire import JSON, LoopWire, PolledWire
from headrace.wakeup import is_readable

log = logging.getLogger("headrace")

_ENDED = "the fork server has ended"
STOPPED = "the fork server, which starts workers, is stopped, and was waited for; another one takes its place"
_BOOT = (
    "import sys; sys.path[:] = {path}; from headrace.processes.fork_server import main; "
    "main({fd}, {pid}, {life}, {torch})"
)


class ForkServer:
    """The fork server: `acquire` starts it in the background or shares it.

    It outlives its last user for a while, as a new loader often follows: to start it takes a second or more.
    """

    _lock = threading.RLock()  # a collection of garbage while it is held may release the fork server of another loader
    _shared: ForkServer | None = None

    def __init__(self, *, with_torch: bool = True) -> None:
        self.owner, self._has_torch = os.getpid(), with_torch
        self.users = 0
        self._imported: dict[str, int] = {}  # modules, and when their files were written
        python = executable()
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()  # the process ends at once if this end is closed while it still imports
        with theirs, os.fdopen(life), _beyond_streams(theirs.fileno()) as control, _beyond_streams(life) as alive:
            path = json.dumps([str(p) for p in sys.path])
            code = _BOOT.format(path=path, fd=control, pid=self.owner, life=alive, torch=with_torch)
            options, environment = boot()
            # Ctrl-C before the fork server can ignore it is no business of its own either: it inherits our mask.
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
        """The fork server of this process, which keeps running until it is released as often as it was acquired.

        Args:
            modules: what `prepare` will be told; a fork server that has imported an older one of them is not taken.
            with_torch: have it import torch before it forks workers for this user. Workers that are without it import
                it where they need it after all, each for itself.
        """
        with cls._lock:
            while True:
                shared = cls._shared
                if shared is None or not shared._serves(modules or {}):
                    if shared is not None and not shared.users and shared.owner == os.getpid():
                        shared._end()
                    shared = cls._shared = cls(with_torch=with_torch)
                if with_torch and not shared._has_torch:
                    shared._control.send({"torch": True})
                    shared._has_torch = True
                shared.users += 1
                if shared is cls._shared:  # and was not replaced as some user's garbage was collected just now
                    return shared

    def release(self) -> None:
        """One user less. Without any the process ends some time later."""
        with self._lock:
            self.users -= 1
            if self.users or self.owner != os.getpid():
                return
            if ForkServer._shared is self:
                self._control.send({"idle": True})
            else:
                self._end()

    @classmethod
    def end_idle(cls) -> None:
        """End the process now if it has no users, and wait for its end."""
        with cls._lock:
            shared = cls._shared
            if shared is not None and not shared.users and shared.owner == os.getpid():
                cls._shared = None
                shared._end()

    @classmethod
    def shut_down(cls) -> None:
        """End the process now; if it has users, with the last of them. A next user has another one."""
        with cls._lock:
            shared, cls._shared = cls._shared, None
            if shared is not None and not shared.users and shared.owner == os.getpid():
                shared._end()

    def give_up(self) -> None:
        """Have it start no more workers, for whoever asks next: it does nothing. Those that it has started live on."""
        with self._lock:
            if ForkServer._shared is self:
                ForkServer._shared = None

    def connect(self) -> socket.socket:
        """A control connection of one's own; workers that were started over it end with it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._control.send({"attach": True}, [theirs.fileno()])
        return ours

    def prepare(self, orders: ForkServerCommands, modules: Mapping[str, int]) -> None:
        """Have modules imported once, before workers are forked over the same connection, instead of by each of them.

        Args:
            modules: by name when their files were written, in nanoseconds.
        """
        new = sorted(modules.keys() - self._imported.keys())
        if new:
            orders.have_imported(new)
            self._imported.update(modules)

    def _serves(self, modules: Mapping[str, int]) -> bool:
        """Whether it runs, in this process, and has nothing imported that has changed since."""
        if self.owner != os.getpid() or self.process.poll() is not None:
            return False
        if any(self._imported.get(name, written) != written for name, written in modules.items()):
            return False
        return bool(self.users) or self._stays()

    def _stays(self) -> bool:
        """Tell an idle fork server to stay. Return True if it does."""
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
            self.process.wait(protocol.GRACE_S + 1)  # workers that were dismissed may be in the middle of a sample
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers are told by the kernel
            self.process.wait()


atexit.register(ForkServer.end_idle)


def shutdown() -> None:
    """Ends what loaders have left running for a next one: the fork server, and workers that were let go of.

    Without it the process stays for 30 seconds after the last loader was closed, or until this process ends. It is
    waited for: some milliseconds, or some seconds where a worker is in the middle of a sample. Loaders that are still
    open go on, and the process ends with the last of them. A loader that is made later starts another one, which takes
    a second or two. May be called at any time, and as often as one likes.

    Example:
        >>> import headrace as hr
        >>> sum(hr.DataLoader(range(4), batch_size=2, num_workers=1), start=0).tolist()
        [2, 4]
        >>> hr.shutdown()
    """
    ForkServer.shut_down()


class ForkServerCommands:
    """What the fork server is told over one connection; nothing here waits for it.

    Args:
        send: sends a message, with descriptors that may be closed afterwards.
    """

    def __init__(self, send: Callable[[object, Sequence[int]], object]) -> None:
        self._send = send
        self._announced = b""

    def have_imported(self, modules: Sequence[str]) -> None:
        """Have it import modules, before what is ordered next."""
        self._tell_place()
        self._send({"import": modules}, ())

    def fork(self, token: int, number: int, worker: socket.socket, start: int | None = None) -> None:
        """Have it fork a worker, which it tells with the token.

        Args:
            worker: the worker's end of its socket pair.
            start: for a worker of the torch regime how many had its number before it.
        """
        self._tell_place()
        descriptors = [worker.fileno(), *_tracker()]
        order = {"fork": token, "number": number, "start": start, "process": next_number()}
        self._send({**order, "descriptors": len(descriptors)}, descriptors)

    def _tell_place(self) -> None:
        """Send this process's surroundings if they have changed: in memory, as they may be large."""
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
        exited: called with (pid, exit code; minus the signal where one ended it) of each worker that ended.
        modules: what the workers will need, as far as that is known, for `ForkServer.prepare`.
    """

    def __init__(self, fork_server: ForkServer, exited: Callable[[int, int], None], modules: Mapping[str, int]) -> None:
        self.fork_server = fork_server
        self._exited, self._modules = exited, modules
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._watch = Watch()
        self._left: list[LoopWire] = []  # to fork servers that have started workers, and start no more
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
        """A new worker, as soon as the fork server is ready.

        Raises:
            OSError: the fork server is gone, or does nothing; at another attempt there is another one.
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
        """Give the fork server up if it is stopped, and a worker is waited for."""
        if self._watch.look([self.fork_server.process.pid] if self._waiting else ()):
            log.warning(STOPPED)
            self._renew()
            self._fail(STOPPED)

    def close(self) -> None:
        self._wire.send({"dismiss": True})  # they have finalizers to run
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
    """A copy of a descriptor whose number is none of a standard stream's, which another process has for itself."""
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
    except OSError:  # it was removed
        folder = None
    return {"environment": dict(os.environ), "path": [str(p) for p in sys.path], "folder": folder}
