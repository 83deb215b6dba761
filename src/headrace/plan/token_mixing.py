"""Mixtures by tokens in lanes: the choice of the input whose document is drawn next.

Everything here is part of order 1, and never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.plan.joined import JoinedOrder
from headrace.plan.mixture import Shares
from headrace.plan.order import ENDLESS, Order
from headrace.plan.permutation import draw, permutation
from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class TokenMixing:
    """How lanes draw documents from the inputs of a mixture.

    Attributes:
        shares: Shares of tokens. A step is a number of tokens, over all lanes.
    """

    names: tuple[str, ...]
    shares: Shares

    def phases(self, lane: int, lanes: int) -> list[int]:
        """Return the deficit at which a lane draws from each input, in 1 / (2 * `lanes`) documents.

        Deficits are odd numbers, spread evenly over the lanes. With equal ones, all lanes would run ahead with an input
        at the same time. So, averaged over lanes, each stretch of tokens has the right shares.
        """
        return [2 * int(permutation(np.array([lane]), lanes, draw("phases", k))[0]) + 1 for k in range(len(self.names))]

    def choice(
        self, lanes: int, phases: Sequence[int], drawn: Sequence[int], heads: Sequence[int | None]
    ) -> int | None:
        """Choose the input whose document a lane draws next: the one that is due first.

        Args:
            drawn: Tokens of each input that the lane has drawn.
            heads: Token count of each input's next document. None: it has not arrived.

        Returns:
            The number of the input. None: documents must arrive first.
        """
        shares, scale = self.shares, 2 * lanes
        block, rest = divmod(sum(drawn) * lanes, shares.size)
        before, after = shares.due(block), shares.due(block + 1)
        whole = shares.unit * shares.size * lanes
        best, best_rate, best_early = None, 1, 0
        for k, (due, late, tokens, head) in enumerate(zip(before, after, drawn, heads, strict=True)):
            rate = late - due
            if rate <= 0:
                continue  # the input has no share in this step
            if head is None:
                return None
            # The tokens by which it is early; divided by the growth of its share, this is the time until it is due.
            early = (tokens * scale + phases[k] * head) * whole - (due * shares.size + rate * rest) * scale
            if best is None or early * best_rate < best_early * rate:
                best, best_rate, best_early = k, rate, early
        return best

    def lacking(self, lanes: int, drawn: Sequence[float]) -> dict[int, float]:
        """Return the approximate deficit in tokens of each active input, for a lane's drawn tokens."""
        shares = self.shares
        steps = sum(drawn) * lanes / shares.size
        block = int(steps)
        due = zip(shares.due(block), shares.due(block + 1), drawn, strict=True)
        return {
            k: (early + (late - early) * (steps - block)) / (shares.unit * lanes) - tokens
            for k, (early, late, tokens) in enumerate(due)
            if late > early
        }


class InputTurns(JoinedOrder):
    """The documents of all inputs, numbered in turn, for lanes to draw from. Inputs are endless."""

    def __init__(self, inputs: Sequence[Order], first_shards: Sequence[int], window: int) -> None:
        super().__init__(inputs, ENDLESS, first_shards)
        self._window = max(1, window)

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        turns, inputs = np.divmod(positions, len(self._inputs))
        return inputs, turns

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window
