"""Converts rows of Arrow columns to Python values, one row at a time.

Numbers, text and bytes are read from Arrow's buffers directly. Asking Arrow for each value takes ten times as long.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util.lazy import needed
from headrace.formats.format import RowsOfBlock, dicts_of
from headrace.formats.json_values import as_list, as_number, as_object, as_text

Arrow = Any
"""A pyarrow object; pyarrow has no type annotations."""

Getter = Callable[[int], object]
"""Returns the value of a row."""

Taker = Callable[[Sequence[int]], Iterable[object]]
"""Returns the values of several rows, given as a range if consecutive."""

StretchTaker = Callable[[int, int], Iterable[object]]
"""Returns the values of the rows [start, stop)."""

_FEW = 8  # values that are read one by one
_ENCODED = ("Image", "Audio", "Video", "Pdf", "Nifti")
_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")
_NESTED = ("Sequence", "List", "LargeList")


@functools.cache
def library() -> Arrow:
    """Import pyarrow."""
    return needed("pyarrow", "parquet", "decoding Parquet and Arrow files", ImportError)


@contextmanager
def arrow_errors(what: str = "") -> Iterator[None]:
    """Raise errors of pyarrow about damaged data as ValueErrors, which begin with `what`.

    Metadata, named by `what`, take little memory: an allocation that fails is then a wrong claim.
    """
    try:
        yield
    except MemoryError:
        if what:
            raise ValueError(f"{what}: it claims too much memory") from None
        raise
    except (library().ArrowException, OSError, UnicodeDecodeError, StopIteration) as error:
        raise ValueError(f"{what}: {error}" if what else str(error)) from None


@functools.lru_cache(maxsize=64)
def features_of(text: bytes) -> Mapping[str, object]:
    """Return the features of Hugging Face's `datasets`, by column, from a file's metadata."""
    try:
        info = as_object((as_object(json.loads(text)) or {}).get("info")) if text else None
    except (ValueError, RecursionError):
        return {}
    return as_object((info or {}).get("features")) or {}


def check_names(names: Sequence[str]) -> None:
    """Raise a ValueError if two columns have one name."""
    if len(set(names)) < len(names):
        raise ValueError(f"it has two columns {next(name for name in names if names.count(name) > 1)!r:.200}")


def kind_of(kind: Arrow, feature: object = None) -> str:
    """Describe a type. Types with equal descriptions have values of the same kind."""
    types, text = library().types, json.dumps(feature)
    if any(f'"{name}"' in text for name in (*_ENCODED, *_ARRAYS)):
        return f"{kind_of(kind)} as {text}"
    if hasattr(kind, "storage_type"):
        return kind_of(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return kind_of(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_timestamp(kind) and kind.tz is not None:
        return f"timestamp[{kind.unit}] with a zone"
    if types.is_map(kind):
        return f"map of {kind_of(kind.key_type)} to {kind_of(kind.item_type)}"
    if types.is_struct(kind):
        return "{" + ", ".join(f"{field.name}: {kind_of(field.type)}" for field in kind) + "}"
    if types.is_fixed_size_list(kind) and types.is_nested(kind.value_type):
        return f"array[{kind.list_size}] of {kind_of(kind.value_type)}"
    if types.is_nested(kind) and not types.is_union(kind):
        return f"list of {kind_of(kind.value_type)}"
    return f"{kind!s:.1000}"


def leaf_count(kind: Arrow) -> int:
    """Return the number of primitive columns in Parquet for a column of a type."""
    types = library().types
    if hasattr(kind, "storage_type"):
        return leaf_count(kind.storage_type)
    if not types.is_nested(kind):
        return 1
    return sum(leaf_count(kind.field(k).type) for k in range(kind.num_fields))


class TableRows(RowsOfBlock):
    """The rows of a table or record batch as dicts. None replaces skipped rows.

    Args:
        features: Features of Hugging Face's `datasets`; see `values_of`.
        constants: Fields that are equal in all rows.
        kept: Mask of the rows that are not skipped. None: all rows.
    """

    def __init__(
        self,
        table: Arrow,
        features: Mapping[str, object],
        constants: Mapping[str, object],
        kept: NDArray[np.bool_] | None = None,
    ) -> None:
        self._count, self.nbytes = int(table.num_rows), int(table.nbytes)
        self._constants, self._kept = dict(constants), kept
        named = zip(table.column_names, map(whole_array, table.columns), strict=True)
        self._values = [(name, *values_of(array, features.get(name))) for name, array in named]

    def __len__(self) -> int:
        return self._count

    def row(self, number: int) -> dict[str, object] | None:
        if self._kept is not None and not self._kept[number]:
            return None
        return {**self._constants, **{name: get(number) for name, get, _ in self._values}}

    def columns(self, numbers: Sequence[int]) -> Mapping[str, Iterable[object]] | None:
        if self._kept is not None:
            return None
        constants = {name: itertools.repeat(value, len(numbers)) for name, value in self._constants.items()}
        return {**constants, **{name: take(numbers) for name, _, take in self._values}}


class ColumnValues(NamedTuple):
    """The Python values of a column, of one row or of several."""

    get: Getter
    take: Taker


def values_of(array: Arrow, feature: object = None) -> ColumnValues:
    """Return the Python values of an array. None for missing values.

    Numbers are int, float and bool; text is str; lists of numbers without missing ones are numpy arrays that own their
    memory; structs are dicts, maps lists of pairs, decimals `decimal.Decimal`; dates and times are those of `datetime`,
    or numpy's for nanoseconds.

    Args:
        feature: Feature of Hugging Face's `datasets`: images and the like are then encoded bytes, arrays have their
            shape.
    """
    if hasattr(array, "storage"):  # a registered extension type
        array = array.storage
    own = _of_feature(array, feature)
    present, take = _present(array, feature) if own is None else (own, None)
    is_there = numbers_of(array.is_valid()).data if array.null_count else None
    get = present if is_there is None else lambda row: present(row) if is_there[row] else None
    return ColumnValues(get, partial(map, get) if take is None else partial(_taken, take, get, is_there))


def _taken(take: StretchTaker, get: Getter, is_there: memoryview | None, rows: Sequence[int]) -> Iterable[object]:
    """Take consecutive rows together, and few or scattered ones one by one."""
    if not isinstance(rows, range) or len(rows) < _FEW:
        return map(get, rows)
    values = take(rows.start, rows.stop)
    if is_there is None:
        return values
    there = is_there[rows.start : rows.stop]
    return [value if is_value else None for value, is_value in zip(values, there, strict=True)]


def _texts(starts: memoryview, data: memoryview, start: int, stop: int) -> Iterable[object]:
    """Decode ASCII strings together, then split them."""
    ends = starts[start : stop + 1].tolist()
    first = ends[0]
    whole = str(data[first : ends[-1]], "utf-8")
    if whole.isascii():
        return [whole[begin - first : end - first] for begin, end in itertools.pairwise(ends)]
    return [str(data[begin:end], "utf-8") for begin, end in itertools.pairwise(ends)]


def _named(take: Taker, numbers: NDArray[Any], start: int, stop: int) -> Iterable[object]:
    """Return values of a dictionary. Consecutive, distinct values are taken together."""
    chosen = numbers[start:stop]
    first = int(chosen[0])
    if int(chosen[-1]) - first == len(chosen) - 1 and (chosen[1:] > chosen[:-1]).all():
        return take(range(first, first + len(chosen)))
    values = dict.fromkeys(each := chosen.tolist())
    values.update(zip(values, take(list(values)), strict=True))
    return map(values.__getitem__, each)


def _list_stretches(starts: memoryview, take: Taker, start: int, stop: int) -> Iterable[object]:
    ends = starts[start : stop + 1].tolist()
    first, values = ends[0], list(take(range(ends[0], ends[-1])))
    return [values[begin - first : end - first] for begin, end in itertools.pairwise(ends)]


def whole_array(column: Arrow) -> Arrow:
    if not hasattr(column, "chunks"):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    pa = library()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _present(array: Arrow, feature: object) -> tuple[Getter, StretchTaker | None]:
    """Return functions for one row, and for consecutive rows if that is faster. Missing values may be any values."""
    types, kind = library().types, array.type
    if _are_numbers(kind):
        numbers = numbers_of(array)
        return numbers.item, lambda start, stop: numbers[start:stop].tolist()
    if types.is_string(kind) or types.is_large_string(kind):
        starts, data = _starts(array), _bytes_of(array)
        return lambda row: str(data[starts[row] : starts[row + 1]], "utf-8"), partial(_texts, starts, data)
    if types.is_binary(kind) or types.is_large_binary(kind):
        starts, data = _starts(array), _bytes_of(array)
        return lambda row: bytes(data[starts[row] : starts[row + 1]]), None
    if types.is_dictionary(kind):
        values, indices = values_of(array.dictionary, feature), numbers_of(array.indices)
        is_shared = not types.is_nested(kind.value_type)  # rows may share values that do not change
        return lambda row: values.get(int(indices[row])), partial(_named, values.take, indices) if is_shared else None
    if types.is_struct(kind):
        of_child = _features_of_children(feature)
        children = [(field.name, *values_of(array.field(k), of_child(field.name))) for k, field in enumerate(kind)]
        return lambda row: {name: get(row) for name, get, _ in children}, lambda start, stop: dicts_of(
            {name: take(range(start, stop)) for name, _, take in children}, stop - start
        )
    if types.is_map(kind):
        starts, keys, items = _starts(array), values_of(array.keys).get, values_of(array.items).get
        return lambda row: [(keys(k), items(k)) for k in range(starts[row], starts[row + 1])], None
    if types.is_fixed_size_list(kind):
        return _fixed_lists(array, feature), None
    if types.is_list(kind) or types.is_large_list(kind):
        return _lists(array, _feature_of_values(feature))
    if types.is_null(kind):
        return lambda row: None, None  # noqa: ARG005
    if (types.is_timestamp(kind) or types.is_duration(kind)) and kind.unit == "ns":
        return numbers_of(array).__getitem__, None
    return lambda row: array[row].as_py(), None


def numbers_of(array: Arrow) -> NDArray[Any]:
    """Return numbers, or times in nanoseconds, as a numpy array. Missing values are arbitrary.

    Does not use `array.to_numpy`, which imports pandas if installed: half a second per worker.
    """
    kind, buffer, first, count = array.type, array.buffers()[1], array.offset, len(array)
    if buffer is None or not count:
        return np.zeros(count, _dtype(kind))
    if library().types.is_boolean(kind):
        bits = np.frombuffer(buffer, np.uint8, -(-(first + count) // 8))
        return np.unpackbits(bits, count=first + count, bitorder="little")[first:].view(np.bool_)
    dtype = _dtype(kind)
    return np.frombuffer(buffer, dtype, count, first * dtype.itemsize)


def _dtype(kind: Arrow) -> np.dtype[Any]:
    types = library().types
    if types.is_timestamp(kind) or types.is_duration(kind):
        return np.dtype(f"{'M8' if types.is_timestamp(kind) else 'm8'}[{kind.unit}]")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def _starts(array: Arrow) -> memoryview:
    """Return the starts of the values of lists, text or bytes, and the end of the last."""
    pa = library()
    is_large = array.type in (pa.large_string(), pa.large_binary()) or pa.types.is_large_list(array.type)
    width, buffer = 8 if is_large else 4, array.buffers()[1]
    if buffer is None or not len(array):
        return memoryview(bytes(width)).cast("q" if is_large else "i")
    part = memoryview(buffer)[array.offset * width : (array.offset + len(array) + 1) * width]
    return part.cast("B").cast("q" if is_large else "i")


def _bytes_of(array: Arrow) -> memoryview:
    buffer = array.buffers()[2]
    return memoryview(b"") if buffer is None else memoryview(buffer).cast("B")


def _lists(array: Arrow, feature: object) -> tuple[Getter, StretchTaker | None]:
    starts, values = _starts(array), array.values
    if _are_numbers(values.type):
        some = _stretches(values)
        return lambda row: some(starts[row], starts[row + 1]), None
    get, take = values_of(values, feature)
    return lambda row: [get(k) for k in range(starts[row], starts[row + 1])], partial(_list_stretches, starts, take)


def _fixed_lists(array: Arrow, feature: object) -> Getter:
    types, values, shape = library().types, array.values, [array.type.list_size]
    first, size = array.offset * shape[0], shape[0]  # first value of row 0, values per row
    while types.is_fixed_size_list(values.type) and not values.null_count:
        shape.append(values.type.list_size)
        first, size, values = (first + values.offset) * shape[-1], size * shape[-1], values.values
    if _are_numbers(values.type):
        some = _stretches(values, shape if len(shape) > 1 else None)
        return lambda row: some(first + row * size, first + (row + 1) * size)
    begin, step, get = array.offset * shape[0], shape[0], values_of(array.values, _feature_of_values(feature)).get
    return lambda row: [get(k) for k in range(begin + row * step, begin + (row + 1) * step)]


def _stretches(values: Arrow, shape: list[int] | None = None) -> Callable[[int, int], object]:
    """Return a function for consecutive numbers: an array, or a list if one is missing."""
    numbers = numbers_of(values)
    if not values.null_count:
        if shape is not None:
            return lambda start, stop: numbers[start:stop].reshape(shape).copy()
        return lambda start, stop: numbers[start:stop].copy()
    is_there, get = numbers_of(values.is_valid()), values_of(values).get

    def some(start: int, stop: int) -> object:
        if is_there[start:stop].all():
            return numbers[start:stop].reshape(shape or -1).copy()
        return [get(k) for k in range(start, stop)]

    return some


def _are_numbers(kind: Arrow) -> bool:
    types = library().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _of_feature(array: Arrow, feature: object) -> Getter | None:
    """Return a function for values with a class in `datasets`, or None."""
    said = as_object(feature) or {}
    kind, types = as_text(said.get("_type")), library().types
    if kind in _ENCODED and types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        bodies = values_of(array.field("bytes")).get

        def body(row: int) -> object:
            found = bodies(row)
            if found is None:
                raise ValueError(f"an {kind.lower()} has a path and no bytes: it is in a file of its own")
            return found

        return body
    if kind in _ARRAYS:
        sizes, get = as_list(said.get("shape")) or [None], _present(array, None)[0]
        shape = [-1 if size is None else size for size in map(as_number, sizes)]
        return lambda row: np.asarray(_stacked(get(row))).reshape(shape)
    return None


def _stacked(value: object) -> object:
    lists = as_list(value)
    return value if lists is None else [_stacked(one) for one in lists]


def _feature_of_values(feature: object) -> object:
    said, several = as_object(feature) or {}, as_list(feature) or []
    if len(several) == 1:
        return several[0]
    return said.get("feature") if said.get("_type") in _NESTED else None


def _features_of_children(feature: object) -> Callable[[str], object]:
    said = as_object(feature) or {}
    inner = as_object(said.get("feature"))
    if said.get("_type") == "Sequence" and inner is not None:  # a struct of lists represents a list of structs
        return lambda name: {"_type": "Sequence", "feature": inner.get(name)}
    return said.get
