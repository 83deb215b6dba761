"""Worker processes, forked from the fork server, with shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace._util.shared_memory import ADVICE, SHORT, Segment
from headrace.errors import WorkerDiedError
from headrace.workers.chains import PackedChains, SharedChains
from headrace.workers.forkserver.client import ForkServer, WorkerSpawner
from headrace.workers.forkserver.fd_socket import PATIENCE, LoopWire, Watch, in_groups
from headrace.workers.tasks import Message, Reply, exit_text

if TYPE_CHECKING:
    from headrace.workers.executor import OnLost, OnReply

_STARTS = 5  # attempts to start a worker, as descriptors may be short for a moment
_START_AGAIN_S = 0.2
_STATUS_S = 1.0  # limit of the wait for a dead worker's exit status

log = logging.getLogger("headrace")


class _Process:
    def __init__(
        self, executor: ProcessExecutor, number: int, pid: int, sock: socket.socket, on_reply: OnReply, on_lost: OnLost
    ) -> None:
        self.number, self.pid = number, pid
        self.owes = 0  # number of replies to come
        self.is_open = True  # until its socket or process has ended; then its status is awaited
        self._is_dead = False
        self._executor, self._on_reply, self._on_lost = executor, on_reply, on_lost
        self._loop = asyncio.get_running_loop()
        self._wire = LoopWire(sock, received=self._on_message, lost=self.suspect)
        self._pidfd = -1
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)
            self._loop.add_reader(self._pidfd, self.suspect)
        progress = executor.progress
        self._wire.send(("progress", progress.size, number), [progress.fd])
        self._words = progress.view.cast("q")

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        for segment in segments:
            self._wire.send(("segment", segment.number, segment.size), [segment.fd])
        self._wire.send(("message", message))
        if message.is_answered:
            self.owes += 1
            self._executor.look_later()

    def learn(self, stream: int, chains: SharedChains) -> None:
        assert isinstance(chains, PackedChains)
        for message, descriptors in in_groups(chains.descriptors):
            self._wire.send(message, descriptors)
        self._wire.send(("chains", stream, chains.segment.size, chains.lengths), [chains.segment.fd])

    def suspect(self) -> None:
        """Handle the end of the socket or process. The fork server normally reports the status."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(OSError):  # the process may have closed only its socket
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._loop.call_later(_STATUS_S, self.end, None)

    def end(self, code: int | None) -> None:
        """Report the loss. `code` is the exit status, if known."""
        from headrace.workers.executor import Loss

        if not self._is_dead:
            loss = Loss(self.pid, code, self._words[2 * self.number], self._words[2 * self.number + 1])
            self.close()
            self._on_lost(loss)

    def close(self) -> None:
        self._is_dead, self.is_open, self.owes = True, False, 0
        self._wire.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._words[2 * self.number], self._words[2 * self.number + 1] = 0, -1
        self._executor.by_pid.pop(self.pid, None)

    def _on_message(self, message: tuple[int, Reply]) -> None:
        self.owes -= 1
        self._on_reply(*message)


class ProcessExecutor:
    """Starts worker processes by the fork server.

    Attributes:
        by_pid: Running processes.
        progress: For each worker the number of its current task, and the index of the current sample.
    """

    shares_memory = True
    shares_objects = False

    def __init__(self, count: int, fork_server: ForkServer, modules: dict[str, int]) -> None:
        self._fork_server, self._modules = fork_server, modules
        self.by_pid: dict[int, _Process] = {}
        self.progress = Segment.create(16 * count)
        self._spawner: WorkerSpawner | None = None
        self._starting = 0
        self._watch = Watch()
        self._look_due: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> _Process:
        """Start a worker as soon as the fork server is ready. Raises WorkerDiedError if the fork server has ended."""
        self._starting += 1
        self.look_later()
        try:
            pid, sock = await self._spawned(number)
        finally:
            self._starting -= 1
        process = self.by_pid[pid] = _Process(self, number, pid, sock, on_reply, on_lost)
        return process

    async def _spawned(self, number: int) -> tuple[int, socket.socket]:
        attempts = 0
        while True:
            attempts += 1
            try:
                if self._spawner is None:
                    self._spawner = WorkerSpawner(self._fork_server, self._on_exit, self._modules)
                    attempts = 1
                return await self._spawner.start(number)
            except OSError as error:
                if attempts >= _STARTS or self._spawner is None:
                    raise self._gone(error) from error
            await asyncio.sleep(_START_AGAIN_S)

    def _gone(self, error: OSError) -> WorkerDiedError:
        server = self._fork_server if self._spawner is None else self._spawner.fork_server
        pid, code = server.process.pid, server.process.poll()
        advice = f"; {ADVICE}" if error.errno in SHORT else ""
        return WorkerDiedError(
            f"DataLoader worker (pid(s) {pid}) exited unexpectedly: it is the fork server that starts the "
            f"workers ({exit_text(code)}; {error}{advice}); make a new loader",
            pid=pid,
            exitcode=code,
        )

    async def aclose(self) -> None:
        self._is_closed = True
        if self._look_due is not None:
            self._look_due.cancel()
        for process in list(self.by_pid.values()):
            process.close()
        if self._spawner is not None:
            self._spawner.close()
        self.progress.close()

    def look_later(self) -> None:
        """Schedule a check of the processes that replies are awaited from."""
        if self._look_due is None and not self._is_closed:
            self._look_due = asyncio.get_running_loop().call_later(PATIENCE.each_s, self._look)

    def _look(self) -> None:
        """Kill stopped workers that replies are awaited from, as a stopped process sends no event."""
        self._look_due = None
        owing = {process.pid: process for process in self.by_pid.values() if process.owes and process.is_open}
        for pid in self._watch.look(owing):
            log.warning("worker %d (pid %d) is stopped, and was waited for; it is killed", owing[pid].number, pid)
            owing[pid].suspect()
        if self._spawner is not None:
            self._spawner.look()
        if owing or self._starting:
            self.look_later()

    def _on_exit(self, pid: int, code: int) -> None:
        process = self.by_pid.get(pid)
        if process is not None:
            process.end(code)
