"""The trainer's side of the helper process: one for all loaders, there while any of them needs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from headrace.work import helper as protocol

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
    """The helper process: `acquire` starts it in the background or shares it, the last `release` ends it."""

    _lock = threading.RLock()  # a collection of garbage while it is held may release the helper of another loader
    _shared: Helper | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.users = 0
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
    def acquire(cls) -> Helper:
        """The helper of this process, which keeps running until it is released as often as it was acquired."""
        with cls._lock:
            while True:
                shared = cls._shared
                if shared is None or shared.owner != os.getpid() or shared.process.poll() is not None:
                    shared = cls._shared = cls()
                shared.users += 1
                if shared is cls._shared:  # and was not released as its last user's garbage was collected just now
                    return shared

    def release(self) -> None:
        """One user less; the last one ends the process and waits for its end, some milliseconds."""
        with self._lock:
            self.users -= 1
            if self.users:
                return
            if Helper._shared is self:
                Helper._shared = None
        self._control.close()
        if self.owner == os.getpid():
            self.process.kill()  # its workers are told by the kernel
            self.process.wait()

    def connect(self) -> socket.socket:
        """A control connection of one's own; workers that were started over it end with it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            protocol.send(self._control, {"attach": True}, [theirs.fileno()])
        return ours


class HelperStarter:
    """Starts the workers of one loader through the helper, on the loader's event loop.

    Args:
        exited: called with (pid, exit code; minus the signal where one ended it) of each worker that ended.
    """

    def __init__(self, helper: Helper, exited: Callable[[int, int], None]) -> None:
        self._sock = helper.connect()
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
                protocol.send(self._sock, _order(token, number), [theirs.fileno()])
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
        elif "exited" in message:
            self._exited(message["exited"], message["code"])


def _order(token: int, number: int) -> dict[str, Any]:
    return {
        "fork": token,
        "number": number,
        "environment": dict(os.environ),
        "path": [str(p) for p in sys.path],
        "folder": str(Path.cwd()),
    }
