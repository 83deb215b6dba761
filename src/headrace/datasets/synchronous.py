"""Synchronous data sets, their calls made in threads."""

from __future__ import annotations

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
