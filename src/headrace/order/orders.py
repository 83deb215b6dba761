"""Orders: pure functions from positions of an epoch to samples, with arrays per shard only.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from headrace.order.permutation import draw, numbers, permutation
from headrace.order.windows import LaneBlocks, Windows, mixed
from headrace.types import Ints

ORDER_VERSION = 1
_SEQUENTIAL_WINDOW = 16384
WITHIN_WINDOW = 1024  # small shards that are shuffled within form one window of about this many samples


class Places(NamedTuple):
    """Shard number and row of each sample."""

    shards: Ints
    rows: Ints


class Order(Protocol):
    """One pass over the samples of an epoch.

    Attributes:
        lanes: Ranks divide the positions of a step by their remainders modulo `lanes`.
    """

    @property
    def count(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    def locate(self, positions: Ints) -> Places:
        """Return the shards and rows of the samples at positions in [0, count)."""
        ...

    def window_end(self, position: int) -> int:
        """Return the end of the window that contains a position. Windows read different stretches."""
        ...


class UnwindowedOrder:
    """Base class of orders that need no windows: one is a stretch of consecutive positions."""

    lanes = 1

    def window_end(self, position: int) -> int:
        return (position // _SEQUENTIAL_WINDOW + 1) * _SEQUENTIAL_WINDOW


class ShardOrder(UnwindowedOrder):
    """Shards in order, or shuffled: by shards, within each, or by windows.

    Args:
        by: "none", "shards" (permute whole shards), "within" (permute the samples of each shard), "windows".
        key: Key of the pass's pseudo-random numbers, such as (seed, epoch).
    """

    def __init__(self, sizes: Ints, by: str, key: tuple[int, ...], windows: Windows | None = None) -> None:
        sizes = np.asarray(sizes, np.int64)
        self._by, self._shards = by, None
        if by in ("shards", "windows"):
            self._shards = permutation(np.arange(len(sizes)), len(sizes), draw("shards", *key))
            sizes = sizes[self._shards]
        self._starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=self._starts[1:])
        self.count = int(self._starts[-1])
        self._key = draw("within", *key)
        self._blocks = None
        if by == "windows" and windows is not None:
            self._blocks = LaneBlocks(self.count, windows, key)
        self.lanes = 1 if self._blocks is None else self._blocks.lanes

    def locate(self, positions: Ints) -> Places:
        base = np.asarray(positions, np.int64)
        if self._blocks is not None:
            base = self._blocks.places(base)
        shards = np.searchsorted(self._starts, base, side="right") - 1
        rows = base - self._starts[shards]
        if self._by == "within":
            rows = mixed(rows, self._starts[shards + 1] - self._starts[shards], numbers(shards, self._key))
        return Places(shards if self._shards is None else self._shards[shards], rows)

    def window_end(self, position: int) -> int:
        if self._blocks is not None:
            return (position // self._blocks.window + 1) * self._blocks.window
        if self._by == "within":  # combine small shards, which would otherwise be windows of their own
            first = self._starts[np.searchsorted(self._starts, position, side="right") - 1]
            cell = int(first) // WITHIN_WINDOW
            ends = np.searchsorted(self._starts, (cell + 1) * WITHIN_WINDOW)
            return max(position + 1, int(self._starts[min(int(ends), len(self._starts) - 1)]))
        return super().window_end(position)


class ComputedOrder(UnwindowedOrder):
    """The samples at computed positions of another order."""

    def __init__(self, inner: Order, count: int, computed: Callable[[Ints], Ints]) -> None:
        self._inner, self.count, self._computed = inner, count, computed

    def locate(self, positions: Ints) -> Places:
        return self._inner.locate(self._computed(np.asarray(positions, np.int64)))


class ChosenOrder(ComputedOrder):
    def __init__(self, inner: Order, chosen: Ints) -> None:
        super().__init__(inner, len(chosen), partial(np.take, chosen))


class FirstOf:
    def __init__(self, inner: Order, count: int) -> None:
        self._inner, self.count, self.lanes = inner, min(count, inner.count), inner.lanes
        self.locate, self.window_end = inner.locate, inner.window_end


class ShuffledOrder(ComputedOrder):
    def __init__(self, inner: Order, key: tuple[int, ...]) -> None:
        super().__init__(inner, inner.count, partial(permutation, n=inner.count, key=draw("global", *key)))


class Passes:
    """Consecutive orders, for epochs with several passes.

    Args:
        make: Returns the order of a pass. All passes have the same number of samples.
        times: Number of passes. None: endless.
    """

    def __init__(self, make: Callable[[int], Order], times: int | None = 1) -> None:
        self._orders = _Orders(make)
        first = self.of(0)
        self.pass_count, self.lanes = first.count, first.lanes
        self.count = ENDLESS if times is None and self.pass_count else self.pass_count * (times or 0)

    def locate(self, positions: Ints) -> Places:
        return self._orders.locate(positions // max(1, self.pass_count), positions, self.pass_count)

    def window_end(self, position: int) -> int:
        number, inside = divmod(position, max(1, self.pass_count))
        end = min(self.of(number).window_end(inside), self.pass_count)
        return number * self.pass_count + end

    def of(self, number: int) -> Order:
        return self._orders.of(number)


class EpochOrder:
    """The order of an epoch and of those before it, which have negative positions.

    Args:
        make: Returns the order of the epoch at an offset 0, -1, -2, … from this one. All have the same count.
    """

    def __init__(self, make: Callable[[int], Order]) -> None:
        self._orders = _Orders(make)
        self._this = self._orders.of(0)
        self.count, self.lanes = self._this.count, self._this.lanes

    def locate(self, positions: Ints) -> Places:
        if (positions >= 0).all():
            return self._this.locate(positions)
        return self._orders.locate(np.minimum(positions // max(1, self.count), 0), positions, self.count)

    def window_end(self, position: int) -> int:
        epoch = min(position // max(1, self.count), 0)
        end = self._orders.of(epoch).window_end(position - epoch * self.count) + epoch * self.count
        return end if epoch == 0 else min(end, (epoch + 1) * self.count)


class _Orders:
    """Consecutive orders, created on demand. The first and the newest are cached."""

    def __init__(self, make: Callable[[int], Order]) -> None:
        self._make, self._first = make, make(0)
        self._made = 0, self._first

    def of(self, number: int) -> Order:
        if number == 0:
            return self._first
        made = self._made
        if made[0] != number:
            made = self._made = number, self._make(number)  # read once: another thread may replace it
        return made[1]

    def locate(self, numbers: Ints, positions: Ints, count: int) -> Places:
        """Locate positions, each in the order with its number. Each order has `count` positions."""
        first = int(numbers[0]) if len(numbers) else 0
        if (numbers == first).all():
            return self.of(first).locate(positions - first * count)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            shards[mine], rows[mine] = self.of(number).locate(positions[mine] - number * count)
        return Places(shards, rows)


ENDLESS = 2**62
