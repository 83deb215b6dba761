"""`.repeat()` and `.epoch()`: the passes over the samples in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from headrace._util import check
from headrace.ops.operator import EpochOperator
from headrace.order.orders import ENDLESS
from headrace.pipeline.pipeline import Ordering, refusal

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream
    from headrace.pipeline.compile import PipelineBuilder


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

    def add_to(self, builder: PipelineBuilder) -> None:
        if not builder.order.is_endless:
            builder.add_to_order(self)


@dataclass(frozen=True, slots=True)
class EpochSize(EpochOperator):
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

    @property
    def limit(self) -> int:
        return self.samples

    def count(self, count: int) -> int:
        return self.samples

    def add_to(self, builder: PipelineBuilder) -> None:
        """Set the passes of the plan, or limit samples that are counted as they come."""
        samples = self.samples * builder.batch_size
        if builder.order.is_endless:
            builder.order = Ordering(builder.order.operators[:-1])  # this operator repeats as needed
        if builder.is_counted:
            builder.add_to_order(replace(self, samples=samples))
            return
        builder.limit_samples(samples)
        if builder.source.traits.iterated:
            builder.is_given = True
        elif builder.order.operators or not builder.source.is_endless:
            builder.add_to_order(Repeat(None))


def repeat(stream: Stream, n: int | None) -> Stream:
    check.whole_or_none(".repeat(): n", n, 1)
    return _in_passes([stream], operator=Repeat(n))


def epoch(stream: Stream, samples: int) -> Stream:
    return _in_passes([stream], operator=EpochSize(check.whole(".epoch(): samples", samples, 1)))


def _in_passes(inputs: Sequence[Stream], *, operator: EpochOperator) -> Stream:
    """Repeat by the order of the source if possible, else pass by pass."""
    (stream,) = inputs
    pipeline, (times, samples) = stream.pipeline(), operator.passes
    is_regrouped = bool(pipeline.regroups) or pipeline.group is not None or pipeline.source.traits.iterated
    if not pipeline.is_in_passes and (samples is not None or not is_regrouped):
        return stream._with(operator)
    if pipeline.packing is not None:
        raise refusal("passes", f".{operator.text}", f".{pipeline.packing.text}")
    from headrace.dataset.stream import Stream
    from headrace.ops.inputs import TurnsDataset, check_within, one_after_the_other

    check_within("", pipeline, f".{operator.text}")
    again = partial(_in_passes, operator=operator)
    passes = Stream(TurnsDataset("repeat", [stream], one_after_the_other, again, arguments=(str(times),), times=times))
    return passes if samples is None else passes._with(operator)
