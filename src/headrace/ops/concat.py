"""Specifications of concatenated and interleaved streams."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence

from headrace.dataset.stream import Stream
from headrace.ops.combined import JoinedSpec
from headrace.order import Order, draw
from headrace.order.combined import ConcatOrder, InterleaveLayout, InterleaveOrder
from headrace.order.orders import ENDLESS
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.needs import refusal


class InputsSpec(JoinedSpec):
    """Several streams with their own operators, each of whose samples occur once."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__(tuple(map(str, range(len(streams)))), streams)

    @property
    def call(self) -> str:
        return f".{self.kind}()"

    @property
    @abstractmethod
    def arguments(self) -> str:
        """Arguments of the method after the streams, for display."""

    @property
    def text(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.{self.kind}({', '.join(others)}{self.arguments})"

    @property
    def is_steady(self) -> bool:
        return all(one.order.is_steady and one.source.is_steady for one in self.pipelines)

    @functools.cached_property
    def sizes(self) -> Sequence[int]:
        return [min(ENDLESS, Planning(pipeline, 0).count()) for pipeline in self.pipelines]

    def can_permute(self, by: str) -> bool:
        return not self.is_endless and (self.is_in_order or by == "global")

    def described(self) -> str:
        return f"{self.kind}({len(self.names)}{self.arguments})"

    def seed_of(self, seed: int, number: int) -> int:
        """Return the seed of an input, so that inputs of equal size get different orders."""
        return draw("input", seed, number)

    def _passes_of_endless(self) -> Sequence[int] | None:
        """Return the samples in a pass over each endless input. None: not known."""
        endless = [one for one, size in zip(self.pipelines, self.sizes, strict=True) if size == ENDLESS]
        counts = [Planning(pipeline, 0).pass_count for pipeline in endless]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None


class ConcatSpec(InputsSpec):
    kind = "concat"
    is_in_turn = True
    arguments = ""

    def __init__(self, streams: Sequence[Stream]) -> None:
        super().__init__(streams)
        for label, pipeline in zip(self.labels[:-1], self.pipelines, strict=False):
            if pipeline.is_endless:
                raise refusal("end", self.call, label)

    def __reduce__(self) -> tuple[object, ...]:
        return ConcatSpec, (self.streams,)

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
        self,
        inputs: Sequence[Order],
        key: tuple[int, ...],  # noqa: ARG002 (others need it)
        first_shards: Sequence[int],
        window: int,  # noqa: ARG002 (each input has its own)
    ) -> ConcatOrder:
        return ConcatOrder(inputs, first_shards)


class InterleaveSpec(InputsSpec):
    """Blocks of `block` samples of streams in turn."""

    kind = "interleave"

    def __init__(self, streams: Sequence[Stream], block: int) -> None:
        super().__init__(streams)
        self.block = block

    def __reduce__(self) -> tuple[object, ...]:
        return InterleaveSpec, (self.streams, self.block)

    @property
    def arguments(self) -> str:
        return f", block={self.block}"

    @property
    def is_endless(self) -> bool:
        return any(pipeline.is_endless for pipeline in self.pipelines)

    @functools.cached_property
    def _layout(self) -> InterleaveLayout:
        return InterleaveLayout(self.sizes, self.block)

    @property
    def count(self) -> int:
        return self._layout.count

    @property
    def full_count(self) -> int | None:
        passes = self._passes_of_endless()
        if passes is None:
            return None
        rounds = max((-(-count // self.block) for count in passes), default=0)
        return sum(size for size in self.sizes if size < ENDLESS) + rounds * self.block * len(passes)

    @property
    def shares(self) -> Sequence[int] | None:
        return [1] * len(self.names)

    def arrange(
        self,
        inputs: Sequence[Order],
        key: tuple[int, ...],  # noqa: ARG002 (others need it)
        first_shards: Sequence[int],
        window: int,
    ) -> InterleaveOrder:
        return InterleaveOrder(inputs, self._layout, first_shards, window)
