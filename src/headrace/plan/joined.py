"""Several orders in one, whichever's sample comes at a position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
