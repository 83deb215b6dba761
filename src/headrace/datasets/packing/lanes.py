"""Row packing, for documents whose lengths are known only once they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.datasets.operators.values import GroupOperator
from headrace.datasets.packing.sequences import DocumentPart, PackStep, Tokens
from headrace.datasets.pipeline import Pipeline
from headrace.errors import OptionError
from headrace.plan.lane_packing import LanePacking
from headrace.plan.token_mixing import TokenMixing


@dataclass(frozen=True, slots=True)
class PackParts:
    """Makes a sequence of documents, given as (number, start, stop, token count, document)."""

    step: PackStep

    def __call__(self, documents: list[tuple[int, int, int, int, Any]]) -> dict[str, Tokens]:
        return self.step(
            [DocumentPart(number, sample, start, stop, whole) for number, start, stop, whole, sample in documents]
        )


def lane_operator(
    pipeline: Pipeline, step: PackStep, method: str, call: str, mixing: TokenMixing | None = None
) -> GroupOperator:
    """Return the operator that packs documents in rows. `call` is the user's call, for errors.

    Raises:
        OptionError: Documents have no numbers, or are derived in an order that ranks do not share.
    """
    source = pipeline.source
    if source.without_numbers is not None:
        raise OptionError(
            f"{call}: the documents of {source.name} have no numbers before they are read, and sequences would be "
            f"others on other ranks; {source.without_numbers}"
        )
    if pipeline.is_batched or pipeline.group is not None:
        raise OptionError(f"{call} behind .batch(): it is about documents; put .batch() behind .pack()")
    if pipeline.regroups or pipeline.limit is not None:
        before = pipeline.regroups[0].name if pipeline.regroups else f"take({pipeline.limit})"
        raise OptionError(
            f"{call} behind .{before}: which documents come would follow from those of all ranks; put it behind .pack()"
        )
    if mixing is not None and pipeline.numbered is not None:
        raise OptionError(
            f"{call} behind .{pipeline.numbered.name} of a mixture by tokens: its documents have no places in the "
            "epoch before they are drawn; put it behind .pack()"
        )
    return GroupOperator(
        f"pack({step.length}, {method})",
        batcher=None,
        measure=step.count,
        collate=PackParts(step),
        packing=LanePacking(step.length, method, mixing),
    )
