"""Orders: pure functions from positions of an epoch to samples, with arrays per shard only. Shuffling by windows.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.order.permutation import (
    SORTED_MOST,
    Words,
    below,
    draw,
    numbers,
    permutation,
    permutations,
    sorted_orders,
)
from headrace.types import Ints

ORDER_VERSION = 1
_SEQUENTIAL_WINDOW = 16384
WITHIN_WINDOW = 1024  # small shards that are shuffled within form one window of about this many samples
_LANES_MOST = 256
_KEPT_MOST = 2**22  # numbers; 8 MiB
_WINDOWS_MOST = 4  # up to this number, each window has a lookup table


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


class StretchOrder(ComputedOrder):
    """The samples at a range of positions of another order, whose windows they keep."""

    def __init__(self, inner: Order, chosen: range) -> None:
        super().__init__(inner, len(chosen), lambda positions: chosen.start + chosen.step * positions)
        self._start, self._step = chosen.start, chosen.step

    def window_end(self, position: int) -> int:
        end = self._inner.window_end(self._start + self._step * position)
        return -((self._start - end) // self._step)


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


# Shuffling by windows: many stretches of a sequence at once, each shuffled by blocks.


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


class Rounds:
    """Shards read in order, for a number of rounds.

    Args:
        seed: Seed of the order in each round. None: the given order.
        times: Number of rounds. None: endless.

    Attributes:
        count: Number of this rank's shards in a round.
    """

    def __init__(
        self,
        urls: Sequence[str],
        seed: int | None,
        epoch: int,
        times: int | None,
        rank: int,
        world: int,
        *,
        may_be_empty: bool = False,
    ) -> None:
        if world > len(urls) and not may_be_empty:
            remedy = "make an index, then ranks share shards (headrace index URL…)"
            raise check.too_few(f"{len(urls)} shards", world, remedy)
        self._urls, self._seed, self._epoch, self._times = urls, seed, epoch, times
        self._rank, self._world = rank, world
        self.count = (len(urls) - rank - 1) // world + 1
        self._round: tuple[int, Ints] = -1, np.zeros(0, np.int64)

    def from_turn(self, turn: int, stop: tuple[int, int] | None = None) -> Iterator[tuple[int, str]]:
        """Yield (turn, URL) of shards from a turn on, up to a (turn, row) from `at`."""
        turns: Iterable[int] = itertools.count(turn)
        if self._times is not None:
            turns = range(turn, self._times * self.count)
        if stop is not None:
            turns = itertools.takewhile(lambda turn: (turn, 0) < stop, turns)
        return ((k, self._urls[self.shard(k)]) for k in turns)

    def at(self, position: int, sizes: Ints) -> tuple[int, int]:
        """Return (turn, row) of the sample at a position of the epoch, for these shard sizes."""
        total = int(sizes.sum())
        if not total:
            return 0, 0
        number, position = divmod(position, total)
        turns = range(number * self.count, (number + 1) * self.count)
        ends = np.cumsum([sizes[self.shard(turn)] for turn in turns])
        k = int(ends.searchsorted(position, side="right"))
        return turns[k], position - int(ends[k - 1] if k else 0)

    def shard(self, turn: int) -> int:
        number, k = divmod(turn, self.count)
        if self._round[0] != number:
            shards = np.arange(len(self._urls))
            if self._seed is not None:
                shards = permutation(shards, len(shards), draw("shards", self._seed, self._epoch, number))
            self._round = number, shards[self._rank :: self._world]
        return int(self._round[1][k])
