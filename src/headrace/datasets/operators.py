"""What can be done to the samples of a data set; each operator is a plain value until a loader runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, OptionError
from headrace.tasks import Step
from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Another order; it keeps positions, but for "buffer"."""

    by: str
    window: int | None
    seed: int | None
    buffer: int | None = None

    @property
    def keeps_position(self) -> bool:
        """Whether it follows from a sample's position which one it is."""
        return self.by != "buffer"

    def seed_or(self, loaders: int) -> int:
        """The seed of the order: its own, or else the loader's."""
        return loaders if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Take:
    """The first `count` only."""

    count: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """All samples several times, each time in another order where they are shuffled; None: without end."""

    times: int | None


@dataclass(frozen=True, slots=True)
class EpochOf:
    """Epochs of so many samples, whatever the data set has: it is begun again, or left, where they are full."""

    samples: int


@dataclass(frozen=True, slots=True)
class Group:
    """`size` samples make a batch."""

    size: int
    drop_last: bool


@dataclass(frozen=True, slots=True)
class Pick:
    """The samples with some numbers, in the order of these.

    Attributes:
        name: of the operator, for messages.
        chooses: gives the numbers, for the number of all samples.
    """

    name: str
    chooses: Callable[[int], Iterable[int]]

    @property
    def is_fixed(self) -> bool:
        """Whether it gives the same numbers each time that it is asked."""
        told: Any = getattr(self.chooses, "args", (None,))[0]
        return not hasattr(told, "__iter__") or isinstance(told, list | tuple | range | np.ndarray)

    def count(self, count: int) -> int:
        """How many numbers there are, of `count` samples; a sampler is not asked for them, it would draw others then.

        Raises:
            TypeError: a sampler does not know it.
        """
        chosen: Any = self.chooses(count)
        return chosen.size if isinstance(chosen, np.ndarray) else len(chosen)

    def numbers(self, count: int) -> Ints:
        """The numbers, of `count` samples.

        Raises:
            OptionError: one of them is not below `count`.
        """
        chosen = self.chooses(count)
        numbers = np.asarray(chosen if isinstance(chosen, range | np.ndarray) else list(chosen))
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            found = f"an array of {numbers.dtype}, {numbers.ndim}-dimensional"
            raise OptionError(
                f".{self.name}(): whole numbers of samples are needed, not {found}; of a mask, np.flatnonzero(mask)"
            )
        numbers = numbers.astype(np.int64)
        outside = numbers[(numbers < 0) | (numbers >= count)]
        if len(outside):
            raise OptionError(f".{self.name}(): there is no sample {outside[0]}; their numbers are 0 to {count - 1}")
        return numbers


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples drawn at random: a function of (seed, epoch, position).

    Attributes:
        weights: of each sample; None: all are as likely.
        count: how many are drawn; None: as many as there are.
        replacement: whether one may come several times.
    """

    weights: NDArray[np.float64] | None
    count: int | None
    replacement: bool
    seed: int | None


Operator = Shuffle | Take | Pick | Drawn | Repeat | EpochOf | Group | Step


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine: then it runs on the event loop."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in errors and reports."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]


def checked(function: Any, operator: str) -> Any:
    """`function` if it can be called.

    Raises:
        OptionError: it cannot.
    """
    if not callable(function):
        raise OptionError(f".{operator}({function!r}): a function is needed")
    return function


def on_field(function: Callable[[Any], Any], field: str | int) -> Callable[[Any], Any]:
    """`function` for one field of a sample, the rest as it is."""
    return AsyncFieldMap(function, field) if is_async(function) else FieldMap(function, field)


class FieldMap:
    """Applies a function to one field of a dict or one position of a tuple."""

    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> Any:
        return _with(sample, self.field, self.function(_of(sample, self.field)))


class AsyncFieldMap(FieldMap):
    """The same for a coroutine function."""

    async def __call__(self, sample: Any) -> Any:
        return _with(sample, self.field, await self.function(_of(sample, self.field)))


def _of(sample: Any, field: str | int) -> Any:
    return sample[find_field(sample, str(field))] if isinstance(sample, dict) else sample[field]


def _with(sample: Any, field: str | int, value: Any) -> Any:
    if isinstance(sample, dict):
        return {**sample, find_field(sample, str(field)): value}
    items = list(sample)
    items[int(field)] = value
    return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)


def find_field(sample: dict[str, Any], names: str) -> str:
    """The first of `names` (separated by ";") that the sample has.

    Raises:
        FormatError: it has none of them.
    """
    for name in names.split(";"):
        if name in sample:
            return name
    key, url = sample.get("__key__"), sample.get("__url__")
    have = ", ".join(sorted(str(name) for name in sample if not str(name).startswith("__"))) or "none"
    raise FormatError(
        f"sample {key!r} of {url} has no field {' or '.join(map(repr, names.split(';')))}; its fields are: {have}",
        stage="to_tuple",
        key=key,
        url=url,
    )


class FieldFilter:
    """Asks a function of one field of a sample."""

    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> Any:
        return self.function(_of(sample, self.field))


class AsyncFieldFilter(FieldFilter):
    """The same for a coroutine function."""

    async def __call__(self, sample: Any) -> Any:
        return await self.function(_of(sample, self.field))


def is_key_filter(step: Step) -> bool:
    """Whether a step asks for nothing but a sample's key, and no coroutine answers."""
    return type(step.fn) is FieldFilter and step.fn.field == "__key__"


class Select:
    """Keeps the named fields of a sample, and what says where it is from."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        kept = {find_field(sample, names) for names in self.names}
        return {name: value for name, value in sample.items() if name in kept or name.startswith("__")}


class ToTuple:
    """Makes a tuple of the named fields of a sample."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(sample[find_field(sample, names)] for names in self.names)
