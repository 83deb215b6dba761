"""What the workers of the torch regime are told, and what they answer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.failures import PackedError
from headrace.memory import Segment
from headrace.torch_compat import serialize
from headrace.torch_compat.errors import is_death, pack_worker_error
from headrace.torch_compat.stateful import PackedStates
from headrace.torch_compat.why_unpicklable import cannot_carry_index

SlotsResult = tuple[Literal["slots"], int, int, int, list[list[object]]]
"""The segment's number, how many samples, how many slots, the columns that are not in slots."""

PackedResult = tuple[Literal["packed"], int, tuple[int, ...]]
"""The segment's number, the lengths of the pickle and its buffers there."""

InlineResult = tuple[Literal["inline"], list[bytes]]
"""The pickle and its buffers themselves."""

ObjectResult = tuple[Literal["object"], object]
"""The batch itself, which has stayed in the process."""

ErrorResult = tuple[Literal["error", "died"], PackedError]
"""An exception; "died" is one that is no Exception, by which torch's worker would have died."""

EndResult = tuple[Literal["end"]]
"""The worker's data set has no more samples."""

Result = SlotsResult | PackedResult | InlineResult | ObjectResult | ErrorResult | EndResult
"""What a worker answers, as it goes over the wire: a kind and its fields."""


def segment_of(result: Result) -> int | None:
    """The number of the segment that a batch lies in; None: it lies in none."""
    return result[1] if result[0] == "slots" or result[0] == "packed" else None


def failed_by(error: BaseException, number: int, *, in_thread: bool) -> Result:
    """The answer where a user's function has raised."""
    kind: Literal["error", "died"] = "died" if is_death(error) else "error"
    return kind, pack_worker_error(error, f"in DataLoader worker {'thread' if in_thread else 'process'} {number}")


def packed_index(index: object) -> object:
    """A batch's index as it goes over the wire: what is not the same object in every process as bytes.

    Raises:
        CannotCarryError: it cannot be sent to another process; the message names the attribute at fault.
    """
    kinds = set(map(type, index)) if isinstance(index, list) else {type(index)}
    if kinds <= _PLAIN:
        return index
    try:
        return serialize.pack_bytes(index)
    except Exception as error:
        raise cannot_carry_index(error, index) from error


def unpacked_index(packed: object) -> Any:
    """The index of `packed_index`."""
    return serialize.unpack_bytes(packed) if isinstance(packed, bytes) else packed


_PLAIN = {int, str, float, bool, type(None)}  # and lists of them


StateAfter = tuple[PackedStates | None, bool]
"""What may be told with a result: the states of a worker's copy of the data set afterwards, and whether it is over."""

UNTOLD: StateAfter = (None, False)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the workers of one iterator are told; the names are those of torch's loader."""

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
    """Where a worker goes on.

    Attributes:
        blob: the states of the data set and its iterator, packed; None where they have none.
        is_over: the data set has no more samples.
        made: how many batches of this epoch the worker had made.
        again: packed indices of batches that were made after that state, and how often each is made, and dropped.
        is_finished: the epoch was over: the next one is begun.
    """

    blob: PackedStates | None = None
    is_over: bool = False
    made: int = 0
    again: tuple[tuple[object, int], ...] = ()
    is_finished: bool = False


# Memory that workers share with the trainer.

# Of each worker: the task it is at, the index of the sample in it, and nanoseconds that it has spent so far in making
# batches, in the collate function among that, and in beginning. Before them is a word for all: whether they are to end.
WORDS = 5
TASK, SAMPLE, MADE_NS, COLLATE_NS, START_NS = range(WORDS)


class WorkerProgress:
    """The trainer's end.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._segment = Segment.create(8 * (1 + WORDS * workers))
        self._words = self._segment.view.cast("q")

    def place_of(self, worker: int) -> tuple[tuple[str, int, int], list[int]]:
        """The message, and the descriptor with it, by which a worker is told where its words are."""
        return ("words", self._segment.size, _first_of(worker)), [self._segment.fd]

    def have_all_end(self) -> None:
        """Have workers end after what they are in the middle of."""
        self._words[0] = True

    def taken(self, worker: int) -> tuple[int, int]:
        """The task that a worker was at when it ended, and the index of the sample in it; -1: in none."""
        first = _first_of(worker)
        task, sample = self._words[first + TASK], self._words[first + SAMPLE]
        self._words[first + TASK], self._words[first + SAMPLE] = 0, -1
        return task, sample

    def spent_ns(self, what: int) -> int:
        """What all workers together have spent on something, such as `COLLATE_NS`."""
        return sum(self._words[_first_of(worker) + what] for worker in range(self._workers))

    def close(self) -> None:
        """Let go of the memory, which workers still have."""
        self._segment.close()


def _first_of(worker: int) -> int:
    return 1 + WORDS * worker


# Objects on their way from one thread to another, over a wire that carries bytes: only their places travel.

_shelf_numbers = itertools.count()


class ObjectTable:
    """Where one thread puts objects for another."""

    def __init__(self) -> None:
        self._number = next(_shelf_numbers)
        self._objects: dict[int, object] = {}
        self._places = itertools.count()
        self._is_closed = False
        _shelves[self._number] = self

    def put(self, value: object) -> object:
        """What to pickle in its place: it is unpickled, once, as `value` itself."""
        place = next(self._places)
        self._objects[place] = value
        if self._is_closed:  # asked after it was put: whichever of two threads is later clears it away
            self._objects.clear()
        return _ObjectRef(self._number, place)

    def take(self, place: int) -> object:
        """What was put there, which is not in the table any more."""
        return self._objects.pop(place)

    def close(self) -> None:
        """Nobody will take what is there, and what may still be put there."""
        self._is_closed = True
        self._objects.clear()


_shelves: weakref.WeakValueDictionary[int, ObjectTable] = weakref.WeakValueDictionary()


class _ObjectRef:
    def __init__(self, table: int, place: int) -> None:
        self._table, self._place = table, place

    def __reduce__(self) -> tuple[object, ...]:
        return _taken, (self._table, self._place)


def _taken(table: int, place: int) -> object:
    return _shelves[table].take(place)
