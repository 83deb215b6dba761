"""The trainer's side of the helper process: one for all loaders, there while any of them needs it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import current_process, resource_tracker
from pathlib import Path
from typing import Any, Protocol

from headrace.work import helper as protocol
from headrace.work.inheritance import capture

_BOOT = "import sys; sys.path[:] = {path}; from headrace.work.helper import main; main({fd}, {pid})"


class Starter(Protocol):
    """Starts workers; the seam between the pool and how its processes come to be."""

    async def start(self, number: int) -> tuple[int, socket.socket]:
        """A new worker: its process id, and our end of the socket pair to it."""
        ...

    def close(self) -> None:
        """End all of its workers that still run, at once."""
        ...


class Helper:
    """The helper process: `acquire` starts it in the background or shares it.

    It outlives its last user for a while, as a new loader often follows: to start it takes a second or more.
    """

    _lock = threading.RLock()  # a collection of garbage while it is held may release the helper of another loader
    _shared: Helper | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.users = 0
        self._imported: dict[str, int] = {}  # modules, and when their files were written
        ours, theirs = socket.socketpair()
        with theirs:
            code = _BOOT.format(path=json.dumps([str(p) for p in sys.path]), fd=theirs.fileno(), pid=self.owner)
            # Ctrl-C before the helper can ignore it is no business of its own either: it inherits our mask.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control = ours

    @classmethod
    def acquire(cls, modules: Mapping[str, int] | None = None) -> Helper:
        """The helper of this process, which keeps running until it is released as often as it was acquired.

        Args:
            modules: what `prepare` will be told; a helper that has imported an older one of them is not taken.
        """
        with cls._lock:
            while True:
                shared = cls._shared
                if shared is None or not shared._serves(modules or {}):
                    shared = cls._shared = cls()
                shared.users += 1
                if shared is cls._shared:  # and was not replaced as some user's garbage was collected just now
                    return shared

    def release(self) -> None:
        """One user less. Without any the process ends some time later."""
        with self._lock:
            self.users -= 1
            if self.users or self.owner != os.getpid():
                return
            if Helper._shared is self:
                with contextlib.suppress(OSError):
                    protocol.send(self._control, {"idle": True})
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

    def connect(self) -> socket.socket:
        """A control connection of one's own; workers that were started over it end with it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            protocol.send(self._control, {"attach": True}, [theirs.fileno()])
        return ours

    def prepare(self, connection: socket.socket, modules: Mapping[str, int]) -> None:
        """Have modules imported once, before workers are forked over the same connection, instead of by each of them.

        Args:
            modules: by name when their files were written, in nanoseconds.

        Raises:
            OSError: the process has ended.
        """
        new = sorted(modules.keys() - self._imported.keys())
        if new:
            protocol.send(connection, {"import": new, **_place()})
            self._imported.update(modules)

    def _serves(self, modules: Mapping[str, int]) -> bool:
        """Whether it runs, in this process, and has nothing imported that has changed since."""
        if self.owner != os.getpid() or self.process.poll() is not None:
            return False
        if any(self._imported.get(name, written) != written for name, written in modules.items()):
            if not self.users:
                self._end()
            return False
        try:
            if not self.users:  # it may be about to end
                protocol.send(self._control, {"busy": True})
                return protocol.receive(self._control) is not None
        except OSError:
            return False
        return True

    def _end(self) -> None:
        self._control.close()
        try:
            self.process.wait(protocol.GRACE_S + 1)  # workers that were dismissed may be in the middle of a sample
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers are told by the kernel
            self.process.wait()


atexit.register(Helper.end_idle)


class HelperStarter:
    """Starts the workers of one loader through the helper, on the loader's event loop.

    Args:
        exited: called with (pid, exit code; minus the signal where one ended it) of each worker that ended.
        modules: what the workers will need, as far as that is known, for `Helper.prepare`.
    """

    def __init__(self, helper: Helper, exited: Callable[[int, int], None], modules: Mapping[str, int]) -> None:
        self._sock = helper.connect()
        helper.prepare(self._sock, modules)
        self._exited = exited
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    async def start(self, number: int) -> tuple[int, socket.socket]:
        """A new worker, as soon as the helper is ready.

        Raises:
            OSError: the helper is gone.
        """
        ours, theirs = socket.socketpair()
        token = next(self._numbers)
        self._waiting[token] = self._loop.create_future()
        try:
            with theirs:
                protocol.send(self._sock, fork_order(token, number), [theirs.fileno(), *tracker()])
            return await self._waiting[token], ours
        except BaseException:
            ours.close()
            raise
        finally:
            del self._waiting[token]

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _on_readable(self) -> None:
        try:
            got = protocol.receive(self._sock)
        except OSError:
            got = None
        if got is None:
            self._loop.remove_reader(self._sock.fileno())
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(OSError("the helper process has ended"))
            return
        message = got[0]
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


def tracker() -> tuple[int, ...]:
    """The descriptor of multiprocessing's resource tracker, if this process has one."""
    found: Any = resource_tracker._resource_tracker
    return () if found._fd is None else (found._fd,)


def _place() -> dict[str, Any]:
    """Environment, path and folder of this process."""
    try:
        folder: str | None = str(Path.cwd())
    except OSError:  # it was removed
        folder = None
    return {"environment": dict(os.environ), "path": [str(p) for p in sys.path], "folder": folder}


def fork_order(token: int, number: int, start: int | None = None) -> dict[str, Any]:
    """What the helper is told to fork a worker: it answers with the token.

    Args:
        start: for a worker of the torch regime how many had its number before it.
    """
    return {
        "fork": token,
        "number": number,
        "start": start,
        "authkey": current_process().authkey.hex(),
        **_place(),
        "inherited": capture(),
    }
