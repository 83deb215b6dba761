"""An operator on the order as a package of somebody else would have it: samples of several stretches take turns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import headrace as hr


class Turns:
    def __init__(self, stretches: int) -> None:
        self.stretches = stretches

    def __call__(self, positions: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
        size, longer = divmod(count, self.stretches)  # the first ones have one more
        turn, stretch = np.divmod(positions, self.stretches)
        return stretch * size + np.minimum(stretch, longer) + turn


def in_turn(stretches: int = 3) -> hr.OrderOp:
    """The first sample of each of so many stretches of the data, the second of each, and so on."""
    return hr.OrderOp(numbers=Turns(stretches))


hr.register_operator("in_turn", in_turn)
