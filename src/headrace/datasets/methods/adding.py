"""What operators are put behind, and how many samples come of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from headrace.datasets.operators.values import Operator

S = TypeVar("S")  # a stream


class AddsOperators(Generic[S]):
    """A data set that operators can be put behind."""

    def _with(self, operator: Operator) -> S:
        raise NotImplementedError


def counted(count: int, operators: Iterable[Operator]) -> int:
    """How many samples (or batches) come of `count`."""
    for operator in operators:
        count = operator.count(count)
    return count
