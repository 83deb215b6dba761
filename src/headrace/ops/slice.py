"""Operators that select samples by number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError
from headrace.ops.shuffle import PassOperator
from headrace.order import ChosenOrder, ComputedOrder, Order, draw
from headrace.order.orders import ENDLESS
from headrace.order.sampling import DrawnOrder
from headrace.types import Ints
from headrace.workers.tasks import Step


@dataclass(frozen=True, slots=True)
class SelectIndices(PassOperator):
    """The samples with given numbers, in their order."""

    is_constant = True
    name: str
    chooses: Callable[[int], Iterable[int]]

    @property
    def text(self) -> str:
        return f"{self.name}(…)"

    @property
    def in_state(self) -> str:
        return "pick"  # the check in a state covers the selected samples

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:  # noqa: ARG002
        return ChosenOrder(order, self.numbers(order.count))

    @property
    def is_fixed(self) -> bool:
        chosen: Any = getattr(self.chooses, "args", (None,))[0]
        return not hasattr(chosen, "__iter__") or isinstance(chosen, list | tuple | range | np.ndarray)

    def count(self, count: int) -> int:
        """Return how many numbers there are. Iterating over a sampler would change its numbers."""
        chosen: Any = self.chooses(count)
        return chosen.size if isinstance(chosen, np.ndarray) else len(chosen)

    def numbers(self, count: int) -> Ints:
        """Return the numbers. OptionError if one of them is not below `count`."""
        chosen = self.chooses(count)
        numbers = np.asarray(chosen if isinstance(chosen, range | np.ndarray) else list(chosen))
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            found = f"an array of {numbers.dtype}, {numbers.ndim}-dimensional"
            raise OptionError(
                f".{self.name}(): whole numbers of samples are needed, not {found}; of a mask, np.flatnonzero(mask)"
            )
        return _inside(numbers, count, f".{self.name}()")


@dataclass(frozen=True, slots=True)
class Stretch(PassOperator):
    """The samples with numbers in a range, which depends on the number of all samples."""

    is_steady = is_ascending = True
    name: str
    numbers: Callable[[int], range]
    is_behind_filters: bool = False

    @property
    def text(self) -> str:
        return self.name

    @property
    def in_state(self) -> str:
        return "pick"  # the check in a state covers the selected samples

    @property
    def by_number(self) -> tuple[Step, int | None] | None:
        if self.is_behind_filters:
            return None
        numbers = self.numbers(ENDLESS)
        step = Step(self.name, "filter", partial(_is_in, numbers), is_numbered=True, is_shardable=False)
        return step, len(numbers) if numbers.stop < ENDLESS else None

    def count(self, count: int) -> int:
        return len(self.numbers(count))

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:  # noqa: ARG002
        numbers = self.numbers(order.count)
        return ComputedOrder(order, len(numbers), partial(_at, numbers.start, numbers.step))


def _is_in(numbers: range, numbered: tuple[int, object]) -> bool:
    return numbered[0] in numbers


def _at(start: int, step: int, positions: Ints) -> Ints:
    return start + step * positions


@dataclass(frozen=True, slots=True)
class WeightedSample(PassOperator):
    """Samples drawn at random, depending on (seed, epoch, position).

    Attributes:
        weights: Relative probabilities. None: equal.
        samples: Number of draws. None: the number of samples.
    """

    weights: NDArray[np.float64] | None
    samples: int | None
    replacement: bool
    seed: int | None

    @property
    def text(self) -> str:
        return "sample(…)"

    @property
    def in_state(self) -> str:
        return "drawn"  # the check in a state covers the selected samples

    def count(self, count: int) -> int:
        return count if self.samples is None else self.samples

    def seed_or(self, loaders: int) -> int:
        return loaders if self.seed is None else self.seed

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return DrawnOrder(order, self.count(order.count), key, self.weights, self.replacement)


@dataclass(frozen=True, slots=True)
class ComputedNumbers(PassOperator):
    """The samples whose numbers are a function of (positions, number of samples, seed)."""

    name: str
    numbers: Callable[[Ints, int, int], Ints]
    counts: Callable[[int], int]

    @property
    def text(self) -> str:
        return self.name

    @property
    def in_state(self) -> str:
        return f"apply_op {self.name}"  # its name may equal a built-in operator's

    def count(self, count: int) -> int:
        counted = operator.index(self.counts(count))
        if counted < 0 or (counted and not count):
            raise OptionError(f".{self.name}: count({count}) gave {counted}, and there are {count} samples")
        return counted

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        seed = draw("order", *key)
        return ComputedOrder(order, self.count(order.count), partial(self._numbers_at, order.count, seed))

    def _numbers_at(self, count: int, seed: int, positions: Ints) -> Ints:
        numbers = np.asarray(self.numbers(positions, count, seed))
        if numbers.shape != positions.shape or (len(numbers) and numbers.dtype.kind not in "iu"):
            raise OptionError(
                f".{self.name}: a whole number for each of {len(positions)} positions is needed, and not an array of "
                f"{numbers.dtype} of shape {numbers.shape}"
            )
        return _inside(numbers, count, f".{self.name}")


def _inside(numbers: NDArray[np.generic], count: int, call: str) -> Ints:
    """Convert sample numbers to int64. OptionError if one of them is not in `range(count)`."""
    known: Ints = numbers.astype(np.int64)
    outside = known[(known < 0) | (known >= count)]
    if len(outside):
        raise OptionError(f"{call}: there is no sample {outside[0]}; their numbers are 0 to {count - 1}")
    return known
