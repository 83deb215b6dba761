"""Branches of a stream: their marker, and copies of samples for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from headrace.ops.operator import Operator


@dataclass(frozen=True, slots=True)
class Branch(Operator):
    """Marks the following operators as a branch of the fork with a unique name. Changes nothing."""

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

    def add_to(self, compiler: Any) -> None: ...


class Copies:
    """Copies a sample for each branch, so that changes in place stay within a branch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, sample: object) -> tuple[object, ...]:
        try:
            return (*(copy.deepcopy(sample) for _ in range(self._count - 1)), sample)
        except Exception as error:
            error.add_note(f"fork: the sample, a {type(sample).__name__}, cannot be copied for each branch")
            raise
