"""What is left of a step where only some fields are wanted behind it."""

from __future__ import annotations

from dataclasses import replace

from headrace.datasets.operators.fields import Selection
from headrace.datasets.operators.values import EachSample


def narrowed(operator: EachSample, selection: Selection) -> EachSample | None:
    """The same, where a selection follows; None: nothing is left to do.

    Args:
        operator: it is a decoder, opens fields, or names sources.
    """
    if operator.opens_fields:
        return operator
    if operator.decoder is None:
        return operator if selection.names_source else None
    decoder = operator.decoder.only(frozenset().union(*selection.wanted))
    return replace(operator, decoder=decoder, step=replace(operator.step, fn=decoder))
