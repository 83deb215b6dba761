"""Operators on samples. Each is a plain value until a loader runs it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from headrace._util import check
from headrace._util.check import is_time
from headrace._util.functions import is_async
from headrace.formats.columns import SampleColumns
from headrace.formats.decoders import Decoder
from headrace.ops.bucket import EvenBatcher
from headrace.ops.select import Selection
from headrace.types import Batcher
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.order.packing import Packing


class Compiles(Protocol):
    """A compiler of operators on samples. Each operator calls the method of its kind."""

    def add_each(self, operator: EachSample) -> None: ...

    def add_batch(self, operator: Batch) -> None: ...

    def add_group(self, operator: GroupOperator) -> None: ...


class Operator(ABC):
    """An operation on the samples of a data set."""

    __slots__ = ()

    @property
    @abstractmethod
    def text(self) -> str:
        """The call, for display."""

    @property
    def where(self) -> str:
        return "workers"

    @property
    def is_implied(self) -> bool:
        """True if the source implies it, and no user wrote it."""
        return False

    @property
    def fork(self) -> str | None:
        """Name of the fork whose branch it starts. None: no fork."""
        return None

    @abstractmethod
    def count(self, count: int) -> int:
        """Return the number of samples (or batches) that result from `count`."""

    @abstractmethod
    def add_to(self, compiler: Any) -> None:
        """Call the compiler's method for this kind of operator."""

    def collated(self, fn: Callable[[list[Any]], object]) -> Operator | None:  # noqa: ARG002
        """Return the operator with batches collated by `fn`. None: no batches, or its own collation."""
        return None

    @property
    def whole(self) -> Operator | None:
        """The operator without a short last batch. None: an earlier operator makes the batches."""
        return None

    def behind(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Return `operators` with this one appended."""
        return (*operators, self)


@dataclass(frozen=True, slots=True)
class EachSample(Operator):
    """A step for each sample, with details for optimizations.

    Attributes:
        decoder: Decoder of fields, if the step only decodes field by field.
        selection: The selection, if the step only selects fields.
        keeps_key: Predicate, if the step is a filter by a plain function of the sample's key.
        opens: True if the step decodes the block of a sample.
        opens_fields: True if the step then decodes each field separately.
        asks: Fields that the step needs, whatever is selected later.
        names_source: True if the step only adds the name of a sample's source in a mixture.
        columns: Applies the step to whole row tables, if it is the only step.
        is_collate: True if the step makes a batch of a list of samples.
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
        return count

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_each(self)

    @property
    def whole(self) -> Operator | None:
        return self if self.is_unbatch or self.is_collate else None

    def behind(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Append the step, or set it as collation of the batches before it if possible."""
        batch = operators[-1].collated(self.step.fn) if self.is_collate and operators else None
        return (*operators, self) if batch is None else (*operators[:-1], batch)


@dataclass(frozen=True, slots=True)
class Batch(Operator):
    """Batches of `size` samples. `collate` None: the loader's collation, or the default."""

    size: int
    drop_last: bool
    collate: Callable[[list[Any]], object] | None = None
    name: str = "batch"

    @property
    def text(self) -> str:
        return f"{self.name}({self.size})"

    def count(self, count: int) -> int:
        return count // self.size if self.drop_last else -(-count // self.size)

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_batch(self)

    def collated(self, fn: Callable[[list[Any]], object]) -> Batch | None:
        return replace(self, collate=fn) if self.collate is None else None

    @property
    def whole(self) -> Batch:
        return replace(self, drop_last=True)

    def within(self, max_wait_s: float) -> GroupOperator:
        """Return the operator with a maximum waiting time. OptionError if it is invalid."""
        if not is_time(max_wait_s):
            raise check.invalid(f".{self.name}({self.size}): max_wait_s", max_wait_s, "a number of seconds above 0")
        name = f"{self.name}({self.size}, max_wait_s={max_wait_s:g})"
        group = replace(self.on_the_way, name=name, makes_batches=True, max_wait_s=float(max_wait_s))
        return group.whole if self.drop_last else group

    @property
    def on_the_way(self) -> GroupOperator:
        """The grouping to use if more than functions of batches follows."""
        last = ", drop_last=True" if self.drop_last else ""
        batcher = functools.partial(EvenBatcher, self.size, drop_last=self.drop_last)
        return GroupOperator(f"{self.name}({self.size}{last})", batcher, collate=self.collate)


@dataclass(frozen=True, slots=True)
class GroupOperator(Operator):
    """Groups samples. Each group is one sample of the following steps.

    Attributes:
        batcher: Creates the batcher of a group. None: row packing.
        measure: Returns a number for a sample; runs in a worker. None: 1.
        collate: Combines a group's samples; runs in a worker. None: the default collation.
        makes_batches: True if a loader delivers the groups as batches.
        without_short: The operator without a short last batch. None: not available.
        max_wait_s: Seconds that the first sample of a group waits for others. None: unlimited.
        passed: The operators up to this one, for errors.
    """

    name: str
    batcher: Callable[[], Batcher] | None
    measure: Callable[[Any], int] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    makes_batches: bool = False
    without_short: GroupOperator | None = None
    packing: Packing | None = None
    is_shardable: bool = True
    max_wait_s: float | None = None
    passed: str = ""

    @property
    def text(self) -> str:
        return self.name

    def collated(self, fn: Callable[[list[Any]], object]) -> GroupOperator | None:
        """Set the collation of batches with a maximum wait. Other groups have their own."""
        return replace(self, collate=fn) if self.max_wait_s is not None and self.collate is None else None

    @property
    def whole(self) -> GroupOperator:
        if self.max_wait_s is not None:
            raise check.conflict("drop_last=True", f".{self.name}", "batches that time has cut are short, too")
        return self.without_short or self

    def count(self, count: int) -> int:
        raise TypeError(f"how many groups .{self.name} makes of {count} samples is known only later")

    def add_to(self, compiler: Compiles) -> None:
        compiler.add_group(self)


def counted(count: int, operators: Iterable[Operator]) -> int:
    """Return the number of samples (or batches) that `operators` make of `count` samples."""
    for operator in operators:
        count = operator.count(count)
    return count
