"""Functions that return any number of samples for one."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace._util.functions import is_async, name_of, unwrapped


class GivesMany:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__qualname__ = name_of(function)

    def __call__(self, sample: object) -> list[object]:
        return _listed(self.function(sample), self.__qualname__)


class AsyncGivesMany(GivesMany):
    async def __call__(self, sample: object) -> list[object]:  # type: ignore[override]
        given = self.function(sample)
        if isinstance(given, AsyncIterator):
            return [one async for one in given]
        return _listed(await given, self.__qualname__)


def gives_async(function: Callable[..., object]) -> bool:
    return is_async(function) or _is_async_generator(function)


def gives_many(function: Callable[[Any], object]) -> GivesMany:
    return AsyncGivesMany(function) if gives_async(function) else GivesMany(function)


class Unbatch:
    """Splits a batch into samples; the inverse of `default_collate`."""

    def __call__(self, batch: object) -> list[object]:
        return list(_samples(batch))


def _listed(given: object, name: str) -> list[object]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} gave a {type(given).__name__}: a list of samples is needed, or an iterator; [] where none come"
        )
    return list(given)


def _is_async_generator(function: Callable[..., object]) -> bool:
    function = unwrapped(function)
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called)


def _samples(batch: Any) -> Sequence[Any]:
    """Split a batch, or a part of one, by sample."""
    if _is_leaf(batch):
        if not getattr(batch, "shape", (1,)):
            raise ValueError("unbatch: a number is no batch; an array has a first dimension, which counts the samples")
        leaf: Sequence[Any] = batch
        return leaf
    if isinstance(batch, Mapping):
        return [dict(zip(batch, fields, strict=True)) for fields in _together(batch.values())]
    if isinstance(batch, list | tuple):
        if hasattr(batch, "_fields"):
            return [type(batch)(*fields) for fields in _together(batch)]
        return list(_together(batch))
    raise TypeError(
        f"unbatch: a batch of type {type(batch).__name__} is not known; "
        "arrays, tensors, and dicts and tuples of them are; .flat_map(fn) takes apart what `fn` knows"
    )


def _is_leaf(batch: object) -> bool:
    """True for one field of all samples: an array, or texts."""
    if isinstance(batch, np.ndarray) or hasattr(batch, "untyped_storage"):
        return True
    return isinstance(batch, Sequence) and bool(batch) and all(isinstance(one, str | bytes) for one in batch)


def _together(batches: Iterable[object]) -> Iterable[tuple[Any, ...]]:
    fields = [_samples(batch) for batch in batches]
    counts = sorted(set(map(len, fields)))
    if len(counts) != 1:
        given = " and ".join(map(str, counts)) or "no"
        raise ValueError(f"unbatch: the fields of a batch must have as many samples each; these have {given}")
    return zip(*fields, strict=True)
