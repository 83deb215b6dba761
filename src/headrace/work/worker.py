"""A worker process: waits for tasks on its socket, works on one after the other, and ends with the connection."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from functools import partial
from typing import Any

from headrace.tasks import Reply
from headrace.torch_compat import packing
from headrace.work.wire import BlockingWire
from headrace.work.workbench import Workbench


class _Worker:
    def __init__(self, sock: socket.socket, number: int) -> None:
        self.wire = BlockingWire(sock)
        self.progress: memoryview | None = None
        self.slot = 0
        self.bench = Workbench(everywhere=True, progress=self._on_progress, number=number)

    def serve(self) -> None:
        while True:
            try:
                kind, *rest = self.wire.receive()
            except (EOFError, ConnectionError):
                return
            if kind == "task":
                (order,) = rest
                self._begin(order["task"])
                self._reply(order["task"], self.bench.work(order))
            elif kind == "place":
                task, place = rest
                self._reply(task, self.bench.place(task, place))
            elif kind == "let_go":
                self.bench.let_go(*rest)
            elif kind == "segment":
                number, size = rest
                self.bench.attach(number, self._map(size))
            elif kind == "forget":
                self.bench.detach(*rest)
            elif kind == "chain":
                number, size, lengths = rest
                view = self._map(size)
                self.bench.learn(number, partial(packing.unpack, view, lengths, copy=True))
            elif kind == "spec":
                self.bench.learn_spec(*rest)
            elif kind == "unlearn":
                self.bench.unlearn(*rest)
            elif kind == "progress":
                size, self.slot = rest
                self.progress = self._map(size).cast("q")

    def _map(self, size: int) -> memoryview:
        fd = self.wire.take_descriptor()
        try:
            return memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def _begin(self, task: int) -> None:
        if self.progress is not None:
            self.progress[2 * self.slot] = task
            self.progress[2 * self.slot + 1] = -1

    def _on_progress(self, index: int) -> None:
        if self.progress is not None:
            self.progress[2 * self.slot + 1] = index

    def _reply(self, task: int, reply: Reply) -> None:
        try:
            self.wire.send((task, reply))
        except ConnectionError:
            raise SystemExit from None  # the trainer is gone, or has given this worker up


def main(sock: socket.socket, number: int) -> Any:
    """Serve the trainer at the other end of `sock` until it closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Worker(sock, number).serve()
