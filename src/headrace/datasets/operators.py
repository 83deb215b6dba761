"""What can be done to the samples of a data set; each operator is a plain value until a loader runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, OptionError, masked
from headrace.plan import ChosenOrder, DrawnOrder, FirstOf, Order, ShuffledOrder
from headrace.plan.order import ENDLESS
from headrace.tasks import Step
from headrace.types import Ints


class Counts(Protocol):
    """Tells how many come of some."""

    def count(self, count: int) -> int:
        """How many samples (or batches) come of `count`."""
        ...


class OrderOp(Counts, Protocol):
    """Decides which of the source's samples come, and when; nothing is read for that.

    Attributes:
        needs_numbers: whether samples must have numbers before they are read.
    """

    needs_numbers: ClassVar[bool]

    @property
    def text(self) -> str:
        """The call, as it is shown."""
        ...

    @property
    def in_state(self) -> str:
        """What a state says of it: another text is another order."""
        ...

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """The order that comes of another one.

        Args:
            key: of the loader's seed, or the operator's own, of the epoch and the pass.
        """
        ...


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Another order; it keeps positions, but for "buffer"."""

    by: str
    window: int | None
    seed: int | None
    buffer: int | None = None
    needs_numbers: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"shuffle({self.by})"

    @property
    def in_state(self) -> str:
        return f"shuffle({self.by})"  # how exactly is said by who reads the samples

    def count(self, count: int) -> int:
        return count

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Samples are exchanged with any others; whole shards and windows are who reads them's business."""
        return ShuffledOrder(order, key)

    @property
    def keeps_position(self) -> bool:
        """Whether it follows from a sample's position which one it is."""
        return self.by != "buffer"

    def seed_or(self, loaders: int) -> int:
        """The seed of the order: its own, or else the loader's."""
        return loaders if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Take:
    """The first `samples` only."""

    samples: int
    needs_numbers: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"take({self.samples})"

    @property
    def in_state(self) -> str:
        return self.text

    def count(self, count: int) -> int:
        return min(count, self.samples)

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:  # noqa: ARG002
        return FirstOf(order, self.samples)


@dataclass(frozen=True, slots=True)
class Repeat:
    """All samples several times, each time in another order where they are shuffled; None: without end."""

    times: int | None
    needs_numbers: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"repeat({self.times})"

    @property
    def in_state(self) -> str:
        return self.text

    def count(self, count: int) -> int:
        return (ENDLESS if count else 0) if self.times is None else count * self.times


@dataclass(frozen=True, slots=True)
class EpochSize:
    """Epochs of so many samples, whatever the data set has: it is begun again, or left, where they are full."""

    samples: int
    needs_numbers: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"epoch(samples={self.samples})"

    @property
    def in_state(self) -> str:
        return f"epochof({self.samples})"

    def count(self, count: int) -> int:  # noqa: ARG002
        return self.samples


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` samples make a batch."""

    size: int
    drop_last: bool

    @property
    def text(self) -> str:
        return f"batch({self.size})"

    def count(self, count: int) -> int:
        """How many batches come of so many samples."""
        return count // self.size if self.drop_last else -(-count // self.size)


@dataclass(frozen=True, slots=True)
class SelectIndices:
    """The samples with some numbers, in the order of these.

    Attributes:
        name: of the operator, for messages.
        chooses: gives the numbers, for the number of all samples.
    """

    name: str
    chooses: Callable[[int], Iterable[int]]
    needs_numbers: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"{self.name}(…)"

    @property
    def in_state(self) -> str:
        return "pick"  # which samples it gave is in the check

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:  # noqa: ARG002
        return ChosenOrder(order, self.numbers(order.count))

    @property
    def is_fixed(self) -> bool:
        """Whether it gives the same numbers each time that it is asked."""
        chosen: Any = getattr(self.chooses, "args", (None,))[0]
        return not hasattr(chosen, "__iter__") or isinstance(chosen, list | tuple | range | np.ndarray)

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
class WeightedSample:
    """Samples drawn at random: a function of (seed, epoch, position).

    Attributes:
        weights: of each sample; None: all are as likely.
        samples: how many are drawn; None: as many as there are.
        replacement: whether one may come several times.
    """

    weights: NDArray[np.float64] | None
    samples: int | None
    replacement: bool
    seed: int | None
    needs_numbers: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return "sample(…)"

    @property
    def in_state(self) -> str:
        return "drawn"  # which samples it gave is in the check

    def count(self, count: int) -> int:
        return count if self.samples is None else self.samples

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return DrawnOrder(order, self.count(order.count), key, self.weights, self.replacement)


OrderOperator = Shuffle | Take | SelectIndices | WeightedSample | Repeat | EpochSize
Operator = OrderOperator | Batch | Step


def text_of(operator: Operator) -> str:
    """An operator's call, as it is shown."""
    return operator.name if isinstance(operator, Step) else operator.text


def counted(count: int, operators: Iterable[Counts | Step]) -> int:
    """How many samples (or batches) come of `count`, where steps give one for each."""
    for operator in operators:
        if not isinstance(operator, Step):
            count = operator.count(count)
    return count


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
    wanted = " or ".join(map(repr, names.split(";")))
    raise FormatError(
        f"sample {key!r} of {masked(str(url))} has no field {wanted}; its fields are: {have}",
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
