"""Mixtures by tokens with known lengths: documents at positions follow from arithmetic.

Each input has a clock of its own: a document is due when the input's due tokens reach the middle of the document. So
the shares are exact within half a document of each input. A block is a stretch of tokens of all inputs together.

Everything here is part of order 1, and never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import OptionError
from headrace.plan.joined import BlockOrder, PlannedBlock
from headrace.plan.mixture import Shares
from headrace.plan.order import ENDLESS, Order, Places
from headrace.types import Ints

_KEPT_PASSES = 2  # per input: a block may span two


class TokenOrder(BlockOrder):
    """Several orders of documents mixed by shares of tokens.

    Args:
        inputs: Endless orders, which repeat when exhausted.
        counts: Documents of each until it repeats.
        lengths: For each input, a function from places to token counts of documents.

    Raises:
        OptionError: An input with a share has no tokens.
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
        """Return the half tokens of each input due before a block: (whole ones, parts of `unit`)."""
        return [divmod(2 * due, self._shares.unit) for due in self._shares.due(block)]

    def _before(self, block: int) -> list[int]:
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
        """Estimate the block of a position from the mean length; never far below."""
        unit = self._shares.unit

        def documents(block: int) -> float:
            due = zip(self._shares.due(block), self._middles, strict=True)
            return sum(tokens / unit * middles.each for tokens, middles in due)

        if self._shares.are_constant:
            return int(position / documents(1))
        block, most = 0, self._shares.size * max(middles.each for middles in self._middles)
        while (more := int((position - documents(block)) / most)) > 0:  # never requests weights far ahead
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
    """Middles of an input's documents among its tokens, in half tokens."""

    def __init__(self, order: Order, count: int, lengths: Callable[[Places], Ints], label: str) -> None:
        self._order, self._count, self._lengths, self.label = order, count, lengths, label
        first, self.tokens = self._planned(0)
        self._kept = {0: first}
        self.each = count / self.tokens if self.tokens else 0.0

    def count_before(self, half_tokens: int) -> int:
        """Return the number of documents whose middle is before this many half tokens."""
        if not half_tokens:
            return 0
        if not self.tokens:
            raise OptionError(_empty(self.label))
        turn, rest = divmod(half_tokens, 2 * self.tokens)
        inside = int(np.searchsorted(self._of_pass(turn), rest)) if rest else 0
        return turn * self._count + inside

    def between(self, start: int, stop: int) -> Ints:
        """Return the middles of documents [start, stop)."""
        found, at = [np.empty(0, np.int64)], start
        while at < stop:
            turn, row = divmod(at, self._count)
            end = min(stop, (turn + 1) * self._count)
            found.append(self._of_pass(turn)[row : row + end - at] + 2 * self.tokens * turn)
            at = end
        return np.concatenate(found)

    def _of_pass(self, turn: int) -> Ints:
        kept = self._kept  # read once: another thread may replace it
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
        places = self._order.locate(np.arange(turn * self._count, (turn + 1) * self._count))
        lengths = self._lengths(places)
        ends = np.cumsum(lengths)
        return 2 * ends - lengths, int(ends[-1]) if len(ends) else 0


def _empty(label: str) -> str:
    return f"{label} has no tokens, and is to come: leave it out, or give it weight 0"
