"""What the trainer's side of the torch regime knows of its workers, and of the batches that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.drop_in.workers.messages import Result, Start
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.errors import WorkerDiedError
from headrace.failures import PackedError
from headrace.memory import Segment
from headrace.processes.wire import PolledWire
from headrace.torch_compat import serialize
from headrace.torch_compat.stateful import PackedStates
from headrace.work.messages import exit_text


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
        self.wire: PolledWire | None = None
        self.sentinel = -1
        self.known: set[int] = set()  # segments that it has mapped
        self.tasks: dict[int, BatchTask] = {}  # in the order in which it works on them
        self.spec = b""
        self.start: Start | None = None  # where another one would go on in its place
        self.made: Segment | None = None  # a place that it has made, and not yet said what for
        self.failure: PackedError | None = None  # why it is not started again
        self.is_mourned = False  # that was told
        self.how = ""  # it came to its end, where that is known besides its exit code
        self.awaits_writing = False


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


def death(pid: int | None, code: int | None, how: str, batch: int | None = None) -> PackedError:
    """The error of a worker's death, packed."""
    return serialize.pack_error(
        WorkerDiedError(
            f"DataLoader worker (pid(s) {pid}) exited unexpectedly ({exit_text(code)}){how}",
            pid=pid or 0,
            exitcode=code,
            batch=batch,
        )
    )
