"""A worker process: waits for tasks on its socket, works on one after the other, and ends with the connection."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from headrace.memory import keep_freed_memory, mapped, mapped_privately
from headrace.tasks import Chain, Reply
from headrace.torch_compat import packing
from headrace.work.wire import BlockingWire
from headrace.work.workbench import Workbench


class _Worker:
    def __init__(self, sock: socket.socket, number: int) -> None:
        self.wire = BlockingWire(sock)
        self.number = number
        self.is_begun = False
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
                view = self._map(size, privately=True)
                self.bench.learn(number, cache(partial(self._load, view, lengths)))
            elif kind == "spec":
                self.bench.learn_spec(*rest)
            elif kind == "progress":
                size, self.slot = rest
                self.progress = self._map(size).cast("q")

    def _map(self, size: int, *, privately: bool = False) -> memoryview:
        fd = self.wire.take_descriptor()
        try:
            return mapped_privately(fd, size) if privately else mapped(fd, size)
        finally:
            os.close(fd)

    def _load(self, view: memoryview, lengths: Sequence[int]) -> Chain:
        chain: Chain = packing.unpack_in_worker(view, lengths, ())
        if chain.init is not None and not self.is_begun:
            chain.init(self.number)
        self.is_begun = True
        return chain

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
    keep_freed_memory()
    _Worker(sock, number).serve()
