"""A worker process: runs tasks from its socket until the connection ends."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from headrace.memory import keep_freed_memory, mapped, mapped_privately
from headrace.processes.wire import BlockingWire
from headrace.work.messages import Message
from headrace.work.task_runner import TaskRunner


class _Worker:
    def __init__(self, sock: socket.socket, number: int) -> None:
        self.wire = BlockingWire(sock)
        self.progress: memoryview | None = None
        self.descriptors: list[int] = []  # for the next chain
        self.number = number
        self.runner = TaskRunner(everywhere=True, progress=[-1], number=number)

    def serve(self) -> None:
        while True:
            try:
                kind, *rest = self.wire.receive()
            except (EOFError, ConnectionError):
                return
            if kind == "message":
                self._carry_out(*rest)
            elif kind == "segment":
                number, size = rest
                self.runner.attach(number, self._map(size))
            elif kind == "chain":
                number, size, lengths = rest
                descriptors, self.descriptors = self.descriptors, []
                self.runner.learn_packed(number, self._map(size, privately=True), lengths, descriptors)
            elif kind == "descriptors":
                self.descriptors += [self.wire.take_descriptor() for _ in range(*rest)]
            elif kind == "progress":
                size, slot = rest
                self.progress = self._map(size).cast("q")[2 * slot : 2 * slot + 2]
                # The runner reports each sample there. This is the first message, so no state is lost.
                self.runner = TaskRunner(everywhere=True, progress=self.progress[1:], number=self.number)

    def _carry_out(self, message: Message) -> None:
        if message.is_answered and self.progress is not None:
            self.progress[0] = message.task
            self.progress[1] = -1
        reply = message.carry_out(self.runner)
        if message.is_answered:
            try:
                self.wire.send((message.number, reply))
            except ConnectionError:
                raise SystemExit from None  # the trainer has ended or abandoned this worker
        del reply
        self.runner.tidy()

    def _map(self, size: int, *, privately: bool = False) -> memoryview:
        fd = self.wire.take_descriptor()
        try:
            return mapped_privately(fd, size) if privately else mapped(fd, size)
        finally:
            os.close(fd)


def main(sock: socket.socket, number: int) -> Any:
    """Serve the trainer at the other end of `sock` until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    _Worker(sock, number).serve()
