"""Combinations of several orders into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.plan.order import Order, Places
from headrace.types import Ints


class JoinedOrder(ABC):
    """Several orders combined into one. Subclasses decide which input each position takes.

    Args:
        first_shards: Offset of each input's shard numbers.
    """

    lanes = 1

    def __init__(self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None = None) -> None:
        self._inputs, self.count = inputs, count
        self._first_shards = first_shards or [0] * len(inputs)

    @abstractmethod
    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the input of each position, and the sample's position in this input."""

    @abstractmethod
    def window_end(self, position: int) -> int: ...

    def locate(self, positions: Ints) -> Places:
        positions = np.asarray(positions, np.int64)
        inputs, turns = self.turns(positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for k in np.unique(inputs).tolist():
            mine = np.flatnonzero(inputs == k)
            found = self._inputs[k].locate(turns[mine])
            shards[mine], rows[mine] = found.shards + self._first_shards[k], found.rows
        return Places(shards, rows)


class PlannedBlock(NamedTuple):
    """The samples of a block, in order, at positions [start, stop).

    `sources` is the source of each sample, `turns` its position in this source, counted over the epoch.
    """

    number: int
    start: int
    stop: int
    sources: Ints
    turns: Ints


class BlockOrder(JoinedOrder):
    """Several orders combined block by block. The last planned block is cached."""

    def __init__(self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None, window: int) -> None:
        super().__init__(inputs, count, first_shards)
        self._window = max(1, window)
        self._kept: PlannedBlock | None = None

    @abstractmethod
    def _number_of(self, position: int) -> int: ...

    @abstractmethod
    def _block(self, number: int) -> PlannedBlock: ...

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
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
        kept = self._kept  # read once: another thread may replace it
        if kept is None or not kept.start <= position < kept.stop:
            kept = self._kept = self._block(self._number_of(position))
        return kept
