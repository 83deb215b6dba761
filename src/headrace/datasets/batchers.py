"""What decides how samples are put together: batchers of our own; see `headrace.types.Batcher`."""

from __future__ import annotations

from collections.abc import Sequence


class EvenBatcher:
    """Groups of one size, in order; the last one may have fewer.

    Args:
        size: samples in a group.
        drop_last: leave a last group out that has fewer.
    """

    def __init__(self, size: int, *, drop_last: bool) -> None:
        self._size, self._drop_last, self._offered = size, drop_last, 0

    def offer(self, measure: int) -> Sequence[int]:  # noqa: ARG002 (each counts as one)
        self._offered += 1
        return range(self._offered) if self._offered == self._size else ()

    def end(self) -> Sequence[int]:
        return () if self._drop_last else range(self._offered)
