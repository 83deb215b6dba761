"""Inspection of functions given by users."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function inside nested `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., object]) -> bool:
    """True if calling `function` returns a coroutine: then it runs on the event loop."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )


def name_of(function: Callable[..., object]) -> str:
    function = unwrapped(function)
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def as_it_is(sample: T) -> T:
    return sample
