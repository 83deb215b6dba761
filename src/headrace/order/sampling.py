"""Random sampling from another order: uniform or weighted, with or without replacement.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.order.orders import Order, Places, UnwindowedOrder
from headrace.order.permutation import below, draw, numbers, permutation
from headrace.types import Ints

Floats = NDArray[np.float64]

_PIECE = 65536
_LOG_TERMS = 12  # terms of the series; the next one is below 2**-60


class DrawnOrder(UnwindowedOrder):
    """`count` positions sampled from another order.

    With replacement, draws are independent. Without, each draw is among the remaining positions. Uniform sampling takes
    no memory. Weights take 8 bytes per position of the other order, and 8 more per draw without replacement.

    Raises:
        OptionError: The weights are invalid, or there are more draws than positions.
    """

    def __init__(
        self, inner: Order, count: int, key: tuple[int, ...], weights: Floats | None = None, replacement: bool = True
    ) -> None:
        self.count = count
        self._inner, self._replacement, self._key = inner, replacement, draw("drawn", *key)
        self._sums: Floats | None = None
        self._chosen: Ints | None = None
        there, things = inner.count, "number of samples"
        if weights is not None:
            weights = _checked(weights, inner.count)
            there, things = int(np.count_nonzero(weights)), "number of samples that have a weight"
        if count > there and (not replacement or not there):
            raise check.invalid(".sample(): count", count, f"at most {there}, the {things}, unless replacement=True")
        if weights is None or not count:
            return
        if replacement:
            self._sums = np.cumsum(weights / weights.max())
            self._last = int(np.flatnonzero(weights)[-1])
        else:
            self._chosen = chosen_by_weight(weights, count, self._key)

    def locate(self, positions: Ints) -> Places:
        return self._inner.locate(self._drawn(np.asarray(positions, np.int64)))

    def _drawn(self, positions: Ints) -> Ints:
        if self._chosen is not None:
            return self._chosen[positions]
        if not self._replacement:
            return permutation(positions, self._inner.count, self._key)
        drawn = numbers(positions, self._key)
        if self._sums is None:
            return below(drawn, self._inner.count)
        part = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found = self._sums.searchsorted(part * self._sums[-1], side="right")
        return np.asarray(np.minimum(found, self._last), np.int64)  # rounding may raise the product to the total


def chosen_by_weight(weights: Floats, count: int, key: int) -> Ints:
    """Sample `count` positions by weight without replacement, in order of the draws.

    These are the smallest of exponentially distributed times whose rates are the weights (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006).
    """
    times = np.empty(len(weights))
    for first in range(0, len(weights), _PIECE):
        rates = weights[first : first + _PIECE]
        drawn = numbers(np.arange(first, first + len(rates)), key)
        with np.errstate(divide="ignore", over="ignore"):  # zero or tiny weights: never, or last
            times[first : first + len(rates)] = minus_log((drawn >> np.uint64(11)) + np.uint64(1)) / rates
    times[weights == 0] = np.inf
    latest = np.partition(times, count - 1)[count - 1]
    early = np.flatnonzero((times <= latest) & (weights > 0))
    return np.asarray(early[np.argsort(times[early], kind="stable")][:count], np.int64)


def minus_log(numerators: NDArray[np.uint64]) -> Floats:
    """Return -log(numerators / 2**53), for 1 to 2**53, by basic arithmetic alone.

    All machines round sums, products and quotients equally. The logarithm of a C library or a vector unit may differ by
    a bit, and so change the order of two samples.
    """
    part, power = np.frexp(numerators.astype(np.float64))  # part in [1/2, 1)
    small = part < 0.7071067811865476
    part, power = np.where(small, 2 * part, part), power - small - 53
    ratio = (part - 1) / (part + 1)
    square = ratio * ratio
    series = np.full_like(ratio, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = series * square + 1 / (2 * term + 1)
    return np.asarray(-(2 * ratio * series) - power * 0.6931471805599453, np.float64)


def _checked(weights: Floats, count: int) -> Floats:
    weights = np.asarray(weights, np.float64)
    if weights.shape != (count,):
        raise check.unequal(".sample(): weights", f"the shape {weights.shape}", "the stream", f"{count} samples")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise check.invalid(f".sample(): weights[{wrong[0]}]", weights[wrong[0]].item(), "a finite number, 0 or more")
    if count and not weights.any():
        raise check.invalid(".sample(): weights", weights, "numbers, one of them above 0")
    return weights
