"""How the small messages between engine and workers are pickled."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def as_call(cls: type[T]) -> type[T]:
    """A dataclass of several fields, whose objects are pickled as a call with all of them.

    By itself a dataclass with slots is pickled with the names of its fields, in twice the time.
    """
    fields_of: Callable[[object], tuple[object, ...]] = operator.attrgetter(*[f.name for f in dataclasses.fields(cls)])  # type: ignore[arg-type]

    def reduce(self: T) -> tuple[object, ...]:
        return type(self), fields_of(self)

    cls.__reduce__ = reduce  # type: ignore[assignment,method-assign]
    return cls
