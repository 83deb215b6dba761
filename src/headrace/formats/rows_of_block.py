"""The samples of a block, each made when it is asked for."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import overload


class RowsOfBlock(Sequence[dict[str, object] | None]):
    """What `Format.open_block` gives where samples are better made one by one, or some at once, than all of them.

    None stands in the place of a sample that is left out.
    """

    @abc.abstractmethod
    def row(self, number: int) -> dict[str, object] | None:
        """One sample; `number` is one of a sample that there is."""

    def some(self, numbers: Sequence[int]) -> Sequence[dict[str, object] | None]:
        """Several samples. Override it where they take less time together; values must be those of `row`."""
        return list(map(self.row, numbers))

    def columns(self, numbers: Sequence[int]) -> Mapping[str, Iterable[object]] | None:  # noqa: ARG002 (others need it)
        """The values of several samples, field by field; None: ask for the samples.

        Override it where samples have the same fields and none is left out; values must be those of `row`.

        Args:
            numbers: a range, where they follow one another.
        """
        return None

    @overload
    def __getitem__(self, at: int) -> dict[str, object] | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[dict[str, object] | None]: ...
    def __getitem__(self, at: int | slice) -> dict[str, object] | Sequence[dict[str, object] | None] | None:
        numbers = range(len(self))[at]
        return self.row(numbers) if isinstance(numbers, int) else self.some(numbers)
