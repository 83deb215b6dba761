"""The trainer's side of the fork server, which all loaders of the process share."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import functools
import itertools
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from headrace._util.shared_memory import Segment
from headrace._util.wakeup import is_readable
from headrace.errors import OptionError
from headrace.workers.forkserver.fd_socket import JSON, PATIENCE, LoopWire, PolledWire, Watch, is_stopped

GRACE_S = 5.0  # time for dismissed workers to end their current tasks
_SEED = "PYTHONHASHSEED"
_NAMES = re.compile(r"python|pypy", re.IGNORECASE)  # names of interpreters
_MOST = 2**32 - 1  # largest seed that Python accepts


def executable() -> str:
    """Return the Python interpreter for new processes. multiprocessing's setting has priority.

    Raises:
        OptionError: this process is a program that embeds Python, and no interpreter was found.
    """
    from multiprocessing import spawn

    told = os.fsdecode(spawn.get_executable() or b"")
    if told and told != sys.executable:
        return told
    if not getattr(sys, "frozen", False):  # a frozen program has no interpreter
        ours = sys.executable or ""
        if any(_NAMES.match(Path(path).name) for path in (ours, os.path.realpath(ours))):
            return ours
        for folder in (sys.prefix, sys.exec_prefix, sys.base_exec_prefix):
            if os.access(beside := f"{folder}/bin/python{sys.version_info[0]}.{sys.version_info[1]}", os.X_OK):
                return beside
    raise OptionError(
        f"workers need a Python interpreter, and sys.executable is {sys.executable!r}: call "
        "multiprocessing.set_executable('/path/to/python') before the loader is used"
    )


def stream(fd: int) -> int | None:
    """Return the `subprocess.Popen` argument for stdout (1) or stderr (2).

    A stream that is closed here must not become the number of the first file that the new process opens.
    """
    try:
        is_open = os.get_inheritable(fd)  # False for files that Python opened under the number of a closed stream
    except OSError:
        is_open = False
    return None if is_open else subprocess.DEVNULL


def boot() -> tuple[list[str], dict[str, str]]:
    """Return options and environment for the fork server's interpreter.

    `hash` of text is equal in all workers of all loaders of this process, and if possible equal to this process's.
    Workers later get this process's environment and warning options: with errors from warnings, imports could fail.
    """
    given: Any = subprocess
    options = [flag for flag in given._args_from_interpreter_flags() if not flag.startswith("-W")]
    environment = dict(os.environ)
    if sys.flags.ignore_environment:  # the seed would be ignored too
        environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
        options = [option for option in options if option not in ("-E", "-I")]
        options += ["-s", "-P"] if sys.flags.isolated else []
    return options, {**environment, _SEED: hash_seed()}


@functools.cache
def hash_seed() -> str:
    """Return this process's hash seed if set, else a random one: the actual seed is unknown."""
    if not sys.flags.hash_randomization:
        return "0"
    seed = "" if sys.flags.ignore_environment else _environment_at_start().get(_SEED, "")
    if seed.isdecimal() and 0 < int(seed) <= _MOST:  # with -R, 0 means random
        return seed
    return str(1 + secrets.randbelow(_MOST))


