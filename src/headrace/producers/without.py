"""A flow that passes on what has not been delivered before."""

from __future__ import annotations

from typing import Any

from headrace.parts import Part
from headrace.producer import Flow
from headrace.types import Ranges


class Without:
    """A flow that leaves some of the samples out that a source puts, and numbers the others anew.

    Args:
        flow: gets the others.
        gone: which ones are left out, by the source's numbers.
    """

    def __init__(self, flow: Flow, gone: Ranges) -> None:
        self._flow, self._gone = flow, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    def put(self, start: int, part: Part) -> None:
        """Hand over what is left of the samples from `start` on."""
        begin, stop, before = start, start + part.count, 0
        for first, end in (*self._gone, (stop, stop)):
            if begin < min(first, stop):
                kept = part.cut(begin - start, min(first, stop) - start)
                self._flow.put(begin - before, kept)
            begin = max(begin, end)
            before += end - first
        part.release()
