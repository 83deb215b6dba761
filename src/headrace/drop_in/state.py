"""How far an iterator of the torch regime has come, and how that is saved: of what the trainer has received."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NotRequired, TypedDict

from torch.utils.data import DataLoader

from headrace.errors import OptionError
from headrace.plan.ranges import united
from headrace.state_checks import whole_check
from headrace.torch_compat import serialize
from headrace.torch_compat.draws import Draws
from headrace.torch_compat.indices import Indices, SamplerState
from headrace.torch_compat.stateful import PackedStates, States, unpacked_states
from headrace.types import Ranges

_POINTS = 3  # of the last so many batches, for wrappers that have fetched one more than they gave on

log = logging.getLogger("headrace")


class CopyState(TypedDict):
    """Of a worker's copy of the data set; see `WorkerSnapshot`."""

    batches: int
    known: int
    is_over: bool
    states: States | None


class LoaderState(TypedDict):
    """What a state says of a loader, besides how far it is. `docs/reference/state.md` specifies the fields."""

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
    """A state."""

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
    """A worker's copy of the data set: what the trainer has received of it.

    Its state is known from `known` batches on, of which `batches` were received: those between are made again. Of a
    map-style data set, the k-th of them was batch k * n + worker; where that may not be so, none are between.
    """

    batches: int = 0
    known: int = 0
    is_over: bool = False
    blob: PackedStates | None = None


class RunPoint(NamedTuple):
    """Where the trainer is.

    Attributes:
        given: how many batches it was given; one for which it got an error is none.
        due: the number of the first batch that it got neither of.
        beyond: the numbers of those after it that it got nevertheless, where order is not kept; they leave out no more
            than is under way.
        turn: the worker that is asked next.
        copies: of each worker's data set.
    """

    given: int
    due: int
    beyond: Ranges
    turn: int
    copies: tuple[WorkerSnapshot, ...]