def _environment_at_start() -> Mapping[str, str]:
    """Return the environment at the start of this process, which has set its hash seed."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries)


log = logging.getLogger("headrace")

STOPPED = "the fork server, which starts workers, is stopped, and was waited for; another one takes its place"
_BOOT = (
    "import sys; sys.path[:] = {path}; from headrace.workers.forkserver.server import main; "
    "main({fd}, {pid}, {life}, {torch})"
)


W = TypeVar("W", LoopWire, PolledWire)


class ForkServer:
    """The fork server. `acquire` starts it in the background or shares it.

    It outlives its last user for a while, as a new loader often follows and a start takes a second or more.
    """

    _lock = threading.RLock()  # reentrant: garbage collection may release another loader's fork server meanwhile
    _shared: ForkServer | None = None
    threaded: ClassVar[set[str]] = set()  # modules that start a thread, which workers import themselves

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

    def new_of(self, modules: Mapping[str, int]) -> list[str]:
        """Return what the fork server is to import before it forks workers that use `modules`."""
        new = sorted(modules.keys() - self._imported.keys() - self.threaded)
        self._imported.update(modules)
        return new

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


class Spawner(Generic[W]):
    """A loader's connection to the fork server.

    If the fork server is stopped, has ended or has a thread, another one takes its place. Workers of the former stay.

    Args:
        exited: Called with (pid, exit code) of each worker that ended. A negative code is a signal.
        modules: Imported by the fork server before it forks.
    """

    def __init__(self, fork_server: ForkServer, exited: Callable[[int, int], None], modules: Mapping[str, int]) -> None:
        self.fork_server, self._exited, self._modules = fork_server, exited, modules
        self._tokens = itertools.count()
        self._wires: list[W] = []  # the last is in use
        self._acquired: list[ForkServer] = []
        self._connect()

    def _connect(self) -> None:
        self._is_lost, self._announced = False, b""
        self._wires.append(self._wire_of(self.fork_server.connect()))
        new = self.fork_server.new_of(self._modules)
        if new:
            self._tell_place()
            self._wires[-1].send({"import": new})

    def _wire_of(self, sock: socket.socket) -> W:
        raise NotImplementedError

    def _renew(self) -> None:
        self.fork_server.give_up()
        self.fork_server = ForkServer.acquire(self._modules)
        self._acquired.append(self.fork_server)
        self._connect()

    def _order(self, token: int, number: int, worker: socket.socket, start: int | None = None) -> None:
        """Order a worker with one end of a socket pair. The answer has the token."""
        from headrace.workers.forkserver.inheritance import next_number  # the fork server imports it without threads

        self._tell_place()
        self._watch = Watch()
        descriptors = [worker.fileno(), *_tracker()]
        order = {"fork": token, "number": number, "start": start, "process": next_number()}
        self._wires[-1].send({**order, "descriptors": len(descriptors)}, descriptors)

    def _tell_place(self) -> None:
        """Send this process's surroundings if changed, in shared memory, as they may be large."""
        from headrace.workers.forkserver.inheritance import capture

        surroundings = json.dumps({**_place(), "inherited": capture()}).encode()
        if surroundings != self._announced:
            segment = Segment.create(len(surroundings))
            segment.view[:] = surroundings
            self._wires[-1].send({"place": segment.size}, [segment.fd])
            segment.close()
            self._announced = surroundings

    def _on_message(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._exited(message["exited"], message["code"])
        elif "forked" in message:
            self._answer(message["forked"], message["pid"])
        elif "threaded" in message:  # another fork server must fork, as this one has a thread
            ForkServer.threaded.add(message["threaded"])
            self._is_lost |= message["server"] == self.fork_server.process.pid
            self._answer(message["failed"], None)
        elif "failed" in message:
            self._answer(message["failed"], None, message["why"])

    def _answer(self, token: int, pid: int | None, why: str | None = None) -> None:
        """Answer an order. Without a pid and a reason, it is to be given again."""
        raise NotImplementedError

    def _has_stopped(self) -> bool:
        """True if the fork server is given up, as it was stopped for too long."""
        if self._watch.look([self.fork_server.process.pid]):
            log.warning(STOPPED)
            self._is_lost = True
        return self._is_lost

    def _dismiss(self) -> None:
        self._wires[-1].send({"dismiss": True})  # workers have finalizers to run

    def _release(self) -> None:
        while self._acquired:
            self._acquired.pop().release()


class WorkerSpawner(Spawner[LoopWire]):
    """Starts the workers of one loader through the fork server, on the loader's event loop."""

    def __init__(self, fork_server: ForkServer, exited: Callable[[int, int], None], modules: Mapping[str, int]) -> None:
        self._waiting: dict[int, asyncio.Future[int | None]] = {}  # None: another fork server must fork
        super().__init__(fork_server, exited, modules)

    def _wire_of(self, sock: socket.socket) -> LoopWire:
        return LoopWire(sock, self._on_message, partial(self._on_lost, self.fork_server), JSON)

    async def start(self, number: int) -> tuple[int, socket.socket]:
        """Start a worker, as soon as the fork server is ready.

        Raises:
            OSError: the fork server is gone. A new attempt uses another one.
        """
        while True:
            if self._is_lost:
                self._renew()
            ours, theirs = socket.socketpair()
            token = next(self._tokens)
            self._waiting[token] = asyncio.get_running_loop().create_future()
            try:
                with theirs:
                    self._order(token, number, theirs)
                pid = await self._waiting[token]
            except BaseException:
                ours.close()
                raise
            finally:
                del self._waiting[token]
            if pid is not None:
                return pid, ours
            ours.close()

    def look(self) -> None:
        if self._waiting and self._has_stopped():
            for token in self._waiting:
                self._answer(token, None)

    def close(self) -> None:
        self._dismiss()
        for wire in self._wires:
            wire.close()
        self._release()

    def _on_lost(self, fork_server: ForkServer) -> None:
        if fork_server is self.fork_server:
            self._is_lost = True
            for token in self._waiting:
                self._answer(token, None, "the fork server has ended")

    def _answer(self, token: int, pid: int | None, why: str | None = None) -> None:
        asked = self._waiting.get(token)
        if asked is None or asked.done():
            return
        if why is None:
            asked.set_result(pid)
        else:
            asked.set_exception(OSError(why))


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
