"""Operators that set how a loader delivers a stream's results, without changing them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from headrace._util import check
from headrace.ops.operator import Operator


@dataclass(frozen=True, slots=True)
class Delivering:
    """How a stream's results are delivered.

    Attributes:
        prefetch: Maximum number of results made ahead. None: the loader decides.
        is_everywhere: True if every rank gets all samples.
    """

    prefetch: int | None = None
    is_everywhere: bool = False


NOTHING_SAID = Delivering()


class CompilesDelivering(Protocol):
    def add_delivering(self, operator: DeliveryOperator) -> None: ...


class DeliveryOperator(Operator):
    """Sets how a loader delivers a stream's results."""

    __slots__ = ()

    @property
    def where(self) -> str:
        return "loader"

    def count(self, count: int) -> int:
        return count

    def of(self, before: Delivering) -> Delivering:
        """Return the settings after this operator, given those before it."""
        raise NotImplementedError

    def add_to(self, compiler: CompilesDelivering) -> None:
        compiler.add_delivering(self)


@dataclass(frozen=True, slots=True)
class Prefetch(DeliveryOperator):
    most: int

    @property
    def text(self) -> str:
        return f"prefetch({self.most})"

    def of(self, before: Delivering) -> Delivering:
        if before.prefetch is not None:
            raise check.conflict(f".prefetch({before.prefetch})", f".{self.text}")
        return replace(before, prefetch=self.most)


@dataclass(frozen=True, slots=True)
class OnEveryRank(DeliveryOperator):
    @property
    def text(self) -> str:
        return "on_every_rank()"

    def of(self, before: Delivering) -> Delivering:
        return replace(before, is_everywhere=True)
