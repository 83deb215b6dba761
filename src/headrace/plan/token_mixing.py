"""Mixtures by tokens: which input's document comes next, where the shares are to be those of tokens.

All of it belongs to order 1, and never changes.
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
        names: of the inputs.
        shares: of their tokens; steps are of so many tokens, of all lanes together.
    """

    names: tuple[str, ...]
    shares: Shares

    def phases(self, lane: int, lanes: int) -> list[int]:
        """How much of a document is to lack before a lane draws it, for each input: odd parts of 2 `lanes`.

        Over all lanes they are spread evenly: were they the same, all lanes would be ahead with an input together, and
        together behind. So each token comes in each stretch of the lanes' tokens by its share, in the mean of them.
        """
        return [2 * int(permutation(np.array([lane]), lanes, draw("phases", k))[0]) + 1 for k in range(len(self.names))]

    def choice(
        self, lanes: int, phases: Sequence[int], drawn: Sequence[int], heads: Sequence[int | None]
    ) -> int | None:
        """The input whose document a lane draws next: the one that is due first.

        Args:
            lanes: how many there are.
            phases: the lane's.
            drawn: how many tokens of each input it has drawn.
            heads: how many the next document of each has; None: it has not come yet.

        Returns:
            Its number; None: documents must come first.
        """
        shares, scale = self.shares, 2 * lanes
        block, rest = divmod(sum(drawn) * lanes, shares.size)
        before, after = shares.due(block), shares.due(block + 1)
        whole = shares.unit * shares.size * lanes
        best, best_rate, best_early = None, 1, 0
        for k, (due, late, tokens, head) in enumerate(zip(before, after, drawn, heads, strict=True)):
            rate = late - due
            if rate <= 0:
                continue  # none of it comes in this step
            if head is None:
                return None
            # By so much it is early: the time until it is due is that, divided by how fast its share grows.
            early = (tokens * scale + phases[k] * head) * whole - (due * shares.size + rate * rest) * scale
            if best is None or early * best_rate < best_early * rate:
                best, best_rate, best_early = k, rate, early
        return best

    def lacking(self, lanes: int, drawn: Sequence[float]) -> dict[int, float]:
        """About how many tokens lack of each input that comes, by its number, where a lane has drawn so many."""
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
    """The documents of all inputs, as lanes draw on them: those of one input are so many positions from one another.

    Args:
        inputs: endless orders.
        first_shards: by how much each input's shards are numbered higher than by itself.
        window: positions of a window.
    """

    def __init__(self, inputs: Sequence[Order], first_shards: Sequence[int], window: int) -> None:
        super().__init__(inputs, ENDLESS, first_shards)
        self._window = max(1, window)

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        turns, inputs = np.divmod(positions, len(self._inputs))
        return inputs, turns

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window
