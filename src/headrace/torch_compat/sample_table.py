"""Tables: samples of one form, stored in columns, from which any sample can be read."""

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

from headrace._util.lazy import tensor_types
from headrace._util.sample_ranges import LeasedBodies
from headrace.formats.decoders import Column, Columns
from headrace.torch_compat.serialize import LEAVES, PickledPart
from headrace.torch_compat.spec import Mismatch, name_of
from headrace.workers.failures import AllMade

_LARGE_BYTES = 2**14  # of a value: copying larger ones together costs more than pickling each


@dataclass(slots=True)
class ArrayColumn:
    """A column of arrays or tensors.

    Attributes:
        numbers: [arrays, …] if all have one shape. Otherwise the flattened arrays, concatenated.
        shapes: Shape of each array. None if all have one shape.
    """

    numbers: NDArray[Any]
    shapes: list[tuple[int, ...]] | None = None
    are_tensors: bool = False

    def views(self, chosen: Sequence[int]) -> list[object]:
        if self.shapes is None:
            arrays = [self.numbers[k] for k in chosen]
        else:
            starts = [0, *itertools.accumulate(map(math.prod, self.shapes))]
            arrays = [self.numbers[starts[k] : starts[k + 1]].reshape(self.shapes[k]) for k in chosen]
        return [_as_tensor(array) for array in arrays] if self.are_tensors else arrays

    def is_like(self, other: ArrayColumn) -> bool:
        return (
            self.shapes is other.shapes is None
            and self.numbers.shape[1:] == other.numbers.shape[1:]
            and self.numbers.dtype == other.numbers.dtype
            and self.are_tensors == other.are_tensors
        )


@dataclass(slots=True)
class SampleTable:
    """Samples that are dicts, tuples or single values.

    Attributes:
        names: Field names of dicts, or the length of tuples. None if each sample is a single value.
    """

    count: int
    names: tuple[object, ...] | int | None
    columns: list[list[object] | ArrayColumn]

    @classmethod
    def of(cls, samples: Sequence[Any]) -> SampleTable | None:
        """Copy small samples of one form into a table. None for others."""
        if not samples:
            return None
        first, kinds = samples[0], set(map(type, samples))
        names: tuple[object, ...] | int | None = None
        values: list[Sequence[Any]] = [samples]
        if kinds == {dict} and first and LEAVES.issuperset(map(type, first)):
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
    def of_columns(cls, columns: Columns, bodies: LeasedBodies, count: int) -> SampleTable | None:
        """Return a table of `count` samples from fetched columns. None if it cannot hold them."""
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
        """Return the table as input of `serialize.write`, for `serialize.unpack`."""
        buffers: list[pickle.PickleBuffer] = []
        return [pickle.dumps(self, protocol=5, buffer_callback=buffers.append), *(buffer.raw() for buffer in buffers)]

    def samples(self) -> list[object]:
        """Return all samples. Their arrays are views."""
        values = [_values(column, range(self.count)) for column in self.columns]
        if self.names is None:
            return values[0]
        rows = zip(*values, strict=True)
        return list(rows) if isinstance(self.names, int) else [dict(zip(self.names, row, strict=True)) for row in rows]


class RowsOfTables(AllMade):
    """Rows of consecutive tables as samples. Iteration copies their arrays.

    Args:
        parts: Tables, and the numbers of their chosen rows.
    """

    def __init__(self, parts: Sequence[tuple[SampleTable, Sequence[int]]]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, some: Iterable[RowsOfTables]) -> RowsOfTables:
        return cls([part for rows in some for part in rows._parts])

    def __len__(self) -> int:
        return sum(len(chosen) for _, chosen in self._parts)

    def views(self) -> list[object]:
        """Return all samples of the tables, chosen or not. Their arrays are views."""
        return [sample for table, _ in self._parts for sample in table.samples()]

    @property
    def only(self) -> SampleTable | None:
        return self._parts[0][0] if len(self._parts) == 1 else None

    def __iter__(self) -> Iterator[Any]:
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
        """Return all rows in one table, or None if their fields differ."""
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
        values: list[Any] = [value for column, chosen in parts for value in _values(column, chosen)]
        if are_copied and arrays:
            return [value.copy() if isinstance(value, np.ndarray) else value.clone() for value in values]
        return values
    first = arrays[0]
    numbers = np.empty((sum(len(chosen) for _, chosen in parts), *first.numbers.shape[1:]), first.numbers.dtype)
    at = 0
    for column, (_, chosen) in zip(arrays, parts, strict=True):
        np.take(column.numbers, chosen, 0, numbers[at : at + len(chosen)], "clip")  # other modes make a second copy
        at += len(chosen)
    return ArrayColumn(numbers, None, first.are_tensors)


def _values(column: list[object] | ArrayColumn, chosen: Sequence[int]) -> list[object]:
    return column.views(chosen) if isinstance(column, ArrayColumn) else [column[k] for k in chosen]


def _column(values: Sequence[Any]) -> list[object] | ArrayColumn | None:
    """Return one field of all samples as a column. None if large, or only separately picklable."""
    kinds = set(map(type, values))
    if LEAVES.issuperset(kinds):
        is_large = any(type(value) in (str, bytes) and len(value) > _LARGE_BYTES for value in values)
        return None if is_large else list(values)
    are_tensors = kinds.issubset(tensor_types())
    if not are_tensors and kinds != {np.ndarray}:
        return None
    try:
        arrays = [value.numpy() for value in values] if are_tensors else values
    except (RuntimeError, TypeError):  # another layout, on a device, or with a gradient
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
    try:
        return bool(name_of(dtype))
    except Mismatch:
        return False


def _as_tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)
