"""Collation of samples whose arrays differ in length, by padding to the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace._util.check import array_of, holds
from headrace.torch_compat.collate import is_extended, plain_collate
from headrace.torch_compat.collate_by_torch import check_fields
from headrace.torch_compat.sample_table import ArrayColumn, RowsOfTables, SampleTable

Pad = float | Mapping[str, float]
"""Padding value, or one for each field by its name."""


class PaddedCollate:
    """Collates as torch's default, but pads arrays, tensors and lists of different lengths.

    Args:
        pad: Padding value, used after the own numbers up to the longest of the batch in each dimension. A mapping gives
            values for fields; others get 0. Fields of tuples have the names "0", "1".
    """

    takes_tables = True

    def __init__(self, pad: Pad = 0) -> None:
        self._pad, self._default = (pad, 0.0) if isinstance(pad, Mapping) else ({}, pad)

    def __call__(self, samples: Sequence[object]) -> object:
        fields: set[str] = set()
        table = samples.table() if isinstance(samples, RowsOfTables) and not is_extended() else None
        if table is None:
            check_fields(rows := [*samples])
            batch = self._collated(rows, "", fields)
        else:
            batch = self._of_columns(table, fields)
        if unknown := self._pad.keys() - fields:
            raise ValueError(
                f"pad_value names {', '.join(map(repr, sorted(unknown)))}, and samples have "
                f"{', '.join(map(repr, sorted(fields))) or 'no fields'}"
            )
        return batch

    def _of_columns(self, table: SampleTable, fields: set[str]) -> object:
        names = table.names
        if names is None:
            return self._of_column(table.columns[0], "")
        if isinstance(names, int):
            fields.update(map(str, range(names)))
            columns = [tuple(some) if isinstance(some, list) else some for some in table.columns]
            return [self._of_column(some, str(k)) for k, some in enumerate(columns)]
        fields.update(map(str, names))
        return {name: self._of_column(some, str(name)) for name, some in zip(names, table.columns, strict=True)}

    def _of_column(self, values: Sequence[object] | ArrayColumn, name: str) -> object:
        return (
            torch.from_numpy(values.numbers) if isinstance(values, ArrayColumn) else self._collated(values, name, set())
        )

    def _collated(self, values: Sequence[Any], name: str, fields: set[str]) -> object:
        """Collate samples, or the values of the field `name`. Collects field names in `fields`."""
        first = values[0]
        if isinstance(first, Mapping):
            fields.update(map(str, first))
            return {key: self._collated([value[key] for value in values], str(key), fields) for key in first}
        if isinstance(first, tuple):
            if len(set(map(len, values))) > 1:
                raise ValueError(f"{_the(name)} of a batch are tuples of several lengths: one is needed")
            columns = [(str(k), some) for k, some in enumerate(zip(*values, strict=True))]
            fields.update(k for k, _ in columns)
            made: list[Any] = [self._collated(some, k, fields) for k, some in columns]
            return type(first)(*made) if hasattr(first, "_fields") else made  # a list, as in torch's default
        arrays = _arrays(values, name)
        return plain_collate(values) if arrays is None else self._filled(arrays, name)

    def _filled(self, arrays: Sequence[Any], name: str) -> object:
        dtypes, shapes = {array.dtype for array in arrays}, {tuple(array.shape) for array in arrays}
        if len(dtypes) > 1:
            raise ValueError(f"{_the(name)} of a batch are of {_listed(dtypes)}: one dtype is needed")
        if len(shapes) == 1:
            # torch refuses negative strides
            return plain_collate([a if _is_tensor(a) or min(a.strides, default=0) >= 0 else a.copy() for a in arrays])
        if len(set(map(len, shapes))) > 1:
            raise ValueError(
                f"{_the(name)} of a batch have the shapes {_listed(shapes)}: as many dimensions are needed"
            )
        pad = _checked(self._pad.get(name, self._default), name, arrays[0])
        filled = _full((len(arrays), *map(max, zip(*shapes, strict=True))), pad, arrays[0])
        for row, array in zip(filled, arrays, strict=True):
            row[tuple(map(slice, array.shape))] = array
        return torch.as_tensor(filled)


def _arrays(values: Sequence[Any], name: str) -> Sequence[Any] | None:
    """Return values as arrays or tensors, None if none are such. ValueError if only some are."""
    kinds = set(map(type, values))
    others = {kind for kind in kinds if kind not in (list, np.ndarray) and not issubclass(kind, torch.Tensor)}
    if others:
        if len(others) < len(kinds):
            named = _listed({kind.__name__ for kind in kinds})
            raise ValueError(f"{_the(name)} of a batch are {named}: arrays, tensors or lists in all of them are needed")
        return None
    if kinds - {list, np.ndarray}:
        return [value if _is_tensor(value) else torch.as_tensor(array_of(value)) for value in values]
    try:
        arrays = [array_of(value) for value in values]
    except ValueError:  # nested lists of different lengths
        return None
    except OverflowError as error:
        error.add_note(_the(name))
        raise
    is_list = [type(value) is list for value in values]
    if any(is_list):  # an empty list does not determine a dtype
        of_lists = [array.dtype for array, listed in zip(arrays, is_list, strict=True) if listed and array.size]
        dtypes = of_lists or [array.dtype for array in arrays if array.size] or [np.dtype(np.int64)]
        common = np.result_type(*dtypes)
        arrays = [
            array.astype(common, copy=False) if listed else array for array, listed in zip(arrays, is_list, strict=True)
        ]
    return arrays if all(array.dtype.kind in "biufc" for array in arrays) else None


def _full(shape: tuple[int, ...], pad: float, like: Any) -> Any:
    return like.new_full(shape, pad) if _is_tensor(like) else np.full(shape, pad, like.dtype)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _checked(pad: float, name: str, like: Any) -> float:
    """Raise ValueError if arrays cannot hold the pad: numpy would truncate it silently."""
    name_of_type = like.dtype.name if hasattr(like.dtype, "name") else str(like.dtype).removeprefix("torch.")
    known = getattr(torch, name_of_type)
    largest = torch.finfo(known).max if known.is_floating_point or known.is_complex else 0
    if not holds(name_of_type, pad, largest):
        raise ValueError(f"pad_value={pad} for {_the(name)}, which are of {like.dtype}: they cannot hold it")
    return pad


def _the(name: str) -> str:
    return f"the samples' fields {name!r}" if name else "the samples"


def _listed(some: set[Any]) -> str:
    return ", ".join(sorted(map(str, some))[:4])
