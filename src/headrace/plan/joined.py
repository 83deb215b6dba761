"""Several orders in one, whichever's sample comes at a position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.plan.order import Order, Places
from headrace.types import Ints


class JoinedOrder(ABC):
    """Several orders in one; each layout of them says which one's which sample comes where.

    Args:
        inputs: the orders.
        count: how many positions it has.
        first_shards: by how much each input's shards are numbered higher than by itself.
    """

    lanes = 1

    def __init__(self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None = None) -> None:
        self._inputs, self.count = inputs, count
        self._first_shards = first_shards or [0] * len(inputs)

    @abstractmethod
    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """(the input of the samples at some positions, which one of its samples each is)."""

    @abstractmethod
    def window_end(self, position: int) -> int:
        """Where the window ends that a position lies in."""

    def locate(self, positions: Ints) -> Places:
        """Where the samples at some positions lie."""
        positions = np.asarray(positions, np.int64)
        inputs, turns = self.turns(positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for k in np.unique(inputs).tolist():
            mine = np.flatnonzero(inputs == k)
            found = self._inputs[k].locate(turns[mine])
            shards[mine], rows[mine] = found.shards + self._first_shards[k], found.rows
        return Places(shards, rows)


class PlannedBlock(NamedTuple):
    """The samples of a block, in their order.

    Attributes:
        number: of the block.
        start, stop: their positions.
        sources: of each sample.
        turns: which one of its source's samples it is, of this epoch.
    """

    number: int
    start: int
    stop: int
    sources: Ints
    turns: Ints


class BlockOrder(JoinedOrder):
    """Several orders in one that is planned block by block; the last one is kept.

    Args:
        inputs: see `JoinedOrder`.
        count: the same.
        first_shards: the same.
        window: positions of a window.
    """

    def __init__(self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None, window: int) -> None:
        super().__init__(inputs, count, first_shards)
        self._window = max(1, window)
        self._kept: PlannedBlock | None = None

    @abstractmethod
    def _number_of(self, position: int) -> int:
        """The block that a position lies in."""

    @abstractmethod
    def _block(self, number: int) -> PlannedBlock:
        """What comes in a block."""

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """(the source of the samples at some positions, which one of its samples each is)."""
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        by_position = np.argsort(positions, kind="stable")
        ascending = positions[by_position]
        at = 0
        while at < len(ascending):
            block = self._block_at(int(ascending[at]))
            end = int(np.searchsorted(ascending, block.stop))
            mine, inside = by_position[at:end], ascending[at:end] - block.start
            sources[mine], turns[mine] = block.sources[inside], block.turns[inside]
            at = end
        return sources, turns

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window

    def _block_at(self, position: int) -> PlannedBlock:
        kept = self._kept  # looked at once: other threads may want another block
        if kept is None or not kept.start <= position < kept.stop:
            kept = self._kept = self._block(self._number_of(position))
        return kept