class RunProgress:
    """One run of an iterator over the data, as far as the trainer has received it. It outlives the iterator.

    Args:
        common: what is the same in all states of this run.
        indices: what the sampler gives; None where it gives nothing of interest.
        draws: where random numbers come from.
        point: where it begins.
    """

    def __init__(self, common: LoaderState, indices: Indices | None, draws: Draws, point: RunPoint) -> None:
        self._common, self._draws = common, draws
        self._count = common["num_workers"]
        self.indices = indices
        self._points = deque([point], _POINTS)
        self.is_finished = False
        self.held: int | None = None  # batches, none where it is an error, that wait for the trainer to come back
        self.lock = threading.RLock()  # or the iterator's, which holds it while it changes anything here
        self.begun: list[tuple[PackedStates | None] | None] = []  # the states with which workers' copies began
        self.ask_begun: Callable[[], None] | None = None
        self.ask_now: Callable[[], list[tuple[PackedStates | None] | None]] | None = None  # those in which they are
        self.copy_now: Callable[[WorkerSnapshot], WorkerSnapshot] | None = (
            None  # of the trainer's own data set, where no worker has one
        )

    def add(self, *, epoch_of_samples: int, run: int) -> None:
        """Have these in all states of this run, too."""
        self._common["epoch_of_samples"], self._common["run"] = epoch_of_samples, run

    @property
    def given(self) -> int:
        """How many batches the trainer was given."""
        return self._points[-1].given

    @property
    def due(self) -> int:
        """The number of the next batch that it has neither been given nor got an error for."""
        return self._points[-1].due

    @property
    def point(self) -> RunPoint:
        """Where the trainer is."""
        return self._points[-1]

    @property
    def copies(self) -> tuple[WorkerSnapshot, ...]:
        """Of each worker's data set, as far as it was received."""
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
        """The trainer has got batch `number`, or its error.

        Args:
            given: how many batches it was given by then.
            blob: the state of the worker's copy afterwards, where one was made.
            is_over: the copy has no more samples.
            died: no worker could make it.
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
        """A worker's copy has said that it has no more samples."""
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
        """The number of the first batch that is drawn again to go on from a point."""
        if not self._common["is_map"]:
            return point.due
        n = max(1, len(point.copies))
        again = (copy.known * n + worker for worker, copy in enumerate(point.copies) if copy.known < copy.batches)
        return min((point.due, *again))

    def state(self, batches: int | None = None, *, is_over: bool = False) -> StateDict:
        """All that is needed to go on after what the trainer has received; its own objects, for ever.

        Args:
            batches: go on after so many batches instead.
            is_over: this run has ended with these, whether the trainer was told or not.

        Raises:
            OptionError: how it was then is not known any more, or not yet; or it has ended with the workers.
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
        if self.ask_begun is not None:
            self.ask_begun()
        if self.ask_now is not None and self.is_finished and batches is None:
            point = self._at_the_end(point)
        is_finished = is_over or (
            self.is_finished and batches is None
        )  # who counts batches is not at the end with the last one
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
        """Workers that stay are asked for what they carry on, where the state after their last batch is not known."""
        assert self.ask_now is not None
        if not self._common["is_map"] or all(known.known == known.batches for known in point.copies):
            return point
        copies = list(point.copies)
        for worker, answer in enumerate(self.ask_now()):
            if answer is not None:
                copies[worker] = WorkerSnapshot(copies[worker].batches, copies[worker].batches, blob=answer[0])
        return point._replace(copies=tuple(copies))

    def _describe(self, worker: int, known: WorkerSnapshot) -> CopyState:
        blob = known.blob
        if blob is None and worker < len(self.begun):
            (blob,) = self.begun[worker] or (None,)
        return {
            "batches": known.batches,
            "known": known.known,
            "is_over": known.is_over,
            "states": unpacked_states(blob),
        }


class SnapshotSchedule:
    """Whether anybody has asked a loader for a state: before that, none is kept for later, as that is not for nothing.

    Attributes:
        is_asked: somebody has.
    """

    def __init__(self) -> None:
        self.is_asked = False

    def every(self, option: int | None) -> int:
        """After how many batches states are kept; 0: after none.

        Args:
            option: what the user wants, in any case; None: after each, as soon as somebody has asked.
        """
        return int(self.is_asked) if option is None else option


class SnapshotBook:
    """What a loader remembers of its newest run, and of a state that the next one begins with.

    Args:
        loader: it is not kept.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._draws = Draws(loader.generator, loader._index_sampler)
        self.pace = SnapshotSchedule()
        self.loaded: StateDict | None = None
        self.run: RunProgress | None = None
        self._has_warned = False

    def draws_of(self, loader: DataLoader[object]) -> Draws:
        """Where the loader's random numbers come from."""
        if self._draws.base.generator is not loader.generator:
            self._draws = Draws(loader.generator, loader._index_sampler)
        return self._draws

    def take(self) -> StateDict | None:
        """The state that the run which now begins goes on from; it stays in `loaded` until that has begun."""
        loaded = self.loaded
        if loaded is not None and not loaded["is_map"] and not loaded["is_finished"]:
            again = sum(known["batches"] - known["known"] for known in loaded["copies"] if known["states"] is None)
            if again and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "neither the data set nor its iterator has state_dict and load_state_dict: to go on, %d batches "
                    "are read once more, and dropped",
                    again,
                )
        return loaded


def is_among(number: int, ranges: Ranges) -> bool:
    """Whether a number is in one of some ranges."""
    return any(start <= number < stop for start, stop in ranges)


def copy_of(loaded: CopyState) -> WorkerSnapshot:
    """A worker's copy of the data set, as a state tells of it."""
    blob = None if loaded["states"] is None else serialize.pack_bytes(loaded["states"])
    return WorkerSnapshot(loaded["batches"], loaded["known"], loaded["is_over"], blob)
