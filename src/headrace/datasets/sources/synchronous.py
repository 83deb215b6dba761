"""Synchronous data sets, their calls made in threads."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

import anyio.to_thread

from headrace.datasets.asynchronous import AsyncDataset, AsyncIterableDataset
from headrace.datasets.sharing import RanksBy
from headrace.forks import called
from headrace.running import running_reader, running_threads

T = TypeVar("T")


class FromMap(AsyncDataset):
    """What `from_map` gives."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, key: object) -> object:
        get, threads = self.dataset.__getitem__, running_threads.get()
        sample, seconds = await anyio.to_thread.run_sync(_timed, get, key, limiter=threads)
        _count(self.dataset, "__getitem__", seconds)
        return sample


class FromIterable(AsyncIterableDataset):
    """What `from_iterable` gives."""

    def __init__(self, iterable: Iterable[object] | Callable[[], Iterable[object]], ranks_by: RanksBy | None) -> None:
        self.iterable, self.ranks_by = iterable, ranks_by

    def _opened(self) -> Iterator[object]:
        iterable: Any = self.iterable
        return iter(iterable() if makes_one(iterable) else iterable)

    async def aiter(self) -> AsyncIterator[object]:
        end = object()
        samples = await anyio.to_thread.run_sync(called, self._opened)
        while True:
            sample, seconds = await anyio.to_thread.run_sync(_timed, next, samples, end)
            if sample is end:
                return
            _count(self.iterable, "__next__", seconds)
            yield sample


class ResumableIterable(FromIterable):
    """The same of an iterable that says how far it has come, by `state_dict`, and goes on from there.

    It keeps that between the samples: nobody asks for the next one meanwhile.
    """

    def __init__(self, iterable: Any, ranks_by: RanksBy | None) -> None:
        super().__init__(iterable, ranks_by)
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


def makes_one(iterable: object) -> bool:
    """Whether this is no iterable, but a function, or a class, that makes one."""
    return callable(iterable) and (isinstance(iterable, type) or not hasattr(iterable, "__iter__"))


def _timed(function: Callable[..., T], *args: object) -> tuple[T, float]:
    """What a function gives, and for how long it kept its thread computing."""
    began = time.thread_time()
    return called(function, *args), time.thread_time() - began


def _name(data: object) -> str:
    """What a data set is called: a function, or a class, that makes one has a name of its own."""
    return str(getattr(data, "__name__", None) or type(data).__name__)


def _count(data: object, name: str, seconds: float) -> None:
    """A call in a thread has ended: the loader that is running is told."""
    reader = running_reader.get()
    if reader is not None:
        reader.count_call(f"{_name(data)}.{name}", seconds)
