"""Which sample comes at each position of an epoch: a pure function, over arrays of shards and never of samples.

All of it belongs to order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from headrace.plan.lanes import LaneBlocks, Windows, mixed
from headrace.plan.permutation import draw, numbers, permutation
from headrace.types import Ints

ORDER_VERSION = 1
_SEQUENTIAL_WINDOW = 16384
WITHIN_WINDOW = 1024  # shards that are shuffled within are planned together up to about so many samples


class Places(NamedTuple):
    """Where samples lie: the number of each one's shard, and its number there."""

    shards: Ints
    rows: Ints


class Order(Protocol):
    """One pass over the samples of an epoch.

    Attributes:
        count: how many positions it has.
        lanes: a step's positions are divided among ranks by their remainders by this.
    """

    @property
    def count(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    def locate(self, positions: Ints) -> Places:
        """Where the samples at `positions`, from 0 up to `count`, lie."""
        ...

    def window_end(self, position: int) -> int:
        """Where the window ends that a position lies in: what comes behind it lies elsewhere than what comes before."""
        ...


class ShardOrder:
    """Shards one after the other, or shuffled: by shards, within each, or by windows.

    Args:
        sizes: samples of each shard.
        by: "none", "shards" (whole ones in another order), "within" (each one's samples), "windows".
        key: what the pass's pseudo-random numbers are drawn from, such as (seed, epoch).
        windows: for "windows".
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
        if self._by == "within":  # small shards are taken together, else each would be a window of its own
            first = self._starts[np.searchsorted(self._starts, position, side="right") - 1]
            cell = int(first) // WITHIN_WINDOW
            ends = np.searchsorted(self._starts, (cell + 1) * WITHIN_WINDOW)
            return max(position + 1, int(self._starts[min(int(ends), len(self._starts) - 1)]))
        return sequential_end(position)


class ChosenOrder:
    """Those of another order's samples that are chosen, by their positions there.

    Args:
        inner: the other order.
        chosen: the positions.
    """

    lanes = 1

    def __init__(self, inner: Order, chosen: Ints) -> None:
        self._inner, self._chosen, self.count = inner, chosen, len(chosen)

    def locate(self, positions: Ints) -> Places:
        return self._inner.locate(self._chosen[positions])

    def window_end(self, position: int) -> int:
        return sequential_end(position)


class ComputedOrder:
    """Those of another order's samples whose positions there a function gives, for positions of this one.

    Args:
        inner: the other order.
        count: how many there are.
        computed: gives the positions in the other order.
    """

    lanes = 1

    def __init__(self, inner: Order, count: int, computed: Callable[[Ints], Ints]) -> None:
        self._inner, self.count, self._computed = inner, count, computed

    def locate(self, positions: Ints) -> Places:
        return self._inner.locate(self._computed(np.asarray(positions, np.int64)))

    def window_end(self, position: int) -> int:
        return sequential_end(position)


class FirstOf:
    """The first positions of another order."""

    def __init__(self, inner: Order, count: int) -> None:
        self._inner, self.count, self.lanes = inner, min(count, inner.count), inner.lanes
        self.locate, self.window_end = inner.locate, inner.window_end


class ShuffledOrder:
    """Another order's positions, shuffled among one another."""

    lanes = 1

    def __init__(self, inner: Order, key: tuple[int, ...]) -> None:
        self._inner, self.count, self._draw = inner, inner.count, draw("global", *key)

    def locate(self, positions: Ints) -> Places:
        return self._inner.locate(permutation(positions, self.count, self._draw))

    def window_end(self, position: int) -> int:
        return sequential_end(position)


class Passes:
    """Order after order, for epochs that go over their samples several times.

    Args:
        make: the order of the pass with this number; it gives as many samples each time.
        times: how many passes; None: without end.
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
        """The order of one pass."""
        return self._orders.of(number)


class EpochOrder:
    """The order of an epoch, together with those before it: negative positions count from its begin back into these.

    Args:
        make: the order of the epoch that comes so many after this one: 0, -1, -2, …; all have as many positions.
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
    """Orders that come one behind the other, each made when it is asked for; the first and the newest are kept."""

    def __init__(self, make: Callable[[int], Order]) -> None:
        self._make, self._first = make, make(0)
        self._made = 0, self._first

    def of(self, number: int) -> Order:
        if number == 0:
            return self._first
        made = self._made
        if made[0] != number:
            made = self._made = number, self._make(number)  # looked at once: other threads may want another one
        return made[1]

    def locate(self, numbers: Ints, positions: Ints, count: int) -> Places:
        """Where samples lie.

        Args:
            numbers: in which order each of `positions` is.
            count: positions of each order.
        """
        first = int(numbers[0]) if len(numbers) else 0
        if (numbers == first).all():
            return self.of(first).locate(positions - first * count)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            shards[mine], rows[mine] = self.of(number).locate(positions[mine] - number * count)
        return Places(shards, rows)


ENDLESS = 2**62


def sequential_end(position: int) -> int:
    """Where the window ends of an order that has no windows of its own."""
    return (position // _SEQUENTIAL_WINDOW + 1) * _SEQUENTIAL_WINDOW
