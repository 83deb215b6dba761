"""`.prefetch()` and `.on_every_rank()`: how a loader delivers the results of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._util import check
from headrace.ops.operator import Operator
from headrace.pipeline.compile import PipelineBuilder


@dataclass(frozen=True, slots=True)
class Prefetch(Operator):
    where = "loader"
    most: int

    @property
    def text(self) -> str:
        return f"prefetch({self.most})"

    def add_to(self, builder: PipelineBuilder) -> None:
        if builder.prefetch is not None:
            raise check.conflict(f".prefetch({builder.prefetch})", f".{self.text}")
        builder.prefetch = self.most


@dataclass(frozen=True, slots=True)
class OnEveryRank(Operator):
    where = "loader"
    text = "on_every_rank()"

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.is_everywhere = True


def prefetch(n: int) -> Prefetch:
    return Prefetch(check.whole(".prefetch(): n", n))
