"""Samples of one form in columns: they go to the next stage together, and any of them can be had there."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.failures import AllMade
from headrace.formats.columns import Column, ColumnBodies, Columns
from headrace.lately import tensor_types
from headrace.torch_compat.leaves import Mismatch, name_of
from headrace.torch_compat.serialize import PickledPart

_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
_LARGE_BYTES = 2**14  # of a value: to put larger ones together takes longer than to say where each is


@dataclass(slots=True)
class ArrayColumn:
    """A column of arrays, or of tensors.

    Attributes:
        numbers: [arrays, …] where all have one shape; else all their numbers, one array's behind the other's.
        shapes: of each; None: they have one.
        are_tensors: whether they are torch's.
    """

    numbers: NDArray[Any]
    shapes: list[tuple[int, ...]] | None = None
    are_tensors: bool = False

    def views(self, chosen: Sequence[int]) -> list[object]:
        """The rows with these numbers, as views."""
        if self.shapes is None:
            arrays = [self.numbers[k] for k in chosen]
        else:
            starts = [0, *itertools.accumulate(map(math.prod, self.shapes))]
            arrays = [self.numbers[starts[k] : starts[k + 1]].reshape(self.shapes[k]) for k in chosen]
        return [_as_tensor(array) for array in arrays] if self.are_tensors else arrays

    def is_like(self, other: ArrayColumn) -> bool:
        """Whether all arrays of both have one form."""
        return (
            self.shapes is other.shapes is None
            and self.numbers.shape[1:] == other.numbers.shape[1:]
            and self.numbers.dtype == other.numbers.dtype
            and self.are_tensors == other.are_tensors
        )


@dataclass(slots=True)
class SampleTable:
    """Samples that are dicts, tuples, or values that are in no container.

    Attributes:
        count: how many.
        names: of their values, where they are dicts; how many these are, of tuples; None: the samples are the values.
        columns: for each value that of all samples.
    """

    count: int
    names: tuple[object, ...] | int | None
    columns: list[list[object] | ArrayColumn]

    @classmethod
    def of(cls, samples: Sequence[Any]) -> SampleTable | None:
        """Samples that have one form and are small, in memory of their own; None: they are others."""
        if not samples:
            return None
        first, kinds = samples[0], set(map(type, samples))
        names: tuple[object, ...] | int | None = None
        values: list[Sequence[Any]] = [samples]
        if kinds == {dict} and first and _LEAVES.issuperset(map(type, first)):
            names = tuple(first)
            if set(map(tuple, samples)) != {names}:
                return None
            values = [list(map(itemgetter(name), samples)) for name in names]
        elif kinds == {tuple} and first:
            names = len(first)
            if set(map(len, samples)) != {names}:
                return None
            values = list(zip(*samples, strict=True))
        columns = list[list[object] | ArrayColumn]()
        for some in values:
            if (column := _column(some)) is None:
                return None
            columns.append(column)
        return cls(len(samples), names, columns)

    @classmethod
    def of_columns(cls, columns: Columns, bodies: ColumnBodies, count: int) -> SampleTable | None:
        """`count` samples that are columns of what was fetched (`headrace.formats.columns`)."""
        made = list[list[object] | ArrayColumn]()
        named = columns if isinstance(columns, Mapping) else None
        for column in columns if named is None else named.values():
            if not isinstance(column, Column):
                made.append(list(column))
            elif column.values is not None:
                made.append(column.values.tolist())
            elif column.shape and _is_common(column.dtype):
                numbers = np.empty((count, *column.shape), column.dtype)
                column.write(bodies, numbers.data.cast("B"))
                made.append(ArrayColumn(numbers))
            else:
                return None
        return cls(count, len(columns) if named is None else tuple(named), made)

    def packed(self) -> list[PickledPart]:
        """For `serialize.write`; `serialize.unpack` gives it. Of what is in it, any pickler does."""
        buffers: list[pickle.PickleBuffer] = []
        return [pickle.dumps(self, protocol=5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]

    def samples(self) -> list[object]:
        """All of them; their arrays are views."""
        values = [_values(column, range(self.count)) for column in self.columns]
        if self.names is None:
            return values[0]
        rows = zip(*values, strict=True)
        return list(rows) if isinstance(self.names, int) else [dict(zip(self.names, row, strict=True)) for row in rows]


class RowsOfTables(AllMade):
    """Samples that lie in tables, one table's behind the other's.

    Args:
        parts: tables, and the numbers of their samples.
    """

    def __init__(self, parts: Sequence[tuple[SampleTable, Sequence[int]]]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, some: Iterable[RowsOfTables]) -> RowsOfTables:
        """The rows of all of `some`, in order."""
        return cls([part for rows in some for part in rows._parts])

    def __len__(self) -> int:
        return sum(len(chosen) for _, chosen in self._parts)

    def views(self) -> list[object]:
        """All samples of the tables; their arrays are views."""
        return [sample for table, _ in self._parts for sample in table.samples()]

    @property
    def only(self) -> SampleTable | None:
        """The table that they all lie in; None: there are several."""
        return self._parts[0][0] if len(self._parts) == 1 else None

    def __iter__(self) -> Iterator[Any]:
        """Their arrays have memory of their own."""
        for table, chosen in self._parts:
            columns = [_joined([(column, chosen)], are_copied=True) for column in table.columns]
            yield from SampleTable(len(chosen), table.names, columns).samples()

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]

    def table(self) -> SampleTable | None:
        """All of them in one, where they have one form; arrays that differ in shape are views, in a list."""
        first, _ = self._parts[0]
        if any(table.names != first.names for table, _ in self._parts):
            return None
        columns = [
            _joined([(table.columns[k], chosen) for table, chosen in self._parts]) for k in range(len(first.columns))
        ]
        return SampleTable(len(self), first.names, columns)


def _joined(
    parts: Sequence[tuple[list[object] | ArrayColumn, Sequence[int]]], *, are_copied: bool = False
) -> list[object] | ArrayColumn:
    arrays = [column for column, _ in parts if isinstance(column, ArrayColumn)]
    if len(arrays) < len(parts) or not all(map(arrays[0].is_like, arrays)):
        values = [value for column, chosen in parts for value in _values(column, chosen)]
        return list(map(_copied, values)) if are_copied and arrays else values
    first = arrays[0]
    numbers = np.empty((sum(len(chosen) for _, chosen in parts), *first.numbers.shape[1:]), first.numbers.dtype)
    at = 0
    for column, (_, chosen) in zip(arrays, parts, strict=True):
        np.take(column.numbers, chosen, 0, numbers[at : at + len(chosen)], "clip")  # any other mode copies it twice
        at += len(chosen)
    return ArrayColumn(numbers, None, first.are_tensors)


def _copied(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def _values(column: list[object] | ArrayColumn, chosen: Sequence[int]) -> list[object]:
    return column.views(chosen) if isinstance(column, ArrayColumn) else [column[k] for k in chosen]


def _column(values: Sequence[Any]) -> list[object] | ArrayColumn | None:
    """One value of all samples; None: they are large, or such as only a pickle of each keeps as they are."""
    kinds = set(map(type, values))
    if _LEAVES.issuperset(kinds):
        is_large = any(type(value) in (str, bytes) and len(value) > _LARGE_BYTES for value in values)
        return None if is_large else list(values)
    are_tensors = kinds.issubset(tensor_types())
    if not are_tensors and kinds != {np.ndarray}:
        return None
    try:
        arrays = [value.numpy() for value in values] if are_tensors else values
    except (RuntimeError, TypeError):  # of another kind, or on a device, or with a gradient
        return None
    dtype, shapes = arrays[0].dtype, [array.shape for array in arrays]
    if not _is_common(dtype) or () in shapes or any(array.dtype != dtype for array in arrays):
        return None
    if sum(array.nbytes for array in arrays) > _LARGE_BYTES * len(arrays):
        return None
    numbers = np.concatenate([array.reshape(-1) for array in arrays])
    if shapes.count(shapes[0]) == len(shapes):
        return ArrayColumn(numbers.reshape(len(arrays), *shapes[0]), None, are_tensors)
    return ArrayColumn(numbers, shapes, are_tensors)


def _is_common(dtype: np.dtype[Any]) -> bool:
    """Whether numpy and torch have it in common."""
    try:
        return bool(name_of(dtype))
    except Mismatch:
        return False


def _as_tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)
