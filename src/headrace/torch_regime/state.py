"""States of loaders of torch data sets: the trainer's progress, and its saved form."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NotRequired, TypedDict

from torch.utils.data import DataLoader

from headrace.errors import OptionError
from headrace.order.cursor import united
from headrace.state.state import whole_check
from headrace.torch_compat import serialize
from headrace.torch_compat.indices import Draws, Indices, SamplerState
from headrace.torch_compat.stateful import PackedStates, States, unpacked_states
from headrace.torch_regime.workers.pool import LOST, Answers
from headrace.types import Ranges

_POINTS = 3  # number of latest batches with a state, for wrappers that prefetch one

log = logging.getLogger("headrace")


class CopyState(TypedDict):
    """State of a worker's copy of the data set. See `WorkerSnapshot`."""

    batches: int
    known: int
    is_over: bool
    states: States | None


class LoaderState(TypedDict):
    """A state's description of its loader. `docs/reference/state.md` specifies the fields."""

    version: int
    regime: str
    is_map: bool
    economic: bool
    num_workers: int
    batch_size: int | None
    epoch: int | None
    count: int | None
    sampler_type: str | None
    sampler_length: int | None
    sampler_replacement: int | None
    generator: list[bool]
    num_replicas: int | None
    sampler_seed: int | None
    sampler_shuffle: int | None
    sampler_drop_last: int | None
    base_seed: NotRequired[int]
    shared_seed: NotRequired[int | None]
    epoch_of_samples: NotRequired[int]
    run: NotRequired[int]


class StateDict(LoaderState):
    is_finished: bool
    batches: int
    due: int
    beyond: Sequence[Sequence[int]]
    turn: int
    generators: list[str]
    sampler: SamplerState | None
    copies: list[CopyState]
    check: NotRequired[str]


class WorkerSnapshot(NamedTuple):
    """Progress of the trainer in a worker's copy of the data set.

    Attributes:
        batches: Number of batches received from the worker.
        known: Number of batches after which `blob` was taken. The batches up to `batches` are made again on resume. For
            map-style data, the worker's k-th batch is k * n + worker. If that may not hold, `known` equals `batches`.
        is_over: True if the copy has no more samples.
    """

    batches: int = 0
    known: int = 0
    is_over: bool = False
    blob: PackedStates | None = None


class RunPoint(NamedTuple):
    """Position of the trainer in a run.

    Attributes:
        given: Number of batches returned, without errors.
        due: Number of the first batch that neither was returned nor raised an error.
        beyond: Numbers after `due` that were returned nevertheless, if order is not kept.
        turn: The worker that gets the next index.
    """

    given: int
    due: int
    beyond: Ranges
    turn: int
    copies: tuple[WorkerSnapshot, ...]


