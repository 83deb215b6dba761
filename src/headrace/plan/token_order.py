"""Mixtures by tokens whose documents' lengths are known: which document comes at a position follows from arithmetic.

Each input has a clock of its own: a document is due when so many tokens of its input are as lie before its middle. So
no input is ever ahead or behind by more than half a document. A block is a stretch of so many tokens of all together.

All of it belongs to order 1, and never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import OptionError
from headrace.plan.joined import BlockOrder, PlannedBlock
from headrace.plan.mixture import Shares
from headrace.plan.order import ENDLESS, Order, Places
from headrace.types import Ints

_KEPT_PASSES = 2  # of each input: a block may lie in two


class TokenOrder(BlockOrder):
    """Several orders of documents in one, by shares of their tokens.

    Args:
        inputs: endless orders: each begins again where it is used up.
        counts: how many documents each has until then.
        lengths: for each input, how many tokens the documents at some places have.
        shares: of tokens; blocks are of so many.
        labels: what messages call the inputs.
        first_shards: by how much each input's shards are numbered higher than by itself.
        window: positions of a window.

    Raises:
        OptionError: an input that is to come has no tokens.
    """

    def __init__(
        self,
        inputs: Sequence[Order],
        counts: Sequence[int],
        lengths: Sequence[Callable[[Places], Ints]],
        shares: Shares,
        labels: Sequence[str],
        first_shards: Sequence[int] | None,
        window: int,
    ) -> None:
        super().__init__(inputs, ENDLESS, first_shards, window)
        self._shares = shares
        self._middles = [_Middles(*one) for one in zip(inputs, counts, lengths, labels, strict=True)]
        for k, middles in enumerate(self._middles):
            if shares.are_constant and shares.has(k) and not middles.tokens:
                raise OptionError(_empty(middles.label))

    def _due(self, block: int) -> list[tuple[int, int]]:
        """How many half tokens of each input are due before a block: (whole ones, parts of `unit` beyond)."""
        return [divmod(2 * due, self._shares.unit) for due in self._shares.due(block)]

    def _before(self, block: int) -> list[int]:
        """How many documents of each input come before a block."""
        return [
            middles.count_before(whole + (parts > 0))
            for middles, (whole, parts) in zip(self._middles, self._due(block), strict=True)
        ]

    def _number_of(self, position: int) -> int:
        kept = self._kept
        block = kept.number + 1 if kept is not None and kept.stop == position else self._about(position)
        while sum(self._before(block)) > position:
            block -= 1
        while sum(self._before(block + 1)) <= position:
            block += 1
        return block

    def _about(self, position: int) -> int:
        """About which block a position lies in, by how long documents are in the mean; never far behind it."""
        unit = self._shares.unit

        def documents(block: int) -> float:
            due = zip(self._shares.due(block), self._middles, strict=True)
            return sum(tokens / unit * middles.each for tokens, middles in due)

        if self._shares.are_constant:
            return int(position / documents(1))
        block, most = 0, self._shares.size * max(middles.each for middles in self._middles)
        while (more := int((position - documents(block)) / most)) > 0:  # so that no step is asked for that is far off
            block += more
        return block

    def _block(self, number: int) -> PlannedBlock:
        before, after = self._before(number), self._before(number + 1)
        unit, times = self._shares.unit, []
        for middles, *counts, (whole, parts), end in zip(
            self._middles, before, after, self._due(number), self._due(number + 1), strict=True
        ):
            lasts = (end[0] - whole) + (end[1] - parts) / unit
            since = (middles.between(*counts) - whole) - parts / unit
            times.append(since / (lasts or 1.0))
        sources = np.repeat(np.arange(len(times)), list(map(len, times)))
        turns = np.concatenate([np.arange(*counts) for counts in zip(before, after, strict=True)])
        order = np.argsort(np.concatenate(times), kind="stable")
        return PlannedBlock(number, sum(before), sum(after), sources[order], turns[order])


class _Middles:
    """Where the middles of an input's documents lie among its tokens, in half tokens.

    Attributes:
        tokens: of a pass.
        each: documents of a token, in the mean.
        label: what messages call the input.
    """

    def __init__(self, order: Order, count: int, lengths: Callable[[Places], Ints], label: str) -> None:
        self._order, self._count, self._lengths, self.label = order, count, lengths, label
        first, self.tokens = self._planned(0)
        self._kept = {0: first}
        self.each = count / self.tokens if self.tokens else 0.0

    def count_before(self, half_tokens: int) -> int:
        """How many documents have their middle before so many half tokens."""
        if not half_tokens:
            return 0
        if not self.tokens:
            raise OptionError(_empty(self.label))
        turn, rest = divmod(half_tokens, 2 * self.tokens)
        inside = int(np.searchsorted(self._of_pass(turn), rest)) if rest else 0
        return turn * self._count + inside

    def between(self, start: int, stop: int) -> Ints:
        """Where those of documents [start, stop) lie."""
        found, at = [np.empty(0, np.int64)], start
        while at < stop:
            turn, row = divmod(at, self._count)
            end = min(stop, (turn + 1) * self._count)
            found.append(self._of_pass(turn)[row : row + end - at] + 2 * self.tokens * turn)
            at = end
        return np.concatenate(found)

    def _of_pass(self, turn: int) -> Ints:
        kept = self._kept  # looked at once: other threads may want other passes
        if turn not in kept:
            found, tokens = self._planned(turn)
            if tokens != self.tokens:
                raise OptionError(
                    f"{self.label} has {tokens} tokens in pass {turn} and {self.tokens} in the first one: by tokens, "
                    "each pass has the same documents"
                )
            kept = self._kept = {**dict(list(kept.items())[1 - _KEPT_PASSES :]), turn: found}
        return kept[turn]

    def _planned(self, turn: int) -> tuple[Ints, int]:
        """(of the documents of a pass, its tokens)."""
        places = self._order.locate(np.arange(turn * self._count, (turn + 1) * self._count))
        lengths = self._lengths(places)
        ends = np.cumsum(lengths)
        return 2 * ends - lengths, int(ends[-1]) if len(ends) else 0


def _empty(label: str) -> str:
    return f"{label} has no tokens, and is to come: leave it out, or give it weight 0"
