"""The interface by which methods append operators to data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.operator import Operator

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class AddsOperators:
    """A data set to which operators can be appended."""

    def _as_stream(self) -> Stream:
        raise NotImplementedError

    def _with(self, operator: Operator) -> Stream:
        raise NotImplementedError
