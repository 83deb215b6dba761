"""Calls of a data set's `__getitem__`, with limited concurrency. Workers import this module."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

T = TypeVar("T")


class GetItem:
    """Calls `__getitem__` of a data set, one call at a time in each process.

    Several loaders may read one data set in threads of the trainer's process. Concurrent calls would mix up what they
    read from a shared file handle.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._gate = gate_of(dataset, 1)

    def __reduce__(self) -> tuple[object, ...]:
        return GetItem, (self.dataset,)

    @property
    def named(self) -> dict[str, object]:
        """The user's objects, by name of the argument."""
        return {"dataset": self.dataset}

    def __call__(self, key: object) -> object:
        with self._gate.free:
            return self.dataset[key]


class CallGate:
    """Limits the number of threads that call one data set at the same time.

    Tasks of one event loop wait without a thread. The event loops of several loaders share the semaphore.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self._pid, self._free = threads, os.getpid(), threading.Semaphore(threads)
        self._limiter: RunVar[CapacityLimiter] = RunVar("headrace_call_gate")

    @property
    def free(self) -> threading.Semaphore:
        if self._pid != os.getpid():  # the parent process may have held it during the fork
            self._pid, self._free = os.getpid(), threading.Semaphore(self.threads)
        return self._free

    async def call(self, function: Callable[[object], object], key: object) -> tuple[object, Taken]:
        limiter = self._limiter.get(None)
        if limiter is None:
            limiter = CapacityLimiter(self.threads)
            self._limiter.set(limiter)
        return await anyio.to_thread.run_sync(self._call, function, key, limiter=limiter)

    def _call(self, function: Callable[[object], object], key: object) -> tuple[object, Taken]:
        with self.free:
            return timed(function, key)


_GATES: WeakValueDictionary[tuple[int, int], CallGate] = WeakValueDictionary()


def gate_of(dataset: object, threads: int) -> CallGate:
    """Return the gate that all streams over `dataset` share.

    The `id` in the key stays valid, because each holder of the gate also holds the data set. Parts made by torch's
    `random_split` share the gate of their data set.
    """
    while type(dataset).__module__ == "torch.utils.data.dataset" and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    key = (id(dataset), threads)
    gate = _GATES.get(key)
    if gate is None:
        gate = _GATES[key] = CallGate(threads)
    return gate


class Taken(NamedTuple):
    computed: float
    waited: float


def timed(function: Callable[..., T], *args: object) -> tuple[T, Taken]:
    began, computing = time.perf_counter(), time.thread_time()
    result = function(*args)
    computed = time.thread_time() - computing
    return result, Taken(computed, max(0.0, time.perf_counter() - began - computed))
