"""States of loaders of torch data sets: the trainer's progress, its saved form, and checks of a loaded state."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _DatasetKind

from headrace.errors import OptionError, StateMismatchError
from headrace.order.cursor import united
from headrace.state.state import VERSION, check_kind, is_as_saved, whole_check
from headrace.torch_compat import serialize
from headrace.torch_compat.stateful import (
    Draws,
    Indices,
    PackedStates,
    SamplerState,
    States,
    chain_of,
    decoded,
    parts_of,
    unpacked_states,
)
from headrace.torch_compat.torch_loader import TorchLoader
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
    def point(self) -> RunPoint:
        return self._points[-1]

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


_OF_ECONOMIC = ("epoch_of_samples", "run")
_FIELDS = tuple(name for name in StateDict.__annotations__ if name not in ("version", "regime", "check", *_OF_ECONOMIC))
_FIELDS_OF = {"sampler": tuple(SamplerState.__annotations__), "copies": tuple(CopyState.__annotations__)}
_OPTIONAL = frozenset(("batch_size", "shared_seed", "samples"))
_NUMBERS = _OPTIONAL | {"num_workers", "base_seed", "batches", "known", "due", "turn", "epoch_of_samples", "run"}
_NUMBER_MOST = 2**64
_FLAGS = frozenset(("is_map", "economic", "is_finished", "is_over"))
_DATA = {
    "count": "the data set has another number of samples",
    "sampler_type": "the sampler is of another kind",
    "num_replicas": "the sampler divides its indices among another number of ranks",
    "sampler_seed": "the sampler has another seed",
    "sampler_shuffle": "only one of the samplers shuffles",
    "sampler_drop_last": "only one of the samplers drops indices that ranks cannot share evenly",
    "sampler_length": "the sampler gives another number of indices",
    "sampler_replacement": "only one of the samplers draws with replacement",
}
# Samplers whose length is fixed. Others may compute it by drawing an epoch.
_KNOWN_LENGTHS = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
_SENSELESS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check(loader: TorchLoader[object], state: Mapping[str, Any], *, force: bool) -> StateDict:
    """Return a copy of a state that the loader can resume from.

    Args:
        force: Accept other data or another sampler. For map-style data, accept another number of workers and drop the
            states of their data sets. In economic mode, accept another batch size.

    Raises:
        StateMismatchError: the loader cannot resume from it. The message names the field.
    """
    check_kind(state, "torch")
    try:
        loaded = _loadable(loader, copy.deepcopy(dict(state)), force=force)
    except StateMismatchError:
        raise
    except _SENSELESS as error:
        raise StateMismatchError(f"this is no whole state of a loader: {error!r:.200}", field="version") from error
    if not force and not is_as_saved(state):
        raise StateMismatchError("the state is not as it was saved: it was edited, or is damaged", field="check")
    loaded["check"] = whole_check(loaded)  # batches may have another size now
    return loaded


def _loadable(loader: TorchLoader[object], state: dict[str, Any], *, force: bool) -> StateDict:
    ours = common(loader)
    loaded = _checked(state, is_economic=ours["economic"])
    _compare(loaded, ours, force=force)
    if loaded["is_map"] and loaded["sampler"] is None:
        raise StateMismatchError("sampler: it is missing, and data with __getitem__ needs one", field="sampler")
    if not loaded["is_map"] and len(loaded["copies"]) != max(1, loaded["num_workers"]):
        text = f"copies: {len(loaded['copies'])} of them, for num_workers={loaded['num_workers']}"
        raise StateMismatchError(text, field="copies")
    if loaded["generator"] != ours["generator"]:
        raise StateMismatchError(
            f"generator: True if the loader has one, and its sampler: {loaded['generator']} in the state, "
            f"{ours['generator']} in the loader",
            field="generator",
        )
    if loaded["num_workers"] != loader.num_workers and not loader.economic:
        if not (force and loaded["is_map"]):
            raise StateMismatchError(
                f"num_workers: {loaded['num_workers']} in the state, {loader.num_workers} in the loader; each worker's "
                "copy of the data set has a state of its own",
                field="num_workers",
            )
        loaded["num_workers"], loaded["copies"] = loader.num_workers, []
        loaded["turn"] = loaded["due"] % max(1, loader.num_workers)
    batch_size = ours["batch_size"]
    if loaded["batch_size"] != batch_size:
        if not _fits(loaded, loader, batch_size, force=force):
            raise StateMismatchError(
                f"batch_size: {loaded['batch_size']} in the state, {batch_size} in the loader; the rest of "
                "this epoch cannot be divided into such batches: end it with the same ones",
                field="batch_size",
            )
        if batch_size is not None and loaded["is_map"] and not loaded["is_finished"]:
            _renumber(loaded, batch_size)
    return loaded


def _compare(loaded: Mapping[str, object], ours: Mapping[str, object], *, force: bool) -> None:
    """Raise StateMismatchError if the loader's data or sampler differ from the state's."""
    for name in ("is_map", "economic"):
        if loaded[name] != ours[name]:
            raise StateMismatchError(f"{name}: {loaded[name]} in the state, {ours[name]} in the loader", field=name)
    for name, meaning in _DATA.items():
        if None not in (loaded[name], ours[name]) and loaded[name] != ours[name] and not force:
            raise StateMismatchError(
                f"{name}: {meaning}: {loaded[name]!r} in the state, {ours[name]!r} in the loader", field=name
            )


def _fits(loaded: StateDict, loader: DataLoader[object], batch_size: int | None, *, force: bool) -> bool:
    """True if a loader with another batch size can resume and deliver each sample once.

    No received batch may have to be made again or skipped later, as it would have other samples. The received batches
    must be a whole number of new batches, as later states count these.
    """
    if loaded["is_finished"]:
        return True
    if batch_size is None or loaded["batch_size"] is None or type(loader._index_sampler) is not BatchSampler:
        return False
    sampler = loaded["sampler"]
    if sampler is not None and (sampler["samples"] is None or sampler["samples"] % batch_size):
        return False
    if loaded["beyond"] or (sampler is not None and sampler["batches"] != loaded["due"]):
        return False
    if any(known["known"] != known["batches"] for known in loaded["copies"]):
        return False
    return not loaded["economic"] or force  # there `__getitems__` draws random numbers per batch


def _renumber(loaded: StateDict, batch_size: int) -> None:
    count = max(1, loaded["num_workers"])
    sampler = loaded["sampler"]
    assert sampler is not None
    assert sampler["samples"] is not None
    loaded["due"] = sampler["batches"] = sampler["samples"] // batch_size
    loaded["turn"] = loaded["due"] % count
    for worker, known in enumerate(loaded["copies"]):
        known["batches"] = known["known"] = len(range(worker, loaded["due"], count))


def _checked(state: Any, *, is_economic: bool) -> StateDict:
    """Check that a state is complete, or raise StateMismatchError. Values may still be wrong."""
    parts: list[tuple[str, object, tuple[str, ...]]] = [("", state, _FIELDS)]
    if is_economic and state.get("economic"):
        parts.append(("", state, _OF_ECONOMIC))
    if state.get("sampler") is not None:
        parts.append(("sampler", state["sampler"], _FIELDS_OF["sampler"]))
    copies = state.get("copies", ())
    parts += [("copies", known, _FIELDS_OF["copies"]) for known in (copies if _is_row(copies) else [copies])]
    for where, part, names in parts:
        for name in names:
            field = where or name
            if not isinstance(part, dict) or name not in part:
                raise StateMismatchError(f"{field}: {name!r} is missing: this is no whole state", field=field)
            value, text = part[name], None
            is_number = type(value) is int and 0 <= value < _NUMBER_MOST
            if name in _NUMBERS and not is_number and not (value is None and name in _OPTIONAL):
                text = f"{field}: {name!r} is {value!r:.50}"
            elif name in _FLAGS and type(value) is not bool:
                text = f"{field}: {name!r} is {value!r:.50}, neither true nor false"
            elif name == "states" and not isinstance(value, dict | None):
                text = f"{where}: 'states' is {value!r:.50}"
            if text is not None:
                raise StateMismatchError(text, field=field)
    try:
        state["beyond"] = [(int(start), int(stop)) for start, stop in state["beyond"]]
    except (TypeError, ValueError) as error:
        raise StateMismatchError(f"beyond: {state['beyond']!r:.50} are no ranges", field="beyond") from error
    starts = (None, None) if state["sampler"] is None else state["sampler"]["start"]
    if not _is_row(state["generators"]):
        raise StateMismatchError(f"generators: {state['generators']!r:.50} is no list", field="generators")
    if not _is_row(starts) or len(starts) != 2:
        raise StateMismatchError(f"sampler: {starts!r:.50} is no start", field="sampler")
    for text in state["generators"]:
        decoded(text)
    for text in starts:
        if text is not None:
            decoded(text)
    whole: StateDict = state
    return whole


def _is_row(value: object) -> bool:
    return isinstance(value, list | tuple)


def common(loader: TorchLoader[object]) -> LoaderState:
    """Return a state's description of its loader, without progress."""
    is_map = loader._dataset_kind == _DatasetKind.Map
    sampler = loader._index_sampler
    inmost = sampler.sampler if type(sampler) is BatchSampler else sampler
    ranks = next(parts_of(sampler, (DistributedSampler,)), None)
    random = next(parts_of(sampler, (RandomSampler, WeightedRandomSampler)), None)
    return {
        "version": VERSION,
        "regime": "torch",
        "is_map": is_map,
        "economic": bool(loader.economic),
        "num_workers": loader.num_workers,
        "batch_size": _number(sampler, "batch_size"),
        "epoch": epoch_of(loader),
        "count": _count_of(loader.dataset) if is_map else None,
        "sampler_type": type(inmost).__name__ if is_map else None,
        "sampler_length": next(map(_count_of, parts_of(sampler, _KNOWN_LENGTHS)), None) if is_map else None,
        "sampler_replacement": _number(random, "replacement"),
        "generator": [loader.generator is not None, _has_generator(sampler)],
        "num_replicas": _replicas_of(sampler) if is_map else None,
        "sampler_seed": _number(ranks, "seed"),
        "sampler_shuffle": _number(ranks, "shuffle"),
        "sampler_drop_last": _number(ranks, "drop_last"),
    }


def _count_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a data set whose keys only the sampler knows
        return None


def _has_generator(sampler: object) -> bool:
    own = (part for part in chain_of(sampler) if type(part) in _DRAWING)
    return any(part.generator is not None for part in own)


def _replicas_of(sampler: object) -> int | None:
    names = ("num_replicas", "num_processes")
    counts = (_number(part, name) for part in chain_of(sampler) for name in names)
    return next((count for count in counts if count is not None), None)


def _number(thing: object, name: str) -> int | None:
    value = getattr(thing, name, None)
    return value if isinstance(value, int) else None


def epoch_of(loader: DataLoader[object]) -> int | None:
    """Return the last epoch set on a sampler that has epochs, or None."""
    samplers = (sampler for sampler in chain_of(loader._index_sampler) if hasattr(sampler, "set_epoch"))
    epochs = (_number(sampler, "epoch") for sampler in samplers)
    return next((epoch for epoch in epochs if epoch is not None), None)
