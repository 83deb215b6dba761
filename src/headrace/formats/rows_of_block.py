"""Samples of a block that are decoded lazily."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import overload

from headrace.types import Buffer, Ints


class RowsOfBlock(Sequence[dict[str, object] | None]):
    """Lazily decoded samples of a block, as a result of `Format.open_block`.

    None replaces a skipped sample.
    """

    @abc.abstractmethod
    def row(self, number: int) -> dict[str, object] | None:
        """Return one sample. `number` is in range."""

    def some(self, numbers: Sequence[int]) -> Sequence[dict[str, object] | None]:
        """Return several samples. Override it if that is faster; values must equal those of `row`."""
        return list(map(self.row, numbers))

    def columns(self, numbers: Sequence[int]) -> Mapping[str, Iterable[object]] | None:
        """Return the values of several samples by field. None: use `some` instead.

        Override it if all samples have the same fields and none is skipped; values must equal those of `row`.

        Args:
            numbers: A range if the numbers are consecutive.
        """
        return None

    @overload
    def __getitem__(self, at: int) -> dict[str, object] | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[dict[str, object] | None]: ...
    def __getitem__(self, at: int | slice) -> dict[str, object] | Sequence[dict[str, object] | None] | None:
        numbers = range(len(self))[at]
        return self.row(numbers) if isinstance(numbers, int) else self.some(numbers)


class CutRows(RowsOfBlock):
    """Samples that are consecutive parts of a block. `offsets` has their starts, and the end of the last."""

    def __init__(self, data: Buffer, offsets: Ints, decode: Callable[[bytes], dict[str, object]]) -> None:
        self._data, self._offsets, self._decode = data, offsets, decode
        self.nbytes = len(data)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, number: int) -> dict[str, object]:
        start, stop = self._offsets[number : number + 2].tolist()
        return self._decode(bytes(self._data[start:stop]))


def dicts_of(columns: Mapping[str, Iterable[object]], count: int) -> list[dict[str, object]]:
    """Return `count` dicts, of one value of each column."""
    form = dict[str, object].fromkeys(columns)
    made = [form.copy() for _ in range(count)]  # copies are large enough: no dict has to grow
    for name, values in columns.items():
        for one, value in zip(made, values, strict=True):
            one[name] = value
    return made
