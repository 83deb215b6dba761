"""A worker process: runs tasks from its socket until the connection ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence

from headrace._util.shared_memory import keep_freed_memory, mapped, mapped_privately
from headrace.workers.forkserver.fd_socket import BlockingWire
from headrace.workers.task_runner import TaskRunner
from headrace.workers.tasks import Message


class WorkerEnd:
    """A worker's end of its connection. Calls the method `on_KIND` for each message of a kind."""

    def __init__(self, wire: BlockingWire) -> None:
        self.wire = wire
        self.descriptors: list[int] = []  # for the next chain or job

    def serve(self, is_wanted: Callable[[], bool] | None = None) -> None:
        """Handle messages until the other end is gone or `is_wanted`, called each second, returns False."""
        while True:
            try:
                kind, *rest = self.wire.receive(is_wanted)
                getattr(self, f"on_{kind}")(*rest)
            except (EOFError, ConnectionError):
                return

    def on_descriptors(self, count: int) -> None:
        self.descriptors += [self.wire.take_descriptor() for _ in range(count)]

    def map(self, size: int, *, privately: bool = False) -> memoryview:
        """Map the shared memory whose descriptor came with the current message."""
        fd = self.wire.take_descriptor()
        try:
            return mapped_privately(fd, size) if privately else mapped(fd, size)
        finally:
            os.close(fd)


class _Worker(WorkerEnd):
    def __init__(self, sock: socket.socket, number: int) -> None:
        super().__init__(BlockingWire(sock))
        self._number = number

    def on_progress(self, size: int, slot: int) -> None:
        """Map the number of the current task, and the index of the sample in it. Comes first."""
        self._progress = self.map(size).cast("q")[2 * slot : 2 * slot + 2]
        self._runner = TaskRunner(everywhere=True, progress=self._progress[1:], number=self._number)

    def on_segment(self, number: int, size: int) -> None:
        self._runner.attach(number, self.map(size))

    def on_chains(self, stream: int, size: int, lengths: Sequence[int]) -> None:
        descriptors, self.descriptors = self.descriptors, []
        self._runner.learn_packed(stream, self.map(size, privately=True), lengths, descriptors)

    def on_message(self, message: Message) -> None:
        if message.is_answered:
            self._progress[0] = message.task
            self._progress[1] = -1
            self.wire.send((message.number, message.carry_out(self._runner)))
        else:
            message.carry_out(self._runner)
        self._runner.tidy()


def main(sock: socket.socket, number: int) -> None:
    """Serve the trainer at the other end of `sock` until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    _Worker(sock, number).serve()
