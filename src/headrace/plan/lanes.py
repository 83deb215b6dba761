"""Windows: many stretches of a sequence at once, each shuffled by blocks.

All of it belongs to order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.plan.permutation import SORTED_MOST, Words, below, draw, numbers, permutations, sorted_orders
from headrace.types import Ints

_LANES_MOST = 256
_KEPT_MOST = 2**22  # places: 8 MiB
_WINDOWS_MOST = 4  # of so many at once each is looked up in a table of all its blocks


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


class _Window(NamedTuple):
    """The blocks of one window, each one's order made when it is first needed."""

    number: int
    orders: NDArray[np.uint16]  # [lanes, block]
    known: NDArray[np.bool_]  # [lanes]


class LaneBlocks:
    """Where in a sequence of `count` samples each position lies, when it is mixed by windows.

    The sequence is cut into lanes, whose lengths differ by at most one. Positions go round the lanes by `lane_turns`.
    Each lane begins somewhere within itself and goes round: else lanes that are shards of one size, or equal parts of
    them, would all be at the same rows, and a sample would come at the same time in every epoch. Within a lane, samples
    are shuffled by blocks.

    Attributes:
        lanes: how many there are: no more than samples.
        window: how many samples the lanes' blocks hold together.
    """

    def __init__(self, count: int, windows: Windows, key: tuple[int, ...]) -> None:
        self.lanes = max(1, min(windows.lanes, count))
        self.window = self.lanes * windows.block
        self._block = windows.block
        self._turns = lane_turns(self.lanes)
        length, longer = divmod(count, self.lanes)
        self._lengths = np.full(self.lanes, length)
        self._lengths[self._turns[:longer]] += 1  # the last round of positions comes to these alone
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._shifts = below(numbers(np.arange(self.lanes), draw("shifts", *key)), self._lengths)
        self._key = draw("blocks", *key)
        self._kept: _Window | None = None

    def places(self, positions: Ints) -> Ints:
        """Where the samples at `positions` lie in the sequence."""
        offset = positions // self.lanes
        lane = self._turns[positions - offset * self.lanes]
        number = offset // self._block
        place = self._shifts[lane] + number * self._block
        place += self._within(lane, number, offset - number * self._block)
        length = self._lengths[lane]
        place -= length * (place >= length)
        return np.asarray(self._starts[lane] + place, np.int64)

    def _within(self, lane: Ints, number: Ints, inside: Ints) -> Ints:
        """Where in their blocks the samples lie that come at `inside` of these."""
        if not len(number):
            return inside
        if self._block <= SORTED_MOST and self.window <= _KEPT_MOST:
            first, last = int(number.min()), int(number.max())
            if first == last:
                return self._looked_up(first, lane, inside)
            if last - first < _WINDOWS_MOST:
                result = np.empty_like(inside)
                for one in range(first, last + 1):
                    mine = np.flatnonzero(number == one)
                    result[mine] = self._looked_up(one, lane[mine], inside[mine])
                return result
        return mixed(inside, self._sizes(lane, number), self._keys(lane, number))

    def _looked_up(self, number: int, lane: Ints, inside: Ints) -> Ints:
        kept = self._kept
        if kept is None or kept.number != number:  # looked at once: other threads may want another window
            kept = _Window(number, np.zeros((self.lanes, self._block), np.uint16), np.zeros(self.lanes, bool))
            self._kept = kept
        if not kept.known[lane].all():
            wanted = np.zeros(self.lanes, bool)
            wanted[lane] = True
            self._make(kept, np.flatnonzero(wanted & ~kept.known))
        return np.asarray(kept.orders[lane, inside], np.int64)

    def _make(self, kept: _Window, lanes: Ints) -> None:
        """Make the orders of these lanes' blocks."""
        sizes = self._sizes(lanes, kept.number)
        for size in {int(sizes.min()), int(sizes.max())}:
            mine = lanes[sizes == size]
            kept.orders[mine, :size] = sorted_orders(size, self._keys(mine, kept.number))
        kept.known[lanes] = True

    def _sizes(self, lane: Ints, number: Ints | int) -> Ints:
        return np.minimum(self._block, self._lengths[lane] - number * self._block)

    def _keys(self, lane: Ints, number: Ints | int) -> Words:
        return numbers(number * self.lanes + lane, self._key)


def lane_turns(lanes: int) -> Ints:
    """The lane of each of so many positions that follow one another: at 0, 1/2, 1/4, 3/4, 1/8, 5/8 .. of all lanes.

    These are the bits of successive numbers in reverse (van der Corput, 1935). However few positions follow one
    another, they are spread evenly over the lanes: those of a small batch lie far apart in the sequence, and where a
    step is no multiple of the lanes, each rank's share of it still lies in nearly the same lanes as in the step before.
    """
    bits = max(0, lanes - 1).bit_length()
    turns = np.zeros(1 << bits, np.int64)
    for bit in range(bits):
        turns |= (np.arange(1 << bits) >> bit & 1) << (bits - 1 - bit)
    return turns[turns < lanes]


def mixed(inside: Ints, sizes: Ints, keys: Words) -> Ints:
    """Where `inside` is sent, each number by the permutation of its own size and key."""
    result = np.empty_like(inside)
    for size in np.unique(sizes).tolist():
        mine = np.flatnonzero(sizes == size)
        result[mine] = permutations(inside[mine], size, keys[mine])
    return result
