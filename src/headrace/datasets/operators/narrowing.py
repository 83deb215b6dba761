"""Reduction of steps to the fields that are selected later."""

from __future__ import annotations

from dataclasses import replace

from headrace.datasets.operators.fields import Selection
from headrace.datasets.operators.values import EachSample


def narrowed(operator: EachSample, selection: Selection) -> EachSample | None:
    """Return a field-wise step, reduced to a later selection. None: nothing remains to do."""
    if operator.opens_fields:
        return operator
    if operator.decoder is None:
        return operator if selection.names_source else None
    decoder = operator.decoder.only(frozenset().union(*selection.wanted))
    return replace(operator, decoder=decoder, step=replace(operator.step, fn=decoder))
