"""Shuffling by windows: many stretches of a sequence at once, each shuffled by blocks.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.order.permutation import SORTED_MOST, Words, below, draw, numbers, permutations, sorted_orders
from headrace.types import Ints

_LANES_MOST = 256
_KEPT_MOST = 2**22  # numbers; 8 MiB
_WINDOWS_MOST = 4  # up to this number, each window has a lookup table


@dataclass(frozen=True, slots=True)
class Windows:
    """Parameters of a shuffle by windows: `lanes` stretches, each shuffled by blocks of `block`.

    A window holds `lanes * block` samples. A shard's samples are close together in one lane, so the shard is read once.
    """

    lanes: int
    block: int

    @staticmethod
    def of(window: int, stretch: int) -> Windows:
        """Return windows of about `window` samples. `stretch` samples justify a separate read."""
        lanes = 1
        while lanes < _LANES_MOST and 2 * lanes * max(1, stretch) <= window:
            lanes *= 2
        return Windows(lanes, max(1, window // lanes))


class _Window(NamedTuple):
    """Block orders of one window, computed on demand."""

    number: int
    orders: NDArray[np.uint16]  # [lanes, block]
    known: NDArray[np.bool_]  # [lanes]


class LaneBlocks:
    """Mapping from positions to places in a sequence of `count` samples, shuffled by windows.

    The sequence is cut into lanes whose lengths differ by at most one. Positions take lanes in the order of
    `lane_turns`. Each lane starts at a random offset and wraps around. Otherwise, lanes that are shards of one size, or
    equal parts of them, would all be at the same rows, and a sample would come at the same time in every epoch. Within
    a lane, samples are shuffled by blocks.

    Attributes:
        lanes: Number of lanes, at most the number of samples.
        window: Samples in the blocks of all lanes together.
    """

    def __init__(self, count: int, windows: Windows, key: tuple[int, ...]) -> None:
        self.lanes = max(1, min(windows.lanes, count))
        self.window = self.lanes * windows.block
        self._block = windows.block
        self._turns = lane_turns(self.lanes)
        length, longer = divmod(count, self.lanes)
        self._lengths = np.full(self.lanes, length)
        self._lengths[self._turns[:longer]] += 1  # lanes of the last, partial round
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._shifts = below(numbers(np.arange(self.lanes), draw("shifts", *key)), self._lengths)
        self._key = draw("blocks", *key)
        self._kept: _Window | None = None

    def places(self, positions: Ints) -> Ints:
        """Return the places of positions in the sequence."""
        offset = positions // self.lanes
        lane = self._turns[positions - offset * self.lanes]
        number = offset // self._block
        place = self._shifts[lane] + number * self._block
        place += self._within(lane, number, offset - number * self._block)
        length = self._lengths[lane]
        place -= length * (place >= length)
        return np.asarray(self._starts[lane] + place, np.int64)

    def _within(self, lane: Ints, number: Ints, inside: Ints) -> Ints:
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
        if kept is None or kept.number != number:  # read once: another thread may replace it
            kept = _Window(number, np.zeros((self.lanes, self._block), np.uint16), np.zeros(self.lanes, bool))
            self._kept = kept
        missing = lane[~kept.known[lane]]  # also read once
        if len(missing):
            self._make(kept, np.unique(missing))
        return np.asarray(kept.orders[lane, inside], np.int64)

    def _make(self, kept: _Window, lanes: Ints) -> None:
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
    """Return the lanes of consecutive positions: at 0, 1/2, 1/4, 3/4, 1/8, 5/8 .. of all lanes.

    These are bit-reversed numbers (van der Corput, 1935). Any few consecutive positions are spread evenly over the
    lanes, so a small batch is spread over the sequence. If a step is no multiple of the lanes, each rank's share still
    uses nearly the same lanes as in the step before.
    """
    bits = max(0, lanes - 1).bit_length()
    turns = np.zeros(1 << bits, np.int64)
    for bit in range(bits):
        turns |= (np.arange(1 << bits) >> bit & 1) << (bits - 1 - bit)
    return turns[turns < lanes]


def mixed(inside: Ints, sizes: Ints, keys: Words) -> Ints:
    """Permute each number by the permutation of its own size and key."""
    result = np.empty_like(inside)
    for size in np.unique(sizes).tolist():
        mine = np.flatnonzero(sizes == size)
        result[mine] = permutations(inside[mine], size, keys[mine])
    return result
