"""What is known of functions that users give."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import OptionError

F = TypeVar("F")
T = TypeVar("T")


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    """The function itself, of which this is it with some arguments."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives a coroutine: then it runs on the event loop."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )


def name_of(function: Callable[..., object]) -> str:
    """What a function is called in errors and reports."""
    function = unwrapped(function)
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def checked(function: F, operator: str) -> F:
    """`function` if it can be called.

    Raises:
        OptionError: it cannot.
    """
    if not callable(function):
        raise OptionError(f".{operator}({function!r}): a function is needed")
    return function


def as_it_is(sample: T) -> T:
    """The sample that was given."""
    return sample
