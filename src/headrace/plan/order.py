"""Which sample comes at each position of an epoch: a pure function, over arrays of shards and never of samples.

All of it belongs to order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from headrace.plan.permutation import draw, permutation
from headrace.types import Ints

ORDER_VERSION = 1
_SEQUENTIAL_WINDOW = 16384


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


@dataclass(frozen=True, slots=True)
class Windows:
    """How a pass is mixed by windows: `lanes` stretches of the data at once, each shuffled by blocks of `block`.

    A window holds `lanes * block` samples, and a shard's samples are near one another in one lane: it is read once.
    """

    lanes: int
    block: int

    @staticmethod
    def of(window: int, stretch: int) -> Windows:
        """Windows of about so many samples.

        Args:
            window: samples in a window.
            stretch: samples that are worth a read of their own.
        """
        lanes = 1
        while lanes < _LANES_MOST and 2 * lanes * max(1, stretch) <= window:
            lanes *= 2
        return Windows(lanes, max(1, window // lanes))


_LANES_MOST = 256


class ShardOrder:
    """Shards one after the other, or shuffled: by shards, within each, or by windows.

    Args:
        sizes: samples of each shard.
        by: "none", "shards" (whole ones in another order), "within" (each one's samples), "windows".
        key: what the pass's pseudo-random numbers are drawn from, such as (seed, epoch).
        windows: for "windows".
    """

    def __init__(self, sizes: Ints, by: str, key: tuple[int, ...], windows: Windows | None = None) -> None:
        self._by, self._key = by, key
        self._shards = None
        if by in ("shards", "windows"):
            self._shards = permutation(np.arange(len(sizes)), len(sizes), draw("shards", *key))
            sizes = sizes[self._shards]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.count = int(self._starts[-1])
        self._windows = windows if by == "windows" else None
        self.lanes = 1 if self._windows is None else max(1, min(self._windows.lanes, self.count))

    def locate(self, positions: Ints) -> Places:
        base = np.asarray(positions, np.int64)
        if self._windows is not None:
            base = self._within_blocks(base, self._windows.block)
        shards = np.searchsorted(self._starts, base, side="right") - 1
        rows = base - self._starts[shards]
        if self._by == "within":
            sizes = np.diff(self._starts)
            rows = _each(shards, rows, lambda k, row: permutation(row, int(sizes[k]), draw("within", *self._key, k)))
        return Places(shards if self._shards is None else self._shards[shards], rows)

    def window_end(self, position: int) -> int:
        if self._windows is not None:
            size = self.lanes * self._windows.block
        elif self._by == "within":
            return int(self._starts[np.searchsorted(self._starts, position, side="right")])
        else:
            size = _SEQUENTIAL_WINDOW
        return (position // size + 1) * size

    def _within_blocks(self, positions: Ints, block: int) -> Ints:
        """The places in the sequence of shards, of which each lane has a stretch, shuffled by blocks."""
        lanes = self.lanes
        length, longer = divmod(self.count, lanes)
        lane, offset = positions % lanes, positions // lanes
        number, inside = offset // block, offset % block

        def shuffled(which: int, inside: Ints) -> Ints:
            number, lane = divmod(which, lanes)
            size = min(block, length + (lane < longer) - number * block)
            return permutation(inside, size, draw("block", *self._key, lane, number))

        inside = _each(number * lanes + lane, inside, shuffled)
        return np.asarray(lane * length + np.minimum(lane, longer) + number * block + inside, np.int64)


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
        return (position // _SEQUENTIAL_WINDOW + 1) * _SEQUENTIAL_WINDOW


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
        return (position // _SEQUENTIAL_WINDOW + 1) * _SEQUENTIAL_WINDOW


class Passes:
    """Order after order, for epochs that go over their samples several times.

    Args:
        make: the order of the pass with this number; it gives as many samples each time.
        times: how many passes; None: without end.
    """

    def __init__(self, make: Callable[[int], Order], times: int | None = 1) -> None:
        self._make, self._times = make, times
        self._first = make(0)
        self._made = 0, self._first
        self.pass_count = self._first.count
        self.count = ENDLESS if times is None and self.pass_count else self.pass_count * (times or 0)
        self.lanes = self._first.lanes

    def locate(self, positions: Ints) -> Places:
        numbers = positions // max(1, self.pass_count)
        first = int(numbers[0]) if len(numbers) else 0
        if (numbers == first).all():
            return self.of(first).locate(positions - first * self.pass_count)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            shards[mine], rows[mine] = self.of(number).locate(positions[mine] - number * self.pass_count)
        return Places(shards, rows)

    def window_end(self, position: int) -> int:
        number, inside = divmod(position, self.pass_count)
        end = min(self.of(number).window_end(inside), self.pass_count)
        return number * self.pass_count + end

    def of(self, number: int) -> Order:
        """The order of one pass; negative numbers are those of the epoch before."""
        if number == 0:
            return self._first
        if self._made[0] != number:
            self._made = number, self._make(number)
        return self._made[1]


ENDLESS = 2**62


def _each(groups: Ints, values: Ints, give: Callable[[int, Ints], Ints]) -> Ints:
    """For each group of equal numbers what `give` makes of the values there."""
    if not len(groups):
        return values
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    result = np.empty_like(values)
    for mine in np.split(order, ends):
        result[mine] = give(int(groups[mine[0]]), values[mine])
    return result
