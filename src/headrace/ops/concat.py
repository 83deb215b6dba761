"""`.concat()`: streams one after another."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dataset.stream import Stream
from headrace.ops.combined import CombinedSpec, combined, streams_of
from headrace.ops.inputs import in_turns, one_after_the_other
from headrace.order.combined import ConcatOrder
from headrace.order.orders import ENDLESS, Order
from headrace.pipeline.pipeline import refusal


def concat(inputs: Sequence[object]) -> Stream:
    streams = streams_of("concat", inputs)
    return in_turns("concat", streams, one_after_the_other, concat) or combined(ConcatSpec(streams).checked())


class ConcatSpec(CombinedSpec):
    kind = "concat"
    is_in_turn = True

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__(streams)
        for label, pipeline in zip(self.labels[:-1], self.pipelines, strict=False):
            if pipeline.is_endless:
                raise refusal("end", self.call, label)

    @property
    def is_endless(self) -> bool:
        return self.pipelines[-1].is_endless

    @property
    def is_in_order(self) -> bool:
        return not any(one.order.operators or one.keeps or not one.source.is_in_order for one in self.pipelines)

    @property
    def count(self) -> int:
        return min(ENDLESS, sum(self.sizes))

    @property
    def full_count(self) -> int | None:
        passes = self._passes_of_endless()
        return None if passes is None else sum(self.sizes[:-1]) + sum(passes)

    @property
    def shares(self) -> Sequence[int] | None:
        return None

    def arrange(
        self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int
    ) -> ConcatOrder:
        return ConcatOrder(inputs, first_shards)
