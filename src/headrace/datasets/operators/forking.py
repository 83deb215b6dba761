"""Branches of a stream: what marks one, and what gives each of them a sample of its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from headrace.datasets.operators.values import Operator


@dataclass(frozen=True, slots=True)
class Branch(Operator):
    """Marks what follows as one of several branches of the stream before; by itself it changes nothing.

    Attributes:
        name: of the fork that it is of: no two have the same, in any process.
        number: which of its branches.
        branches: how many it has.
    """

    name: str
    number: int
    branches: int

    @property
    def text(self) -> str:
        return f"fork({self.branches})[{self.number}]"

    @property
    def fork(self) -> str:
        return self.name

    @property
    def where(self) -> str:
        return "plan"

    def count(self, count: int) -> int:
        return count

    def add_to(self, compiler: Any) -> None:
        """Nothing is done."""


class Copies:
    """As many of a sample as there are branches: what one of them changes in place no other one sees.

    Args:
        count: of the branches.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, sample: object) -> tuple[object, ...]:
        try:
            return (*(copy.deepcopy(sample) for _ in range(self._count - 1)), sample)
        except Exception as error:
            error.add_note(f"fork: the sample, a {type(sample).__name__}, cannot be copied for each branch")
            raise
