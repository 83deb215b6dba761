"""What can be done to the samples of a data set; each operator is a plain value until a loader runs it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.datasets.operators.batchers import EvenBatcher
from headrace.datasets.operators.fields import Selection
from headrace.errors import OptionError
from headrace.formats.columns import SampleColumns
from headrace.formats.values import Decoder
from headrace.functions import is_async
from headrace.numbers import is_time
from headrace.plan.lane_packing import LanePacking
from headrace.tasks import Step
from headrace.types import Batcher


class Compiles(Protocol):
    """Takes operators on samples in, one after the other: each says what it is by what it calls."""

    def add_each(self, operator: EachSample) -> None: ...

    def add_batch(self, operator: Batch) -> None: ...

    def add_group(self, operator: GroupOperator) -> None: ...


class Operator(ABC):
    """What can be done to the samples of a data set."""

    __slots__ = ()

    @property
    @abstractmethod
    def text(self) -> str:
        """The call, as it is shown."""

    @property
    def where(self) -> str:
        """Where it is carried out."""
        return "workers"

    @property
    def is_implied(self) -> bool:
        """Whether it follows from the source, and nobody wrote it."""
        return False

    @property
    def fork(self) -> str | None:
        """Which fork it begins a branch of; None: of none."""
        return None

    @abstractmethod
    def count(self, count: int) -> int:
        """How many samples (or batches) come of `count`."""

    @abstractmethod
    def add_to(self, compiler: Any) -> None:
        """Have it compiled as what it is: the compiler has a method for each kind."""

    def collated(self, fn: Callable[[list[Any]], object]) -> Operator | None:  # noqa: ARG002
        """The same, its batches made by `fn`; None: it makes none, or says itself how."""
        return None

    @property
    def whole(self) -> Operator | None:
        """The same without a short last batch; None: the batches that are delivered are an earlier one's."""
        return None

    def behind(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """All of them, this one last."""
        return (*operators, self)


@dataclass(frozen=True, slots=True)
class EachSample(Operator):
    """A step for each sample, and what is known of it besides.

    Attributes:
        decoder: what decodes fields, each by itself, if that is what the step does.
        selection: what gives some fields alone, if that is what it does.
        keeps_key: what a filter asks, if it asks for nothing but a sample's key, and no coroutine answers.
        opens: whether it opens the block that a sample lies in.
        opens_fields: whether it opens each field by itself then.
        asks: the fields that it needs whatever is selected behind it.
        names_source: whether it says which source of a mixture a sample is of, and does nothing else.
        is_unbatch: whether it takes batches apart.
        columns: does what the step does for whole row tables, where it is the only one.
        is_collate: whether it makes a batch of samples that lie in a list.
    """

    step: Step
    decoder: Decoder | None = None
    selection: Selection | None = None
    keeps_key: Callable[[str], object] | None = None
    opens: bool = False
    opens_fields: bool = False
    asks: tuple[str, ...] = ()
    names_source: bool = False
    is_unbatch: bool = False
    columns: SampleColumns | None = None
    is_collate: bool = False

    @property
    def text(self) -> str:
        return self.step.name

    @property
    def where(self) -> str:
        return "event loop" if is_async(self.step.fn) else "workers"

    @property
    def is_implied(self) -> bool:
        return self.step.is_implied

    def count(self, count: int) -> int:
        """As many, where it gives one for each."""
        return count

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_each(self)

    @property
    def whole(self) -> Operator | None:
        return self if self.is_unbatch or self.is_collate else None

    def behind(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Batches are collated by what makes them, where that can."""
        batch = operators[-1].collated(self.step.fn) if self.is_collate and operators else None
        return (*operators, self) if batch is None else (*operators[:-1], batch)


@dataclass(frozen=True, slots=True)
class Batch(Operator):
    """`size` samples make a batch.

    Attributes:
        collate: makes the batch of them; None: what the loader says, or the default collation.
        name: what it is shown as, without its size.
    """

    size: int
    drop_last: bool
    collate: Callable[[list[Any]], object] | None = None
    name: str = "batch"

    @property
    def text(self) -> str:
        return f"{self.name}({self.size})"

    def count(self, count: int) -> int:
        """How many batches come of so many samples."""
        return count // self.size if self.drop_last else -(-count // self.size)

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_batch(self)

    def collated(self, fn: Callable[[list[Any]], object]) -> Batch | None:
        return replace(self, collate=fn) if self.collate is None else None

    @property
    def whole(self) -> Batch:
        return replace(self, drop_last=True)

    def within(self, max_wait_s: float) -> GroupOperator:
        """The same, but samples wait for others no longer than this.

        Raises:
            OptionError: it is no time, or short batches are to be left out.
        """
        if not is_time(max_wait_s):
            raise OptionError(f".{self.name}({self.size}, {max_wait_s=}): seconds are needed, a number of more than 0")
        name = f"{self.name}({self.size}, max_wait_s={max_wait_s:g})"
        group = replace(self.on_the_way, name=name, makes_batches=True, max_wait_s=float(max_wait_s))
        return group.whole if self.drop_last else group

    @property
    def on_the_way(self) -> GroupOperator:
        """What it is where more follows than functions of batches."""
        last = ", drop_last=True" if self.drop_last else ""
        batcher = functools.partial(EvenBatcher, self.size, drop_last=self.drop_last)
        return GroupOperator(f"{self.name}({self.size}{last})", batcher, collate=self.collate)


@dataclass(frozen=True, slots=True)
class GroupOperator(Operator):
    """Samples become groups, each of which is one sample of what follows.

    Attributes:
        name: the call, as it is shown, and as states name it.
        batcher: begins what finds a group; None: lanes do.
        measure: gives a number of a sample, in a worker; None: it is 1.
        collate: makes one of a group's samples, in a worker; None: the default collation.
        makes_batches: whether what it makes is what a loader delivers.
        without_short: the same without a short last batch; None: there is no such thing.
        packing: how documents are packed in lanes, if it does that.
        is_shardable: whether ranks may each do it to samples of their own.
        max_wait_s: how long the first sample of a group waits for others; None: as long as it takes.
        passed: the operators up to this one, for errors.
    """

    name: str
    batcher: Callable[[], Batcher] | None
    measure: Callable[[Any], int] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    makes_batches: bool = False
    without_short: GroupOperator | None = None
    packing: LanePacking | None = None
    is_shardable: bool = True
    max_wait_s: float | None = None
    passed: str = ""

    @property
    def text(self) -> str:
        return self.name

    def collated(self, fn: Callable[[list[Any]], object]) -> GroupOperator | None:
        """Batches that time may cut are collated as others are; other groups say how themselves."""
        return replace(self, collate=fn) if self.max_wait_s is not None and self.collate is None else None

    @property
    def whole(self) -> GroupOperator:
        if self.max_wait_s is not None:
            raise OptionError(
                f"drop_last=True and .{self.name}: batches that time has cut have fewer samples, too: leave one of "
                "drop_last and max_wait_s out"
            )
        return self.without_short or self

    def count(self, count: int) -> int:
        """Refused: that is known only later."""
        raise TypeError(f"how many groups .{self.name} makes of {count} samples is known only later")

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_group(self)


def counted(count: int, operators: Iterable[Operator]) -> int:
    """The number of samples (or batches) that `operators` make of `count` samples."""
    for operator in operators:
        count = operator.count(count)
    return count
