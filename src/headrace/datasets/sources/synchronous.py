"""Synchronous data sets: called in workers, or in threads of the trainer's process."""

from __future__ import annotations

import copy
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from headrace.datasets.asynchronous import AsyncDataset, AsyncIterableDataset
from headrace.datasets.sharing import RanksBy
from headrace.errors import OptionError
from headrace.running import running_reader
from headrace.tasks import Step

T = TypeVar("T")


class FromMap(AsyncDataset):
    """The data set that `from_map` reads: its keys, or the samples themselves.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        threads: The number of threads that may call `__getitem__` at the same time, over all loaders of this process.
            None: the samples are the keys, and a step in the workers calls `__getitem__`.
    """

    def __init__(self, dataset: Any, threads: int | None) -> None:
        self.dataset, self.threads = dataset, threads
        self._gate = None if threads is None else _gate_of(dataset, threads)

    def __reduce__(self) -> tuple[object, ...]:
        return FromMap, (self.dataset, self.threads)

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, key: object) -> object:
        if self._gate is None or self.threads is None:
            return key
        if self._gate.pid != os.getpid():  # the parent process may have held the gate during the fork
            self._gate = _gate_of(self.dataset, self.threads)
        sample, taken = await self._gate.call(self.dataset.__getitem__, key)
        _count(self.dataset, "__getitem__", taken)
        return sample


class GetItem:
    """Calls `__getitem__` of a data set: one call at a time in each process, as if there was one thread.

    Several loaders may read one data set in threads of the trainer's process, and two calls at once would mix up what
    they read from a shared file handle.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._gate = _gate_of(dataset, 1)

    def __reduce__(self) -> tuple[object, ...]:
        return GetItem, (self.dataset,)

    @property
    def named(self) -> dict[str, object]:
        """What it holds of the user's, by the name of the argument."""
        return {"dataset": self.dataset}

    def __call__(self, key: object) -> object:
        if self._gate.pid != os.getpid():  # the parent process may have held the gate during the fork
            self._gate = _gate_of(self.dataset, 1)
        with self._gate.free:
            return self.dataset[key]


def get_step(dataset: Any) -> Step:
    """The step that calls `__getitem__` in the workers."""
    name = f"{_name(dataset)}.__getitem__"
    return Step(name, "map", GetItem(dataset), random=True, is_implied=True, reads=True)


class _CallGate:
    """Limits the number of threads that call one data set at the same time.

    Tasks of one event loop wait without a thread. Event loops, of which each loader has one, share the semaphore.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.pid = threads, os.getpid()
        self.free = threading.Semaphore(threads)
        self._limiter: RunVar[CapacityLimiter] = RunVar("headrace_call_gate")

    async def call(self, function: Callable[[object], object], key: object) -> tuple[object, _Taken]:
        limiter = self._limiter.get(None)
        if limiter is None:
            limiter = CapacityLimiter(self.threads)
            self._limiter.set(limiter)
        return await anyio.to_thread.run_sync(self._call, function, key, limiter=limiter)

    def _call(self, function: Callable[[object], object], key: object) -> tuple[object, _Taken]:
        with self.free:
            return _timed(function, key)


_GATES: WeakValueDictionary[tuple[int, int, int], _CallGate] = WeakValueDictionary()


def _gate_of(dataset: object, threads: int) -> _CallGate:
    """Return the gate that all streams over `dataset` share.

    The `id` in the key stays valid: whoever holds the gate holds the data set, too. Parts that torch's `random_split`
    made share the data set that they are parts of.
    """
    while type(dataset).__module__ == "torch.utils.data.dataset" and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    key = (id(dataset), threads, os.getpid())
    gate = _GATES.get(key)
    if gate is None:
        gate = _GATES[key] = _CallGate(threads)
    return gate


class FromIterable(AsyncIterableDataset):
    """What `from_iterable` gives."""

    def __init__(
        self,
        iterable: Iterable[object] | Callable[[], Iterable[object]],
        ranks_by: RanksBy | None,
        *,
        one_epoch: bool = False,
    ) -> None:
        self.iterable, self.ranks_by, self.one_epoch = iterable, ranks_by, one_epoch
        self._is_begun = False

    def _opened(self) -> Iterator[object]:
        iterable: Any = self.iterable
        samples: Iterator[object] = iter(iterable() if makes_one(iterable) else iterable)
        is_over = inspect.isgenerator(samples) and inspect.getgeneratorstate(samples) == inspect.GEN_CLOSED
        if is_over or (self.one_epoch and self._is_begun):
            raise OptionError(
                f"hr.from_iterable({iterable!r:.200}): an earlier loop has used up its samples. For more than one "
                "epoch give a function that returns a new iterator: hr.from_iterable(lambda: …)"
            )
        self._is_begun = True
        return samples

    async def aiter(self) -> AsyncIterator[object]:
        end = object()
        samples = await anyio.to_thread.run_sync(self._opened)
        while True:
            sample, taken = await anyio.to_thread.run_sync(_timed, next, samples, end)
            if sample is end:
                return
            _count(self.iterable, "__next__", taken)
            yield sample


class ResumableIterable(FromIterable):
    """The same of an iterable that says how far it has come, by `state_dict`, and goes on from there.

    It keeps that between the samples: nobody asks for the next one meanwhile.
    """

    def __init__(self, iterable: Any, ranks_by: RanksBy | None, *, one_epoch: bool = False) -> None:
        super().__init__(iterable, ranks_by, one_epoch=one_epoch)
        self._fresh: Any = None
        self._is_loaded = self._goes_on = False

    def state_dict(self) -> Any:
        """Where the iterable is."""
        return self.iterable.state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state: Any) -> None:
        """Have the next pass be the rest from there."""
        if self._fresh is None:
            self._fresh = copy.deepcopy(self.state_dict())
        self.iterable.load_state_dict(state)  # type: ignore[union-attr]
        self._is_loaded = True

    def _opened(self) -> Iterator[object]:
        # one of Hugging Face's begins each pass where it was told to, not only the next one
        if self._goes_on and not self._is_loaded and type(self.iterable).__module__.startswith("datasets."):
            self.iterable.load_state_dict(copy.deepcopy(self._fresh))  # type: ignore[union-attr]
        self._goes_on, self._is_loaded = self._is_loaded, False
        return super()._opened()


def is_iterator(iterable: object) -> bool:
    """True if `iter` returns the object itself, so that a second epoch has no samples."""
    return hasattr(iterable, "__next__") and iter(iterable) is iterable  # type: ignore[call-overload]


def makes_one(iterable: object) -> bool:
    """Whether this is no iterable, but a function, or a class, that makes one."""
    return callable(iterable) and (isinstance(iterable, type) or not hasattr(iterable, "__iter__"))


class _Taken(NamedTuple):
    """The seconds that a call computed, and those that it waited."""

    computed: float
    waited: float


def _timed(function: Callable[..., T], *args: object) -> tuple[T, _Taken]:
    began, computing = time.perf_counter(), time.thread_time()
    result = function(*args)
    computed = time.thread_time() - computing
    return result, _Taken(computed, max(0.0, time.perf_counter() - began - computed))


def _name(data: object) -> str:
    """What a data set is called: a function, or a class, that makes one has a name of its own."""
    return str(getattr(data, "__name__", None) or type(data).__name__)


def _count(data: object, name: str, taken: _Taken) -> None:
    """Report a finished call in a thread to the running loader."""
    reader = running_reader.get()
    if reader is not None:
        reader.count_call(f"{_name(data)}.{name}", taken.computed, taken.waited)
