"""Main loop of a worker for torch's data sets: answers tasks until its connection ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace._util.shared_memory import Segment, close_all, keep_freed_memory
from headrace.torch_compat import serialize
from headrace.torch_regime.workers.batch_builder import BatchBuilder
from headrace.torch_regime.workers.messages import (
    MADE_NS,
    SAMPLE,
    START_NS,
    TASK,
    WORDS,
    Result,
    Start,
    WorkerConfig,
    failed_by,
    unpacked_index,
)
from headrace.workers.forkserver.fd_socket import BlockingWire, ObjectCodec
from headrace.workers.worker_main import WorkerEnd

_SEGMENTS_AT_MOST = 2**20  # per worker, so that segment numbers are unique


class BatchServer(WorkerEnd):
    """The worker's end of a connection.

    Args:
        start: Number of earlier workers with this number. Segment numbers follow from both.
        config: The configuration, unless it arrives over the wire.
    """

    def __init__(
        self, wire: BlockingWire, number: int, start: int, config: WorkerConfig | None, *, in_thread: bool = False
    ) -> None:
        super().__init__(wire)
        self._number, self._config, self._in_thread = number, config, in_thread
        self._builder: BatchBuilder | None = None
        self._start: Start | None = None
        self._epoch = 0
        self._every = 0
        self._has_reported_start = False
        self._refusal: Result | None = None  # the result of every task, if there is no builder
        self._segments: dict[int, memoryview] = {}
        self._given: tuple[int, ...] | None = None  # segment for the current batch
        self._numbers = itertools.count((number * 1024 + start) * _SEGMENTS_AT_MOST + 1)
        self._words = memoryview(bytearray(8 * (1 + WORDS))).cast("q")
        self._first_word = 0

    def serve(self, is_wanted: Callable[[], bool] | None = None) -> None:
        super().serve(is_wanted)
        self._builder = None  # break a cycle: a thread's memory must not wait for the collector

    # Messages.

    def on_words(self, size: int, first: int) -> None:
        """Map the shared words of all workers. This worker's start at `first`."""
        self._words = self.map(size).cast("q")
        self._first_word = first

    def on_job(self, size: int, lengths: tuple[int, ...]) -> None:
        view = self.map(size, privately=True)

        def load() -> None:
            try:
                self._config = serialize.unpack_in_worker(view, lengths, self.descriptors)
            except Exception as error:
                error.add_note(
                    "What the trainer has sent cannot be put together again in a worker; with "
                    'multiprocessing_context="fork" workers inherit it, and nothing is sent.'
                )
                raise

        began = time.perf_counter_ns()
        self._guarded(load)
        self._words[self._first_word + START_NS] += time.perf_counter_ns() - began
        close_all(self.descriptors)

    def on_start(self, epoch: int, start: Start | None) -> None:
        self._epoch, self._start = epoch, start

    def on_every(self, every: int) -> None:
        self._every = every

    def on_reset(self, shared_seed: int | None, epoch: int) -> None:
        self._epoch, self._has_reported_start = epoch, False
        if self._builder is not None:
            self._builder.reset(shared_seed)
            self._tell_start()
        elif self._start is not None:
            self._start = replace(self._start, is_finished=True)

    def on_tell(self) -> None:
        self._begin_once()
        self.wire.send(("states", None if self._builder is None else self._builder.state()))

    def on_begin(self) -> None:
        self._begin_once()
        if not self._has_reported_start:
            self.wire.send(("started", self._epoch, None))

    def on_segment(self, number: int, size: int) -> None:
        self._segments[number] = self.map(size)

    def on_forget(self, number: int) -> None:
        self._segments.pop(number, None)

    def on_make(self, task: int, index: object, place: tuple[int, ...] | None) -> None:
        if self._words[0]:  # all workers must end
            raise EOFError
        self._words[self._first_word + TASK] = task
        self._begin_once()
        if self._builder is None:
            assert self._refusal is not None
            result = self._refusal
        else:
            self._given = place
            began = time.perf_counter_ns()
            result = self._builder.make(unpacked_index(index))
            self._words[self._first_word + MADE_NS] += time.perf_counter_ns() - began
        self._words[self._first_word + TASK] = 0
        state = None if self._builder is None else self._builder.state_after(result, self._every)
        self.wire.send(("made", task, result) if state is None else ("made", task, result, state))

    # For the builder.

    def _begin_once(self) -> None:
        if self._builder is None and self._refusal is None:
            began = time.perf_counter_ns()
            self._guarded(self._begin)
            self._words[self._first_word + START_NS] += time.perf_counter_ns() - began

    def _begin(self) -> None:
        assert self._config is not None
        self._builder = BatchBuilder(
            self._config,
            self._number,
            in_thread=self._in_thread,
            place=self._place,
            tell_spec=lambda spec: self.wire.send(("spec", spec)),
            progress=self._words[self._first_word + SAMPLE :],
            start=self._start,
        )
        self._tell_start()

    def _tell_start(self) -> None:
        assert self._builder is not None
        assert self._config is not None
        if self._builder.is_stateful or self._config.is_iterable:
            self.wire.send(("started", self._epoch, self._builder.state()))
            self._has_reported_start = True

    def _place(self, size: int) -> tuple[int, memoryview]:
        if self._given is not None and self._given[1] >= size:
            return self._given[0], self._segments[self._given[0]]
        segment = Segment.create(max(size, 1), next(self._numbers))
        self.wire.send(("segment", segment.number, segment.size), [segment.fd])
        self._segments[segment.number] = segment.view
        segment.close()
        return segment.number, self._segments[segment.number]

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as error:
            self._refusal = failed_by(error, self._number, in_thread=self._in_thread)


def main(sock: socket.socket, number: int, start: int) -> None:
    _begin_process()
    BatchServer(BlockingWire(sock), number, start, None).serve()


def main_of_context(sock: socket.socket, number: int, start: int, config: WorkerConfig) -> None:
    _begin_process()
    parent = os.getppid()
    # A sibling may hold the other end of this socket open.
    BatchServer(BlockingWire(sock), number, start, config).serve(lambda: os.getppid() == parent)


def main_of_thread(sock: socket.socket, number: int, start: int, config: WorkerConfig, codec: ObjectCodec) -> None:
    with contextlib.closing(BlockingWire(sock, codec)) as wire:
        BatchServer(wire, number, start, config, in_thread=True).serve()


def _begin_process() -> None:
    import torch
    from torch.utils.data._utils import signal_handling

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers: Any = signal_handling
    handlers._set_worker_signal_handlers()  # they report a bus error or a segmentation fault
    with contextlib.suppress(AttributeError):  # since torch 2.7
        torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    keep_freed_memory()
