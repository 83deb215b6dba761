"""An operator as a package of somebody else would have it: batches, in order, of so many tokens at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import headrace as hr


class Budget:
    """Samples in order, as long as they have no more tokens than `most`; a longer one is a batch by itself."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens, self.offered = most, 0, 0

    def offer(self, measure: int) -> Sequence[int]:
        self.tokens += measure
        self.offered += 1
        is_over = self.tokens > self.most and self.offered > 1
        return range(self.offered - 1) if is_over else ()

    def end(self) -> Sequence[int]:
        return range(self.offered)


class Tokens:
    """How many there are in a sample: a field's number, or its length."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __call__(self, sample: dict[str, Any]) -> int:
        tokens = sample[self.field]
        return len(tokens) if isinstance(tokens, str | list) else int(tokens)


def token_batches(most: int = 9, field: str = "n") -> hr.BatchOp:
    """Batches of `most` tokens in all, as lists of samples."""
    return hr.BatchOp(batcher=lambda: Budget(most), measure=Tokens(field))


hr.register_operator("token_batches", token_batches)
