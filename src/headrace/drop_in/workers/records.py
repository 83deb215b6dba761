"""What the trainer's side of the torch regime knows of its workers, and of the batches that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.drop_in.workers.link import PoolLink
from headrace.drop_in.workers.messages import Result, Start
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.failures import PackedError
from headrace.memory import Segment
from headrace.torch_compat.stateful import PackedStates, is_known


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
