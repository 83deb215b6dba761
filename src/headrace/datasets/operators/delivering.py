"""Operators that say how a loader delivers what comes out of a stream: nothing is done to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from headrace.datasets.operators.values import Operator
from headrace.errors import OptionError


@dataclass(frozen=True, slots=True)
class Delivering:
    """How what comes out of a stream is delivered.

    Attributes:
        prefetch: how many of these are made ahead at most; None: the loader says it.
        is_everywhere: whether every rank gets all samples.
    """

    prefetch: int | None = None
    is_everywhere: bool = False


NOTHING_SAID = Delivering()


class CompilesDelivering(Protocol):
    """Takes such operators in."""

    def add_delivering(self, operator: DeliveryOperator) -> None: ...


class DeliveryOperator(Operator):
    """Says how a loader delivers what comes out of a stream."""

    __slots__ = ()

    @property
    def where(self) -> str:
        return "loader"

    def count(self, count: int) -> int:
        return count

    def of(self, before: Delivering) -> Delivering:
        """What it makes of what was said before it."""
        raise NotImplementedError

    def add_to(self, compiler: CompilesDelivering) -> None:
        compiler.add_delivering(self)


@dataclass(frozen=True, slots=True)
class Prefetch(DeliveryOperator):
    """So many are made ahead at most."""

    most: int

    @property
    def text(self) -> str:
        return f"prefetch({self.most})"

    def of(self, before: Delivering) -> Delivering:
        if before.prefetch is not None:
            raise OptionError(f".{self.text} behind .prefetch({before.prefetch}): say it once")
        return replace(before, prefetch=self.most)


@dataclass(frozen=True, slots=True)
class OnEveryRank(DeliveryOperator):
    """Ranks do not divide the samples."""

    @property
    def text(self) -> str:
        return "on_every_rank()"

    def of(self, before: Delivering) -> Delivering:
        return replace(before, is_everywhere=True)
