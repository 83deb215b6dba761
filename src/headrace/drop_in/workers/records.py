"""What the trainer's side of the torch regime knows of its workers: links, tasks, states and deaths."""

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
    """The trainer's end: its socket, and what tells that the worker has ended.

    Args:
        sock: connected to the worker.
        selector: tells of what comes.
        readable: called when something has come.
        ended: called when the worker has ended, also where somebody else holds its socket open.
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
        """Hear of the worker's end by a descriptor, as soon as there is one."""
        if self._sentinel < 0 <= sentinel:
            self._sentinel = os.dup(sentinel)
            self._selector.register(self._sentinel, selectors.EVENT_READ, self._on_end)

    def send(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        """Send now, or when the socket takes it; see `PolledWire.send`."""
        if not self._is_open or self._wire.send(message, descriptors, are_kept=are_kept):
            return
        if not self._awaits_writing:
            self._awaits_writing = True
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._wire, both, self._on_writable)

    def receive(self) -> list[Any]:
        """As `PolledWire.receive`."""
        return self._wire.receive()

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._wire.take_descriptor()

    def part(self) -> None:
        """Close it, and hear nothing more: of one death two events may tell at once."""
        self._selector.unregister(self._wire)
        if self._sentinel >= 0:
            self._selector.unregister(self._sentinel)
        self.close()

    def close(self) -> None:
        """Close it; the selector is closed, too."""
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
    """A batch that a worker is to make."""

    batch: int
    epoch: int
    index: Any
    place: Segment | None = None
    deaths: dict[int, int] = field(default_factory=dict)  # workers that ended at it, by the sample's index in it


class WorkerRecord:
    """A worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = 0
        self.idle_deaths = 0  # one after the other, in no batch
        self.handle: WorkerHandle | None = None
        self.link: PoolLink | None = None
        self.known: set[int] = set()  # segments that it has mapped
        self.tasks: dict[int, BatchTask] = {}  # in the order in which it works on them
        self.spec = b""
        self.start: Start | None = None  # where another one would go on in its place
        self.made: Segment | None = None  # a place that it has made, and not yet said what for
        self.failure: PackedError | None = None  # why it is not started again
        self.is_mourned = False  # that was told
        self.how = ""  # it came to its end, where that is known besides its exit code

    def tell(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        """Send it a message, if there is anybody to send it to."""
        if self.link is not None:
            self.link.send(message, descriptors, are_kept=are_kept)

    def show(self, segment: Segment) -> None:
        """Have it map a segment, unless it has."""
        if segment.number not in self.known:
            self.known.add(segment.number)
            self.tell(("segment", segment.number, segment.size), [segment.fd])

    def forget(self, number: int) -> None:
        """Have it unmap a segment."""
        if number in self.known:
            self.known.discard(number)
            self.tell(("forget", number))

    def goes_on_from(self, blob: PackedStates | None, is_over: bool = False) -> None:
        """Have another one in its place go on from a state, if there is one."""
        if is_known(blob):
            self.start = Start(blob, is_over)

    def owes(self, is_asked: bool) -> bool:
        """Whether it runs, and is waited for."""
        runs = self.handle is not None and self.handle.sentinel >= 0 and self.link is not None
        return runs and (bool(self.tasks) or is_asked)

    def watch(self) -> None:
        """Hear of its end also where somebody else holds its socket open."""
        if self.link is not None and self.handle is not None:
            self.link.watch(self.handle.sentinel)

    def part(self) -> None:
        """It has ended, or will not begin."""
        assert self.link is not None
        self.link.part()
        self.link = None


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """What came of a batch: its number, its worker's, what the worker answered, and the form of its samples.

    And of the worker's copy of the data set afterwards: its state, where that was told, and whether it is over.
    """

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
"""Of each worker, where it is known."""


class StateQuestion:
    """A question that workers are asked, also those that have taken the place of others meanwhile.

    Args:
        name: of the message.
        answers: those that are known so far; others are put here.
    """

    def __init__(self, name: str, answers: Answers) -> None:
        self.name, self.answers = name, answers

    def unanswered(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those whose answer is not known."""
        return [worker for worker in workers if self.answers[worker.number] is None]


def answer_for_lost(workers: Iterable[WorkerRecord], answers: Answers) -> None:
    """Who cannot answer, and had a state to lose, is answered for by the error that it is lost."""
    for worker in workers:
        if answers[worker.number] is None and worker.start is not None:
            answers[worker.number] = (failed(OptionError(LOST), "raised where the state was asked for"),)


# Deaths.


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker has ended.

    Attributes:
        pid: its process.
        code: its exit code, where that is known.
        how: what is known besides.
    """

    pid: int | None
    code: int | None
    how: str

    def error(self, text: str, batch: int | None = None) -> PackedError:
        """The error of it, packed."""
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
    """Count a death; where the worker is not to be started again, its `failure` says why.

    Args:
        worker: which one has died.
        death: how.
        config: what it worked on.
        running: the number of the task that it was at.
        sample: the index of the sample in that.

    Returns:
        The number of a task that is not to be tried again, and the error that is its answer.
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
