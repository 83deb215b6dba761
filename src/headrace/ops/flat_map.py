"""`.flat_map()`: functions that return any number of samples for one."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from headrace._util import check
from headrace._util.functions import is_async, name_of, unwrapped
from headrace.ops.operator import EachSample, SampleFunction
from headrace.workers.tasks import Step


def flat_map(fn: SampleFunction, *, random: bool) -> EachSample:
    check.function(".flat_map(): fn", fn)
    return EachSample(Step(f"flat_map({name_of(fn)})", "many", gives_many(fn), random))


class GivesMany:
    def __init__(self, function: SampleFunction) -> None:
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
    return is_async(function) or is_async_generator(function)


def gives_many(function: Callable[[Any], object]) -> GivesMany:
    return AsyncGivesMany(function) if gives_async(function) else GivesMany(function)


def _listed(given: object, name: str) -> list[object]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} gave a {type(given).__name__}: a list of samples is needed, or an iterator; [] where none come"
        )
    return list(given)


def is_async_generator(function: Callable[..., object]) -> bool:
    function = unwrapped(function)
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called)
