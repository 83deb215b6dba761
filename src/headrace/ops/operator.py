"""The base classes of operators. An operator is a plain value until a loader runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace._util import check
from headrace._util.functions import is_async
from headrace.errors import FormatError, masked
from headrace.types import Batcher
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.formats.decoders import Decoder, SampleColumns
    from headrace.ops.select import Selection
    from headrace.ops.shuffle import Shuffle
    from headrace.order.orders import Order
    from headrace.order.packing import Packing
    from headrace.pipeline.compile import PipelineBuilder


SampleFunction = Callable[[Any], Any]
"""A function of a sample, or of a field. A coroutine function runs on the event loop."""


class Operator(ABC):
    """An operation on the samples of a data set."""

    __slots__ = ()
    keeps_key: Callable[[str], object] | None = None  # see `EachSample`

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
    def is_step(self) -> bool:
        """True if it processes single samples."""
        return False

    @property
    def is_of_user(self) -> bool:
        """True if it runs a function of the user's, and does not only count or split samples."""
        return False

    @property
    def fork(self) -> str | None:
        """Name of the fork whose branch it starts. None: no fork."""
        return None

    def count(self, count: int) -> int:
        """Return the number of samples (or batches) that result from `count`."""
        return count

    @abstractmethod
    def add_to(self, builder: PipelineBuilder) -> None:
        """Add the operator to a pipeline. OptionError if it cannot follow the operators before it."""

    def collated(self, fn: Callable[[list[Any]], object]) -> Operator | None:
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

    is_step = True
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

    @property
    def is_field_wise(self) -> bool:
        """True if a later selection of fields also holds before the step."""
        return self.decoder is not None or self.names_source or self.opens_fields

    @property
    def is_of_user(self) -> bool:
        return not (self.is_unbatch or self.step.is_numbered or self.is_implied)

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.add_each(self)

    @property
    def whole(self) -> Operator | None:
        return self if self.is_unbatch or self.is_collate else None

    def behind(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Append the step, or set it as collation of the batches before it if possible."""
        batch = operators[-1].collated(self.step.fn) if self.is_collate and operators else None
        return (*operators, self) if batch is None else (*operators[:-1], batch)

    def narrowed(self, selection: Selection) -> EachSample | None:
        """Return a field-wise step, reduced to a later selection. None: nothing remains to do."""
        if self.opens_fields:
            return self
        if self.decoder is None:
            return self if selection.names_source else None
        decoder = self.decoder.only(frozenset().union(*selection.wanted))
        return replace(self, decoder=decoder, step=replace(self.step, fn=decoder))


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

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.add_group(self)


class OrderOperator(Operator):
    """Decides which of the source's samples occur, or when. Nothing is read for it."""

    __slots__ = ()
    is_steady = False  # True if the order is the same in every epoch, whatever the seed

    @property
    def in_epoch(self) -> EpochOperator | None:
        """The operator itself, if it sets the number of passes."""
        return None

    @property
    def limit(self) -> int | None:
        """Maximum number of samples. None: not set."""
        return None

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
    needs_numbers = True

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
    def is_fixed(self) -> bool:
        """True if repeated calls give the same order."""
        return True

    @property
    def shuffle(self) -> Shuffle | None:
        """The operator itself, if it permutes samples."""
        return None

    def seed_or(self, loaders: int) -> int:
        return loaders

    @abstractmethod
    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        """Return the order derived from another one. `key` is (seed, epoch, pass)."""

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.add_order(self)


class EpochOperator(OrderOperator):
    """Sets the number of passes over the samples in an epoch."""

    __slots__ = ()
    is_steady = True

    @property
    def in_epoch(self) -> EpochOperator:
        return self

    @property
    @abstractmethod
    def passes(self) -> tuple[int | None, int | None]:
        """Number of passes, and sample limit over all of them. None: unlimited."""


def counted(count: int, operators: Iterable[Operator]) -> int:
    """Return the number of samples (or batches) that `operators` make of `count` samples."""
    for operator in operators:
        count = operator.count(count)
    return count


# Fields of samples.


def field_of(sample: Any, field: str | int) -> Any:
    """Return one field of a dict, or one position of a tuple."""
    if isinstance(sample, dict):
        return sample[find_field(sample, str(field))]
    try:
        return sample[field]
    except TypeError as error:
        error.add_note(
            f"field={field!r} of a sample that is a {type(sample).__name__}: tuples have them by their places"
        )
        raise


def with_field(sample: Any, field: str | int, value: object, into: str | None = None) -> object:
    """Return the sample with a field replaced and, if fields have names, renamed to `into`."""
    if not isinstance(sample, dict):
        items = list(sample)
        items[int(field)] = value
        return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)
    name = find_field(sample, str(field))
    if into in (None, name):
        return {**sample, name: value}
    if into in sample:
        raise ValueError(f"the sample has a field {into!r} already: give another name by into=")
    return {**{other: given for other, given in sample.items() if other != name}, into: value}


def find_field(sample: dict[str, Any], names: str, stage: str = "to_tuple") -> str:
    """Return the first of `names` (separated by ";") that the sample has."""
    if not hasattr(sample, "keys"):
        raise TypeError(f"the sample is a {type(sample).__name__}, whose fields have no names: {names!r}")
    for name in names.split(";"):
        if name in sample:
            return name
    key, url = sample.get("__key__"), sample.get("__url__")
    have = ", ".join(sorted(str(name) for name in sample if not str(name).startswith("__"))) or "none"
    wanted = " or ".join(map(repr, names.split(";")))
    raise FormatError(
        f"sample {key!r} of {masked(str(url))} has no field {wanted}; its fields are: {have}",
        stage=stage,
        key=key,
        url=url,
    )


def with_source(sample: object, name: str) -> object:
    """Add the name of the source to a sample that is a dict."""
    return {**sample, "__source__": name} if isinstance(sample, dict) else sample
