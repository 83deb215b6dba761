"""Functions that give many samples for one, or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.functions import is_async, name_of


class GivesMany:
    """The samples that a function gives for one, as a list."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__qualname__ = name_of(function)

    def __call__(self, sample: object) -> list[object]:
        return _listed(self.function(sample), self.__qualname__)


class AsyncGivesMany(GivesMany):
    """The same for a coroutine function, or for an asynchronous generator."""

    async def __call__(self, sample: object) -> list[object]:  # type: ignore[override]
        given = self.function(sample)
        if isinstance(given, AsyncIterator):
            return [one async for one in given]
        return _listed(await given, self.__qualname__)


def gives_many(function: Callable[[Any], object]) -> GivesMany:
    """A function that gives many samples for one."""
    return AsyncGivesMany(function) if is_async(function) or _is_async_generator(function) else GivesMany(function)


class Unbatch:
    """The samples of a batch: what `default_collate` has put together, taken apart again."""

    def __call__(self, batch: Any) -> list[Any]:
        count = _count(batch)
        return [_sample(batch, number) for number in range(count)]


def _listed(given: object, name: str) -> list[object]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} gave a {type(given).__name__}: a list of samples is needed, or an iterator; [] where none come"
        )
    return list(given)


def _is_async_generator(function: Callable[..., object]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called)


def _is_leaf(batch: Any) -> bool:
    """Whether it is one field of all samples: an array, or texts."""
    if isinstance(batch, np.ndarray) or hasattr(batch, "untyped_storage"):
        return True
    return isinstance(batch, Sequence) and bool(batch) and all(isinstance(one, str | bytes) for one in batch)


def _fields(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    raise TypeError(
        f"unbatch: a batch of type {type(batch).__name__} is not known; "
        "arrays, tensors, and dicts and tuples of them are; .flat_map(fn) takes apart what `fn` knows"
    )


def _count(batch: Any) -> int:
    if _is_leaf(batch):
        if not getattr(batch, "shape", (1,)):
            raise ValueError("unbatch: a number is no batch; an array has a first dimension, which counts the samples")
        return len(batch)
    counts = sorted({_count(field) for field in _fields(batch)})
    if len(counts) != 1:
        given = " and ".join(map(str, counts)) or "no"
        raise ValueError(f"unbatch: the fields of a batch must have as many samples each; these have {given}")
    return counts[0]


def _sample(batch: Any, number: int) -> Any:
    if _is_leaf(batch):
        return batch[number]
    if isinstance(batch, Mapping):
        return {name: _sample(field, number) for name, field in batch.items()}
    if hasattr(batch, "_fields"):
        return type(batch)(*(_sample(field, number) for field in batch))
    return tuple(_sample(field, number) for field in batch)
