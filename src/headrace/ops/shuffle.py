"""Operators that decide which samples occur, and in which order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from headrace.ops.operator import Operator
from headrace.order import FirstOf, Order, ShuffledOrder
from headrace.order.orders import ENDLESS
from headrace.workers.tasks import Step


class CompilesOrder(Protocol):
    """A compiler of operators on the order. Each operator calls the method of its kind."""

    def add_order(self, operator: PassOperator) -> None: ...

    def add_shuffle(self, operator: Shuffle) -> None: ...

    def add_take(self, operator: Take) -> None: ...

    def add_repeat(self, operator: Repeat) -> None: ...

    def add_epoch(self, operator: EpochSize) -> None: ...


class OrderOperator(Operator):
    """Decides which of the source's samples occur, or when. Nothing is read for it."""

    __slots__ = ()
    is_steady = False  # True if the order is the same in every epoch, whatever the seed
    is_bound = False  # True if it sets a maximum number of samples

    @property
    def where(self) -> str:
        return "plan"

    @property
    def in_state(self) -> str:
        """Text in a state. Different texts mean different orders."""
        return self.text


class PassOperator(OrderOperator):
    """Derives an order from another one, in each pass over the samples."""

    __slots__ = ()
    is_constant = False  # True if, when fixed, it selects the same in each pass
    is_ascending = False  # True if it keeps the order of the samples

    @property
    def is_behind_filters(self) -> bool:
        """True if its result is the same before and after a filter."""
        return True

    @property
    def by_number(self) -> tuple[Step, int | None] | None:
        """(step that selects samples by their numbers, their maximum number), for samples that others were made of.

        None: it must know all samples.
        """
        return None

    @property
    def needs_numbers(self) -> bool:
        return True

    @property
    def is_fixed(self) -> bool:
        """True if repeated calls give the same order."""
        return True

    def seed_or(self, loaders: int) -> int:
        return loaders

    @abstractmethod
    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Return the order derived from another one. `key` is (seed, epoch, pass)."""

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_order(self)


class EpochOperator(OrderOperator):
    """Sets the number of passes over the samples in an epoch."""

    __slots__ = ()
    is_steady = True

    @property
    @abstractmethod
    def passes(self) -> tuple[int | None, int | None]:
        """Number of passes, and sample limit over all of them. None: unlimited."""


@dataclass(frozen=True, slots=True)
class Shuffle(PassOperator):
    """Permutes samples. All kinds but "buffer" go by position."""

    by: str
    window: int | None
    seed: int | None
    buffer: int | None = None

    @property
    def text(self) -> str:
        return f"shuffle({self.by})"

    @property
    def needs_numbers(self) -> bool:
        return False  # readers shuffle samples without numbers, and name that shuffle in states

    def count(self, count: int) -> int:
        return count

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Permute all samples. Readers handle shuffles of shards and of windows."""
        return ShuffledOrder(order, key)

    @property
    def keeps_position(self) -> bool:
        """True if a sample's position determines which sample it is."""
        return self.by != "buffer"

    def seed_or(self, loaders: int) -> int:
        return loaders if self.seed is None else self.seed

    def in_words(self, by: str, sizes: str = "") -> str:
        """Return the text in a state for a shuffle of this kind."""
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"shuffle({by}{sizes}{seed})"

    def add_to(self, compiler: CompilesOrder) -> None:
        compiler.add_shuffle(self)


@dataclass(frozen=True, slots=True)
class Take(PassOperator):
    is_constant = is_steady = is_bound = is_ascending = True
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
