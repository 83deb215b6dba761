"""The trainer's records of workers: links, tasks, states and deaths."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.drop_in.workers.messages import Result, Start, WorkerConfig, unpacked_index
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.errors import OptionError, WorkerDiedError
from headrace.failures import PackedError
from headrace.memory import Segment
from headrace.processes.wire import PolledWire
from headrace.torch_compat import serialize
from headrace.torch_compat.stateful import PackedStates, failed, is_known
from headrace.work.messages import DEATHS, exit_text


class PoolLink:
    """The trainer's end of a worker's connection, and the detection of the worker's end.

    Args:
        readable: Called when data has arrived.
        ended: Called when the worker has ended, even if another process holds its socket open.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        readable: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._wire, self._selector = PolledWire(sock), selector
        self._readable, self._ended = readable, ended
        self._sentinel = -1
        self._awaits_writing = False
        self._is_open = True
        selector.register(sock, selectors.EVENT_READ, self._on_readable)

    def watch(self, sentinel: int) -> None:
        if self._sentinel < 0 <= sentinel:
            self._sentinel = os.dup(sentinel)
            self._selector.register(self._sentinel, selectors.EVENT_READ, self._on_end)

    def send(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        if not self._is_open or self._wire.send(message, descriptors, are_kept=are_kept):
            return
        if not self._awaits_writing:
            self._awaits_writing = True
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._wire, both, self._on_writable)

    def receive(self) -> list[Any]:
        return self._wire.receive()

    def take_descriptor(self) -> int:
        return self._wire.take_descriptor()

    def part(self) -> None:
        """Close the link and ignore further events: a death may cause two."""
        self._selector.unregister(self._wire)
        if self._sentinel >= 0:
            self._selector.unregister(self._sentinel)
        self.close()

    def close(self) -> None:
        self._is_open = False
        self._wire.close()
        if self._sentinel >= 0:
            os.close(self._sentinel)
            self._sentinel = -1

    def _on_readable(self) -> None:
        if self._is_open:
            self._readable()

    def _on_end(self) -> None:
        if self._is_open:
            self._ended()

    def _on_writable(self) -> None:
        if not self._is_open:
            return
        if self._wire.flush():
            self._awaits_writing = False
            self._selector.modify(self._wire, selectors.EVENT_READ, self._on_readable)
        self._readable()


@dataclass(slots=True)
class BatchTask:
    batch: int
    epoch: int
    index: Any
    place: Segment | None = None
    deaths: dict[int, int] = field(default_factory=dict)  # number of workers that died at it, by the sample's index


class WorkerRecord:
    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = 0
        self.idle_deaths = 0  # consecutive deaths without a task
        self.handle: WorkerHandle | None = None
        self.link: PoolLink | None = None
        self.known: set[int] = set()  # segments it has mapped
        self.tasks: dict[int, BatchTask] = {}  # in order of execution
        self.spec = b""
        self.start: Start | None = None  # resume point of a replacement
        self.made: Segment | None = None  # a segment it has created for its next result
        self.failure: PackedError | None = None  # reason for not restarting it
        self.is_mourned = False  # the failure was returned once
        self.how = ""  # cause of its end, in addition to the exit code

    def tell(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        if self.link is not None:
            self.link.send(message, descriptors, are_kept=are_kept)

    def show(self, segment: Segment) -> None:
        if segment.number not in self.known:
            self.known.add(segment.number)
            self.tell(("segment", segment.number, segment.size), [segment.fd])

    def forget(self, number: int) -> None:
        if number in self.known:
            self.known.discard(number)
            self.tell(("forget", number))

    def goes_on_from(self, blob: PackedStates | None, is_over: bool = False) -> None:
        if is_known(blob):
            self.start = Start(blob, is_over)

    def owes(self, is_asked: bool) -> bool:
        """True if the worker runs and an answer of it is awaited."""
        runs = self.handle is not None and self.handle.sentinel >= 0 and self.link is not None
        return runs and (bool(self.tasks) or is_asked)

    def watch(self) -> None:
        if self.link is not None and self.handle is not None:
            self.link.watch(self.handle.sentinel)

    def part(self) -> None:
        assert self.link is not None
        self.link.part()
        self.link = None


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A worker's result for a batch, with the state of its data set after the batch."""

    batch: int
    worker: int
    result: Result
    spec: bytes
    blob: PackedStates | None = None
    is_over: bool = False


# States.

LOST = (
    "the workers have ended, and with them what their copies of the data set carry from one epoch into the next: "
    "ask for a state before close()"
)

Answers = list[tuple[PackedStates | None] | None]
"""Answer of each worker, or None while unknown."""


class StateQuestion:
    """A question to workers and to their replacements, with the answers so far."""

    def __init__(self, name: str, answers: Answers) -> None:
        self.name, self.answers = name, answers

    def unanswered(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        return [worker for worker in workers if self.answers[worker.number] is None]


def answer_for_lost(workers: Iterable[WorkerRecord], answers: Answers) -> None:
    """Answer for workers that cannot and had a state: with an error that the state is lost."""
    for worker in workers:
        if answers[worker.number] is None and worker.start is not None:
            answers[worker.number] = (failed(OptionError(LOST), "raised where the state was asked for"),)


# Deaths.


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker. `how` has further details."""

    pid: int | None
    code: int | None
    how: str

    def error(self, text: str, batch: int | None = None) -> PackedError:
        return serialize.pack_error(
            WorkerDiedError(
                f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly ({exit_text(self.code)}){text}",
                pid=self.pid or 0,
                exitcode=self.code,
                batch=batch,
            )
        )


def judge(
    worker: WorkerRecord, death: Death, config: WorkerConfig, running: int, sample: int
) -> tuple[int, PackedError] | None:
    """Count a death. If the worker must not be restarted, its `failure` has the reason.

    Args:
        running: Number of the task it was at.
        sample: Index of the sample in the task.

    Returns:
        The number of a task that must not be tried again, and the error as its result.
    """
    if config.is_iterable:
        worker.failure = death.error(f"{death.how}; its place in the data set is lost with it")
    elif running in worker.tasks:
        task = worker.tasks[running]
        task.deaths[sample] = task.deaths.get(sample, 0) + 1
        if task.deaths[sample] >= DEATHS:
            which = _which(task, sample, config)
            return running, death.error(f"; {DEATHS} did so, all on {which}", task.batch)
    else:
        worker.idle_deaths += 1
        if worker.idle_deaths >= DEATHS:
            worker.failure = death.error(f"{death.how}; {DEATHS} did so before they made a batch")
    return None


def _which(task: BatchTask, sample: int, config: WorkerConfig) -> str:
    index = unpacked_index(task.index)
    if sample < 0:
        return f"batch {task.batch}, before or after its samples {index!r:.100}"
    key = list(index)[sample] if config.auto_collation else index
    return f"sample {key!r:.100} of batch {task.batch}"
