"""Orders one after the other, by blocks in turn, and side by side.

All of it belongs to order 1, and never changes: see docs/reference/order.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.plan.joined import JoinedOrder
from headrace.plan.order import ENDLESS, Order, Places, sequential_end
from headrace.types import Ints


class ConcatOrder(JoinedOrder):
    """Orders one after the other; of these only the last one may have no end.

    Args:
        inputs: the orders.
        first_shards: by how much each input's shards are numbered higher than by itself.
    """

    def __init__(self, inputs: Sequence[Order], first_shards: Sequence[int] | None = None) -> None:
        starts = np.cumsum([0, *(order.count for order in inputs)])
        super().__init__(inputs, min(ENDLESS, int(starts[-1])), first_shards)
        self._starts = starts

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        inputs = np.searchsorted(self._starts, positions, side="right") - 1
        return inputs, positions - self._starts[inputs]

    def window_end(self, position: int) -> int:
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        start = int(self._starts[number])
        return min(start + self._inputs[number].window_end(position - start), int(self._starts[number + 1]))


class _Stretch(NamedTuple):
    """Rounds that are alike: in each, the same inputs give as many samples.

    Attributes:
        start: the position of its first sample.
        first: the number of its first round.
        inputs: which ones take part.
        ends: how many samples of a round have come behind each of these.
    """

    start: int
    first: int
    inputs: Ints
    ends: Ints


class InterleaveLayout:
    """Blocks of several inputs in turn; one that is used up takes part no more.

    Args:
        sizes: how many samples each input has; some may have no end.
        block: samples of a block; the last one of an input may have fewer.

    Attributes:
        count: how many positions there are.
    """

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self._block = block
        self.count = min(ENDLESS, sum(sizes))
        rounds = [-(-size // block) for size in sizes]
        self._stretches: list[_Stretch] = []
        start = first = 0
        for last in sorted(set(rounds) - {0}):
            for begin, end in ((first, last - 1), (last - 1, last)):  # in the last of their rounds some may have fewer
                if begin == end or start >= ENDLESS:
                    continue
                taking = [k for k, count in enumerate(rounds) if count > begin]
                lengths = [min(block, sizes[k] - begin * block) for k in taking]
                self._stretches.append(_Stretch(start, begin, np.array(taking), np.cumsum(lengths)))
                start += (end - begin) * sum(lengths)
            first = last
        self._starts = [stretch.start for stretch in self._stretches]

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """(the input of the samples at some positions, which one of its samples each is)."""
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


class ZipOrder:
    """Samples of several orders at once: the number of such a sample is made of theirs.

    Args:
        count: how many positions it has.
        digits: (how many numbers there are, the numbers at some positions) of each of them.
    """

    lanes = 1

    def __init__(self, count: int, digits: Sequence[tuple[int, Callable[[Ints], Ints]]]) -> None:
        self.count, self._digits = count, digits

    def locate(self, positions: Ints) -> Places:
        numbers = np.zeros_like(positions, np.int64)
        for radix, numbers_at in self._digits:
            numbers = numbers * radix + numbers_at(positions)
        return Places(np.zeros_like(numbers), numbers)

    def window_end(self, position: int) -> int:
        return sequential_end(position)


class InterleaveOrder(JoinedOrder):
    """Blocks of several orders in turn.

    Args:
        inputs: the orders.
        layout: of their samples.
        first_shards: by how much each input's shards are numbered higher than by itself.
        window: positions of a window.
    """

    def __init__(
        self, inputs: Sequence[Order], layout: InterleaveLayout, first_shards: Sequence[int] | None, window: int
    ) -> None:
        super().__init__(inputs, layout.count, first_shards)
        self._layout, self._window = layout, max(1, window)

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        return self._layout.turns(positions)

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window
