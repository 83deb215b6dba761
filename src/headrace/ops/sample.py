"""`.sample()`, and other selections of samples by arrays of numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace._util import check
from headrace.ops.operator import PassOperator
from headrace.order.orders import ChosenOrder, ComputedOrder, Order
from headrace.order.permutation import draw
from headrace.order.sampling import DrawnOrder
from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class SelectIndices(PassOperator):
    """The samples with the numbers that a sampler lists, in its order."""

    is_constant = True
    text = "sample(…)"
    in_state = "pick"  # the check in a state covers the selected samples
    sampler: Any

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return ChosenOrder(order, self.numbers(order.count))

    @property
    def is_fixed(self) -> bool:
        return isinstance(self.sampler, list | tuple | range | np.ndarray)

    def count(self, count: int) -> int:
        """Return how many numbers there are. Iterating over a sampler would change its numbers."""
        return self.sampler.size if isinstance(self.sampler, np.ndarray) else len(self.sampler)

    def numbers(self, count: int) -> Ints:
        """Return the numbers. OptionError if one of them is not below `count`."""
        chosen = self.sampler if isinstance(self.sampler, range | np.ndarray) else list(self.sampler)
        return check.whole_numbers(
            ".sample(): sampler", chosen, count, hint=": np.flatnonzero(mask) gives those of a mask"
        )


@dataclass(frozen=True, slots=True)
class WeightedSample(PassOperator):
    """Samples drawn at random, depending on (seed, epoch, position).

    Attributes:
        weights: Relative probabilities. None: equal.
        samples: Number of draws. None: the number of samples.
    """

    text = "sample(…)"
    in_state = "drawn"  # the check in a state covers the selected samples
    weights: NDArray[np.float64] | None
    samples: int | None
    replacement: bool
    seed: int | None

    def count(self, count: int) -> int:
        return count if self.samples is None else self.samples

    def seed_or(self, loaders: int) -> int:
        return loaders if self.seed is None else self.seed

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return DrawnOrder(order, self.count(order.count), key, self.weights, self.replacement)


@dataclass(frozen=True, slots=True)
class ComputedNumbers(PassOperator):
    """The samples whose numbers are a function of (positions, number of samples, seed): an `OrderOp`."""

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
            raise check.invalid(f".{self.name}: count({count})", counted, "0 or more, and 0 of no samples")
        return counted

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        seed = draw("order", *key)
        return ComputedOrder(order, self.count(order.count), partial(self._numbers_at, order.count, seed))

    def _numbers_at(self, count: int, seed: int, positions: Ints) -> Ints:
        numbers = self.numbers(positions, count, seed)
        return check.whole_numbers(f".{self.name}: numbers", numbers, count, len(positions))


def sample(
    sampler: Iterable[int] | None, weights: ArrayLike | None, count: int | None, replacement: bool, seed: int | None
) -> SelectIndices | WeightedSample:
    if sampler is None:
        check.whole_or_none(".sample(): count", count)
        probabilities = None if weights is None else np.asarray(weights, np.float64)
        return WeightedSample(probabilities, count, replacement, seed)
    if weights is not None or count is not None or seed is not None or not replacement:
        raise check.conflict(".sample(): a sampler", "options of drawing", "give the sampler alone")
    if isinstance(sampler, Iterator) or not hasattr(sampler, "__iter__"):
        raise check.invalid(".sample(): sampler", sampler, "a sampler, or a list or array of numbers")
    return SelectIndices(sampler)