class RunProgress:
    """The trainer's progress in one run of an iterator. Outlives the iterator."""

    def __init__(self, common: LoaderState, indices: Indices | None, draws: Draws, point: RunPoint) -> None:
        self._common, self._draws = common, draws
        self._count = common["num_workers"]
        self.indices = indices
        self._points = deque([point], _POINTS)
        self.is_finished = False
        self.held: int | None = None  # number of batches (0 for an error) made and not yet returned
        self.lock = threading.RLock()  # replaced by the iterator's lock, which it holds during changes
        self.initial: Answers = []  # initial states of the workers' copies
        self.ask_initial: weakref.WeakMethod[Callable[[], None]] | None = None  # completes `initial`
        self.ask_now: weakref.WeakMethod[Callable[[], Answers]] | None = None  # gets current states
        self.copy_now: Callable[[WorkerSnapshot], WorkerSnapshot] | None = None  # of the trainer's own data set

    def add(self, *, epoch_of_samples: int, run: int) -> None:
        self._common["epoch_of_samples"], self._common["run"] = epoch_of_samples, run

    @property
    def given(self) -> int:
        return self._points[-1].given

    @property
    def due(self) -> int:
        return self._points[-1].due

    @property
    def point(self) -> RunPoint:
        return self._points[-1]

    @property
    def copies(self) -> tuple[WorkerSnapshot, ...]:
        return self._points[-1].copies

    def receive(
        self,
        number: int,
        worker: int,
        given: int,
        *,
        blob: PackedStates | None = None,
        is_over: bool = False,
        died: bool = False,
    ) -> None:
        """Record that the trainer got batch `number`, or its error.

        Args:
            given: Number of batches returned by then.
            blob: State of the worker's copy after the batch, if taken.
            is_over: True if the copy has no more samples.
            died: True if no worker could make the batch.
        """
        last = self._points[-1]
        _, due, beyond, _, copies = last
        if number == due and not beyond:
            due += 1
        else:
            beyond = united((*beyond, (number, number + 1)))
            if beyond[0][0] == due:
                (_, due), *rest = beyond
                beyond = tuple(rest)
        if copies:
            old = copies[worker]
            count = old.batches + 1
            known = count if blob is not None or died else old.known
            new = WorkerSnapshot(count, known, is_over, old.blob if blob is None else blob)
            copies = (*copies[:worker], new, *copies[worker + 1 :])
        turn = worker + 1 if worker + 1 < self._count else 0
        self._add(RunPoint(given, due, beyond, turn, copies))

    def end_copy(self, worker: int, blob: PackedStates | None) -> None:
        last = self._points[-1]
        old = last.copies[worker]
        known = old.known if blob is None else old.batches
        new = old._replace(known=known, is_over=True, blob=old.blob if blob is None else blob)
        self._add(last._replace(copies=(*last.copies[:worker], new, *last.copies[worker + 1 :])))

    def _add(self, point: RunPoint) -> None:
        if self._points[-1].given == point.given:
            self._points[-1] = point
        else:
            self._points.append(point)
        if self.indices is not None and self.indices.are_kept:
            self.indices.forget(self._first_needed(self._points[0]))

    def _first_needed(self, point: RunPoint) -> int:
        """Return the first batch whose index is needed to resume from a point."""
        if not self._common["is_map"]:
            return point.due
        n = max(1, len(point.copies))
        again = (copy.known * n + worker for worker, copy in enumerate(point.copies) if copy.known < copy.batches)
        return min((point.due, *again))

    def state(self, batches: int | None = None, *, is_over: bool = False) -> StateDict:
        """Return a state to resume after the batches received. It shares no objects with the run.

        Args:
            batches: Resume after this number of batches instead.
            is_over: True if the run ends with these, even if the trainer did not reach the end.

        Raises:
            OptionError: the state after `batches` batches is not available any more, or not yet. Or it was lost with
                the workers.
        """
        with self.lock:
            return self._state(batches, is_over)

    def _state(self, batches: int | None, is_over: bool) -> StateDict:
        point = self._points[-1]
        if batches is None and self.held is not None:
            batches = point.given - self.held
        if batches is not None and batches != point.given:
            found = [known for known in self._points if known.given == batches]
            if not found:
                there = ", ".join(str(known.given) for known in self._points)
                raise OptionError(f"batches={batches}: the states after {there} batches of this epoch are there")
            point = found[0]
        elif self.copy_now is not None and (batches is None or not self.is_finished):
            point = point._replace(copies=(self.copy_now(point.copies[0]),))
        if self.ask_initial is not None and (ask := self.ask_initial()) is not None:
            ask()
        if self.ask_now is not None and self.is_finished and batches is None:
            point = self._at_the_end(point)
        is_finished = is_over or (
            self.is_finished and batches is None
        )  # after `batches` batches the end is not reached
        first = self._first_needed(point)
        sampler = None if self.indices is None else self.indices.after(first, is_finished=is_finished)
        state: StateDict = {
            **copy.deepcopy(self._common),
            "is_finished": is_finished,
            "batches": point.given,
            "due": point.due,
            "beyond": [list(numbers) for numbers in point.beyond],
            "turn": point.turn,
            "generators": self._draws.now(),
            "sampler": sampler,
            "copies": [self._describe(worker, known) for worker, known in enumerate(point.copies)],
            "check": "",
        }
        state["check"] = whole_check(state)
        return state

    def _at_the_end(self, point: RunPoint) -> RunPoint:
        """Request missing final states, which persistent workers carry into the next epoch."""
        if not self._common["is_map"] or all(known.known == known.batches for known in point.copies):
            return point
        copies, ask = list(point.copies), None if self.ask_now is None else self.ask_now()
        if ask is None:
            raise OptionError(LOST)
        for worker, answer in enumerate(ask()):
            if answer is not None:
                copies[worker] = WorkerSnapshot(copies[worker].batches, copies[worker].batches, blob=answer[0])
        return point._replace(copies=tuple(copies))

    def _describe(self, worker: int, known: WorkerSnapshot) -> CopyState:
        blob = known.blob
        if blob is None and worker < len(self.initial):
            (blob,) = self.initial[worker] or (None,)
        return {
            "batches": known.batches,
            "known": known.known,
            "is_over": known.is_over,
            "states": unpacked_states(blob),
        }


class SnapshotSchedule:
    """Decides whether states are kept. To save cost, none are kept before the first request."""

    def __init__(self) -> None:
        self.is_asked = False

    def every(self, option: int | None) -> int:
        """Resolve `snapshot_every_n_steps`. None: each batch, once a state was requested. 0: never."""
        return int(self.is_asked) if option is None else option


class SnapshotBook:
    """A loader's newest run, and the state that the next run resumes from."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self._draws = Draws(loader.generator, loader._index_sampler)
        self.pace = SnapshotSchedule()
        self.loaded: StateDict | None = None
        self.run: RunProgress | None = None
        self._has_warned = False

    def draws_of(self, loader: DataLoader[object]) -> Draws:
        if self._draws.base.generator is not loader.generator:
            self._draws = Draws(loader.generator, loader._index_sampler)
        return self._draws

    def take(self) -> StateDict | None:
        """Return the state for the run that starts now. `loaded` keeps it until that has started."""
        loaded = self.loaded
        if loaded is not None and not loaded["is_map"] and not loaded["is_finished"]:
            again = sum(known["batches"] - known["known"] for known in loaded["copies"] if known["states"] is None)
            if again and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "neither the data set nor its iterator has state_dict and load_state_dict: to resume, %d batches "
                    "are read once more, and dropped",
                    again,
                )
        return loaded


def is_among(number: int, ranges: Ranges) -> bool:
    return any(start <= number < stop for start, stop in ranges)


def copy_of(loaded: CopyState) -> WorkerSnapshot:
    blob = None if loaded["states"] is None else serialize.pack_bytes(loaded["states"])
    return WorkerSnapshot(loaded["batches"], loaded["known"], loaded["is_over"], blob)
