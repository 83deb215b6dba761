"""Tasks and results of workers for torch's data sets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace._util.shared_memory import Segment
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import cannot_carry_index, is_death, pack_worker_error
from headrace.torch_compat.stateful import PackedStates
from headrace.workers.failures import PackedError

Result = (
    tuple[Literal["slots"], int, int, int, list[list[object]]]  # segment, samples, slots, columns outside the slots
    | tuple[Literal["packed"], int, tuple[int, ...]]  # segment, lengths of the pickle and its buffers
    | tuple[Literal["inline"], list[bytes]]  # the pickle and its buffers
    | tuple[Literal["object"], object]  # the batch itself, from a thread of this process
    | tuple[Literal["error", "died"], PackedError]  # "died": no subclass of Exception, which would end a torch worker
    | tuple[Literal["end"]]  # the worker's data set has no more samples
)
"""A worker's result on the wire: a kind and its fields."""


def segment_of(result: Result) -> int | None:
    return result[1] if result[0] == "slots" or result[0] == "packed" else None


def failed_by(error: BaseException, number: int, *, in_thread: bool) -> Result:
    kind: Literal["error", "died"] = "died" if is_death(error) else "error"
    return kind, pack_worker_error(error, f"in DataLoader worker {'thread' if in_thread else 'process'} {number}")


def packed_index(index: object) -> object:
    """Return a batch's index for the wire: bytes, unless it consists of plain values.

    Raises:
        CannotCarryError: it cannot be sent to another process. The message names the attribute at fault.
    """
    kinds = set(map(type, index)) if isinstance(index, list) else {type(index)}
    if kinds <= _PLAIN:
        return copy.copy(index)  # threads get the object, and may change it
    try:
        return serialize.pack_bytes(index)
    except Exception as error:
        raise cannot_carry_index(error, index) from error


def unpacked_index(packed: object) -> Any:
    return serialize.unpack_bytes(packed) if isinstance(packed, bytes) else packed


_PLAIN = {int, str, float, bool, type(None)}  # and lists of them


StateAfter = tuple[PackedStates | None, bool]
"""Sent with a result: states of the worker's copy of the data set after it, and whether the copy is over."""

UNTOLD: StateAfter = (None, False)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], object]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], object] | None
    num_workers: int
    shared_seed: int | None


@dataclass(frozen=True, slots=True)
class Start:
    """Resume point of a worker.

    Attributes:
        is_over: True if the data set has no more samples.
        made: Number of batches that the worker had made in this epoch.
        again: (packed index, count) of batches to make again and drop.
        is_finished: True if the epoch was over, so that the next one starts.
    """

    blob: PackedStates | None = None
    is_over: bool = False
    made: int = 0
    again: tuple[tuple[object, int], ...] = ()
    is_finished: bool = False


# Memory that workers share with the trainer.

# Words of each worker: current task, index of its current sample, and the total nanoseconds of making batches, of the
# collate function (included in the former) and of starting. The first word of the memory makes all workers end.
WORDS = 5
TASK, SAMPLE, MADE_NS, COLLATE_NS, START_NS = range(WORDS)


class WorkerProgress:
    """The trainer's view of the words shared with workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._segment = Segment.create(8 * (1 + WORDS * workers))
        self._words = self._segment.view.cast("q")

    def place_of(self, worker: int) -> tuple[tuple[str, int, int], list[int]]:
        return ("words", self._segment.size, _first_of(worker)), [self._segment.fd]

    def have_all_end(self) -> None:
        self._words[0] = True

    def taken(self, worker: int) -> tuple[int, int]:
        """Return and reset (task, index of the sample) of a worker that ended. -1: not in a sample."""
        first = _first_of(worker)
        task, sample = self._words[first + TASK], self._words[first + SAMPLE]
        self._words[first + TASK], self._words[first + SAMPLE] = 0, -1
        return task, sample

    def spent_ns(self, what: int) -> int:
        """Return the total of all workers for a word such as `COLLATE_NS`."""
        return sum(self._words[_first_of(worker) + what] for worker in range(self._workers))

    def close(self) -> None:
        self._segment.close()


def _first_of(worker: int) -> int:
    return 1 + WORDS * worker
