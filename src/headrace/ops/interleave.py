"""`.interleave()`: blocks of samples of streams in turn."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from headrace._util import check
from headrace.dataset.stream import Stream
from headrace.ops.combined import CombinedSpec, combined, streams_of
from headrace.ops.inputs import in_turns
from headrace.order.combined import InterleaveLayout, InterleaveOrder
from headrace.order.orders import ENDLESS, Order


def interleave(inputs: Sequence[object], *, block: int) -> Stream:
    check.whole(".interleave(): block", block, 1)
    streams = streams_of("interleave", inputs)
    turn, again = functools.partial(in_blocks, block), functools.partial(interleave, block=block)
    counted = in_turns("interleave", streams, turn, again, f"block={block}")
    return counted or combined(InterleaveSpec(streams, block).checked())


class InterleaveSpec(CombinedSpec):
    """Blocks of `block` samples of streams in turn."""

    kind = "interleave"

    def __init__(self, streams: Sequence[Stream], block: int) -> None:
        super().__init__(streams)
        self.block = block

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

    def arrange(
        self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int
    ) -> InterleaveOrder:
        return InterleaveOrder(inputs, self._layout, first_shards, window)


def in_blocks(block: int, taken: Sequence[int], ended: Sequence[bool]) -> Sequence[int]:
    """Choose the input with the fewest blocks so far."""
    return sorted((k for k in range(len(taken)) if not ended[k]), key=lambda k: (taken[k] // block, k))[:1]
