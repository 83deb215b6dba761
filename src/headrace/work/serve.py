"""A worker of the torch regime: waits for tasks on its socket, answers them in turn, ends with the connection."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.memory import Segment, keep_freed_memory, mapped, mapped_privately
from headrace.torch_compat import packing
from headrace.torch_compat.errors import pack_worker_error
from headrace.work.job import Job, Maker, Result, Start
from headrace.work.shelf import Shelf
from headrace.work.wire import BlockingWire

WORDS = 2  # of shared memory for each worker: the task it is at, and the index of the sample in it
_SEGMENTS_AT_MOST = 2**20  # that one worker makes, for their numbers to be its own


class Server:
    """The worker's end of a connection.

    Args:
        sock: connected to the trainer's side.
        number: the worker's number.
        start: how many times a worker with this number was started before: its segments' numbers follow from both.
        job: what it works on, where that need not come over the wire.
        shelf: where batches are put for the trainer, whose thread this is; None where the process is the worker's own.
    """

    def __init__(self, sock: socket.socket, number: int, start: int, job: Job | None, shelf: Shelf | None) -> None:
        self._wire = BlockingWire(sock)
        self._number, self._job, self._shelf = number, job, shelf
        self._maker: Maker | None = None
        self._start: Start | None = None
        self._epoch = 0
        self._every = 0
        self._has_told_start = False
        self._error: bytes | None = None
        self._descriptors: list[int] = []
        self._segments: dict[int, memoryview] = {}
        self._given: tuple[int, ...] | None = None  # the place for the batch that is being made
        self._numbers = itertools.count((number * 1024 + start) * _SEGMENTS_AT_MOST + 1)
        self._words = memoryview(bytearray(8 * (1 + WORDS))).cast("q")
        self._first_word = 0

    def serve(self, is_wanted: Callable[[], bool] | None = None) -> None:
        """Answer until the other end is gone, or `is_wanted`, asked each second, says no."""
        while True:
            try:
                kind, *rest = self._wire.receive(is_wanted)
                getattr(self, f"_on_{kind}")(*rest)
            except (EOFError, ConnectionError):
                self._maker = None  # which knows us: a thread's memory is not to wait for the collector
                return

    # Messages.

    def _on_words(self, size: int, first: int) -> None:
        """Shared memory of all workers: its first word says whether they are to end, our own begin at `first`."""
        self._words = self._map(size).cast("q")
        self._first_word = first

    def _on_descriptors(self, count: int) -> None:
        """Of the memory of tensors that the job shares."""
        self._descriptors += [self._wire.take_descriptor() for _ in range(count)]

    def _on_job(self, size: int, lengths: tuple[int, ...]) -> None:
        view = self._map(size, privately=True)

        def load() -> None:
            self._job = packing.unpack_in_worker(view, lengths, self._descriptors)

        self._guarded(load)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _on_start(self, epoch: int, start: Start | None) -> None:
        """The number of the iterator's epoch, and where the worker goes on in it."""
        self._epoch, self._start = epoch, start

    def _on_every(self, every: int) -> None:
        """After so many batches the state is to be told with what was made; 0: never."""
        self._every = every

    def _on_reset(self, shared_seed: int | None, epoch: int) -> None:
        self._epoch, self._has_told_start = epoch, False
        if self._maker is not None:
            self._maker.reset(shared_seed)
            self._tell_start()
        elif self._start is not None:
            self._start = replace(self._start, is_finished=True)

    def _on_tell(self) -> None:
        """Somebody wants to know the state in which this worker is now."""
        self._begin_once()
        self._wire.send(("told", None if self._maker is None else self._maker.state()))

    def _on_begin(self) -> None:
        """Somebody wants to know the state in which this worker begins."""
        self._begin_once()
        if not self._has_told_start:
            self._wire.send(("begun", self._epoch, None))

    def _on_segment(self, number: int, size: int) -> None:
        self._segments[number] = self._map(size)

    def _on_forget(self, number: int) -> None:
        self._segments.pop(number, None)

    def _on_make(self, task: int, index: Any, place: tuple[int, ...] | None) -> None:
        if self._words[0]:  # nobody waits for it any more
            raise EOFError
        self._words[self._first_word] = task
        self._begin_once()
        if self._maker is None:
            result: Result = ("error", self._error)
        else:
            self._given = place
            result = self._maker.make(packing.unpack_bytes(index) if isinstance(index, bytes) else index)
        self._words[self._first_word] = 0
        state = None if self._maker is None else self._maker.state_after(result, self._every)
        self._wire.send(("made", task, result) if state is None else ("made", task, result, state))

    # What the maker needs.

    def _begin_once(self) -> None:
        if self._maker is None and self._error is None:
            self._guarded(self._begin)

    def _begin(self) -> None:
        assert self._job is not None
        self._maker = Maker(
            self._job,
            self._number,
            shelf=self._shelf,
            place=self._place,
            tell_spec=lambda spec: self._wire.send(("spec", spec)),
            progress=self._words[self._first_word + 1 :],
            start=self._start,
        )
        self._tell_start()

    def _tell_start(self) -> None:
        """The state in which the worker begins an epoch: while there is none, nobody waits for it."""
        assert self._maker is not None
        assert self._job is not None
        if self._maker.is_stateful or self._job.is_iterable:
            self._wire.send(("begun", self._epoch, self._maker.state()))
            self._has_told_start = True

    def _place(self, size: int) -> tuple[int, memoryview]:
        if self._given is not None and self._given[1] >= size:
            return self._given[0], self._segments[self._given[0]]
        segment = Segment.create(max(size, 1), next(self._numbers))
        self._wire.send(("segment", segment.number, segment.size), [segment.fd])
        self._segments[segment.number] = segment.view
        segment.close()
        return segment.number, self._segments[segment.number]

    def _guarded(self, do: Callable[[], None]) -> None:
        """What goes wrong before there is a maker is the answer to every task."""
        try:
            do()
        except BaseException as error:
            kind = "process" if self._shelf is None else "thread"
            self._error = pack_worker_error(error, f"in DataLoader worker {kind} {self._number}")

    def _map(self, size: int, *, privately: bool = False) -> memoryview:
        fd = self._wire.take_descriptor()
        try:
            return mapped_privately(fd, size) if privately else mapped(fd, size)
        finally:
            os.close(fd)


def main(sock: socket.socket, number: int, start: int) -> None:
    """Serve as a process that the helper has forked."""
    _begin_process()
    Server(sock, number, start, None, None).serve()


def main_of_context(sock: socket.socket, number: int, start: int, job: Job) -> None:
    """Serve as a process that a multiprocessing context has started from the trainer."""
    _begin_process()
    parent = os.getppid()
    # A sibling may hold the other end of our socket open.
    Server(sock, number, start, job, None).serve(lambda: os.getppid() == parent)


def main_of_thread(sock: socket.socket, number: int, start: int, job: Job, shelf: Shelf) -> None:
    """Serve as a thread of the trainer's process."""
    with contextlib.closing(sock):
        Server(sock, number, start, job, shelf).serve()


def _begin_process() -> None:
    import torch
    from torch.utils.data._utils import signal_handling

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers: Any = signal_handling
    handlers._set_worker_signal_handlers()  # they tell of a bus error or a segmentation fault
    torch.set_num_threads(1)
    keep_freed_memory()
