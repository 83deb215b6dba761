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
    first, *others = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # it is a dataclass
    fields_of: Callable[[object], tuple[object, ...]] = operator.attrgetter(first, *others)

    def reduce(self: T) -> tuple[object, ...]:
        return type(self), fields_of(self)

    cls.__reduce__ = reduce  # type: ignore[assignment,method-assign]  # as a decorator must
    return cls
