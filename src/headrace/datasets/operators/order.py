"""Operators that decide which samples come, and in which order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from headrace.datasets.operators.values import Operator
from headrace.plan import FirstOf, Order, ShuffledOrder
from headrace.plan.order import ENDLESS


class CompilesOrder(Protocol):
    """Takes operators on the order in, one after the other: each says what it is by what it calls."""

    def add_order(self, operator: PassOperator) -> None: ...

    def add_shuffle(self, operator: Shuffle) -> None: ...

    def add_take(self, operator: Take) -> None: ...

    def add_repeat(self, operator: Repeat) -> None: ...

    def add_epoch(self, operator: EpochSize) -> None: ...


class OrderOperator(Operator):
    """Decides which of the source's samples come, or when; nothing is read for that."""

    __slots__ = ()
    is_steady = False  # whether it gives the same order in every epoch, whatever the seed
    is_bound = False  # whether it says itself how many samples it leaves at most

    @property
    def where(self) -> str:
        return "plan"

    @property
    def in_state(self) -> str:
        """What a state says of it: another text is another order."""
        return self.text


class PassOperator(OrderOperator):
    """Makes another order of one, in each pass over the samples."""

    __slots__ = ()
    is_constant = False  # whether it gives the same of the same samples in each pass, where it is fixed

    @property
    def is_behind_filters(self) -> bool:
        """Whether it says the same of the source's samples as of those that a filter has left."""
        return True

    @property
    def needs_numbers(self) -> bool:
        """Whether samples must have numbers before they are read."""
        return True

    @property
    def is_fixed(self) -> bool:
        """Whether it gives the same order each time that it is asked."""
        return True

    def seed_or(self, loaders: int) -> int:
        """The seed of what it draws: its own, or else the loader's."""
        return loaders

    @abstractmethod
    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """The order that comes of another one.

        Args:
            key: of the seed, of the epoch and the pass.
        """

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_order(self)


class EpochOperator(OrderOperator):
    """Says how many passes over the samples an epoch is made of."""

    __slots__ = ()
    is_steady = True

    @property
    @abstractmethod
    def passes(self) -> tuple[int | None, int | None]:
        """(how many passes, how many samples are left of these); None: any number."""


@dataclass(frozen=True, slots=True)
class Shuffle(PassOperator):
    """Another order; it keeps positions, but for "buffer"."""

    by: str
    window: int | None
    seed: int | None
    buffer: int | None = None

    @property
    def text(self) -> str:
        return f"shuffle({self.by})"

    @property
    def needs_numbers(self) -> bool:
        return False  # how samples without are shuffled is said by who reads them, and so is what states say of it

    def count(self, count: int) -> int:
        return count

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Samples are exchanged with any others; whole shards and windows are who reads them's business."""
        return ShuffledOrder(order, key)

    @property
    def keeps_position(self) -> bool:
        """Whether it follows from a sample's position which one it is."""
        return self.by != "buffer"

    def seed_or(self, loaders: int) -> int:
        return loaders if self.seed is None else self.seed

    def in_words(self, by: str, sizes: str = "") -> str:
        """What a state says of it, where it is done in this way."""
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"shuffle({by}{sizes}{seed})"

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_shuffle(self)


@dataclass(frozen=True, slots=True)
class Take(PassOperator):
    """The first `samples` only."""

    is_constant = is_steady = is_bound = True
    samples: int

    @property
    def text(self) -> str:
        return f"take({self.samples})"

    @property
    def needs_numbers(self) -> bool:
        return False

    def count(self, count: int) -> int:
        return min(count, self.samples)

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:  # noqa: ARG002
        return FirstOf(order, self.samples)

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_take(self)


@dataclass(frozen=True, slots=True)
class Repeat(EpochOperator):
    """All samples several times, each time in another order where they are shuffled; None: without end."""

    times: int | None

    @property
    def text(self) -> str:
        return f"repeat({self.times})"

    @property
    def passes(self) -> tuple[int | None, int | None]:
        return self.times, None

    def count(self, count: int) -> int:
        return (ENDLESS if count else 0) if self.times is None else count * self.times

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_repeat(self)


@dataclass(frozen=True, slots=True)
class EpochSize(EpochOperator):
    """Epochs of so many samples, whatever the data set has: it is begun again, or left, where they are full."""

    is_bound = True
    samples: int

    @property
    def text(self) -> str:
        return f"epoch(samples={self.samples})"

    @property
    def in_state(self) -> str:
        return f"epochof({self.samples})"

    @property
    def passes(self) -> tuple[int | None, int | None]:
        return None, self.samples

    def count(self, count: int) -> int:  # noqa: ARG002
        return self.samples

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_epoch(self)
