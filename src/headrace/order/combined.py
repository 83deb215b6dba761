"""Several orders combined into one: concatenated, interleaved or zipped. `headrace.order.mixture` has mixtures.

Everything here is part of order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.order.orders import ENDLESS, Order, Places, UnwindowedOrder
from headrace.types import Ints


class JoinedOrder(ABC):
    """Several orders combined into one. Subclasses decide which input each position takes.

    Args:
        first_shards: Offset of each input's shard numbers. None: 0.
        window: Samples in a window.
    """

    lanes = 1

    def __init__(
        self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None = None, window: int = 1
    ) -> None:
        self._inputs, self.count, self._window = inputs, count, max(1, window)
        self._first_shards = first_shards or [0] * len(inputs)

    @abstractmethod
    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the input of each position, and the sample's position in this input."""

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window

    def locate(self, positions: Ints) -> Places:
        positions = np.asarray(positions, np.int64)
        inputs, turns = self.turns(positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for k in np.unique(inputs).tolist():
            mine = np.flatnonzero(inputs == k)
            found = self._inputs[k].locate(turns[mine])
            shards[mine], rows[mine] = found.shards + self._first_shards[k], found.rows
        return Places(shards, rows)


class ConcatOrder(JoinedOrder):
    """Concatenated orders. Only the last one may be endless."""

    def __init__(self, inputs: Sequence[Order], first_shards: Sequence[int] | None = None) -> None:
        self._starts = np.cumsum([0, *(order.count for order in inputs)])
        super().__init__(inputs, min(ENDLESS, int(self._starts[-1])), first_shards)

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        inputs = np.searchsorted(self._starts, positions, side="right") - 1
        return inputs, positions - self._starts[inputs]

    def window_end(self, position: int) -> int:
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        start = int(self._starts[number])
        return min(start + self._inputs[number].window_end(position - start), int(self._starts[number + 1]))


class _Stretch(NamedTuple):
    """Consecutive rounds in which the same inputs contribute equal numbers of samples.

    Attributes:
        start: First position.
        first: First round.
        ends: Samples of a round up to the end of each input's block.
    """

    start: int
    first: int
    inputs: Ints
    ends: Ints


class InterleaveLayout:
    """Blocks of several inputs in turn. Exhausted inputs are skipped. Some may be endless."""

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self._block = block
        self.count = min(ENDLESS, sum(sizes))
        rounds = [-(-size // block) for size in sizes]
        self._stretches: list[_Stretch] = []
        start = first = 0
        for last in sorted(set(rounds) - {0}):
            for begin, end in ((first, last - 1), (last - 1, last)):  # blocks may be shorter in the last round
                if begin == end or start >= ENDLESS:
                    continue
                taking = [k for k, count in enumerate(rounds) if count > begin]
                lengths = [min(block, sizes[k] - begin * block) for k in taking]
                self._stretches.append(_Stretch(start, begin, np.array(taking), np.cumsum(lengths)))
                start += (end - begin) * sum(lengths)
            first = last
        self._starts = [stretch.start for stretch in self._stretches]

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        inputs, turns = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            stretch, mine = self._stretches[number], np.flatnonzero(numbers == number)
            rounds, inside = np.divmod(positions[mine] - stretch.start, stretch.ends[-1])
            which = np.searchsorted(stretch.ends, inside, side="right")
            begins = np.concatenate([[0], stretch.ends[:-1]])[which]
            inputs[mine] = stretch.inputs[which]
            turns[mine] = (stretch.first + rounds) * self._block + inside - begins
        return inputs, turns


class InterleaveOrder(JoinedOrder):
    def __init__(
        self, inputs: Sequence[Order], layout: InterleaveLayout, first_shards: Sequence[int] | None, window: int
    ) -> None:
        super().__init__(inputs, layout.count, first_shards, window)
        self._layout = layout

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        return self._layout.turns(positions)


class ZipOrder(UnwindowedOrder):
    """Zipped orders, where the number of a tuple is composed of those of its samples.

    Args:
        digits: Range of each component, and a function from positions to its values.
    """

    def __init__(self, count: int, digits: Sequence[tuple[int, Callable[[Ints], Ints]]]) -> None:
        self.count, self._digits = count, digits

    def locate(self, positions: Ints) -> Places:
        numbers = np.zeros_like(positions, np.int64)
        for radix, numbers_at in self._digits:
            numbers = numbers * radix + numbers_at(positions)
        return Places(np.zeros_like(numbers), numbers)
