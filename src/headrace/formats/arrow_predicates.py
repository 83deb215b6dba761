"""Evaluates predicates on Arrow columns, with the results of pyarrow's `filters=`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError
from headrace.formats.arrow_values import Arrow, kind_of, library, numbers_of, whole_array
from headrace.formats.predicates import Plain, Term, Where, as_float, microseconds_of

Mask = NDArray[np.bool_]

_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_NAMES = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


def kept_rows(where: Where, table: Arrow) -> Mask:
    """Return a mask of the rows that are kept. An incomparable column raises a ValueError."""
    kept = np.zeros(table.num_rows, np.bool_)
    for some in where:
        these = np.ones(table.num_rows, np.bool_)
        for term in some:
            array = whole_array(table.column(term.column))
            try:
                these &= _holds(array.storage if hasattr(array, "storage") else array, term)
            except (library().ArrowException, OverflowError, TypeError) as error:
                raise ValueError(
                    f"column {term.column!r:.200} is {array.type!s:.80}, and cannot be asked for {term.text:.200}: "
                    f"{error}"
                ) from None
        kept |= these
    return kept


def check_kinds(where: Where, types: Mapping[str, Arrow]) -> None:
    """Raise an OptionError if a column is compared with a value of another kind."""
    for term in (term for some in where for term in some):
        kind = _kind(types[term.column])
        if kind != term.kind:
            raise OptionError(
                f"where= compares column {term.column!r:.200} with the {term.kind} {term.values[0]!r:.80}, and it is "
                f"{kind_of(types[term.column]):.200}" + (f", which is compared with a {kind}" if kind else "")
            )


def _kind(kind: Arrow) -> str | None:
    """Return the kind of values that a type is compared with, as `Term.kind`. None: none."""
    types = library().types
    kind = kind.storage_type if hasattr(kind, "storage_type") else kind
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_timestamp(kind):
        return "time" if kind.tz is None else "time with a zone"
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind) or types.is_decimal(kind)
    by_kind = {
        "boolean": types.is_boolean(kind),
        "number": is_number,
        "text": types.is_string(kind) or types.is_large_string(kind),
        "bytes": types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind),
        "date": types.is_date32(kind),
    }
    return next((name for name, is_it in by_kind.items() if is_it), None)


def _holds(array: Arrow, term: Term) -> Mask:
    pa = library()
    if pa.types.is_dictionary(array.type):
        of_values = _holds(array.dictionary, term)
        indices = array.indices.fill_null(0) if array.indices.null_count else array.indices
        found = of_values[numbers_of(indices)] if len(of_values) else np.zeros(len(array), np.bool_)
        if array.indices.null_count:
            found[~_mask(array.indices.is_valid())] = term.op == "not in"
        return found
    if term.op == "not in":
        return ~_is_in(array, term.values)
    return _is_in(array, term.values) if term.op == "in" else _compared(array, term.op, term.values[0])


def _is_in(array: Arrow, values: Sequence[Plain]) -> Mask:
    """Return a mask of the elements that are in `values`. Missing elements are not."""
    pa, types = library(), library().types
    kind = array.type
    if types.is_integer(kind):
        low, high = _bounds(kind)
        numbers = [int(value) for value in cast("Sequence[float]", values) if _is_whole(value)]
        values = [value for value in numbers if low <= value <= high]
    elif not (types.is_string(kind) or types.is_large_string(kind) or types.is_date32(kind)):
        return functools.reduce(np.logical_or, [_compared(array, "==", value) for value in values])
    return _mask(_compute().is_in(array, value_set=pa.array(values, kind)))


def _compared(array: Arrow, op: str, value: Plain) -> Mask:
    """Compare each element with `value`. False for missing elements."""
    pa, types, kind = library(), library().types, array.type
    if types.is_integer(kind) and not isinstance(value, str | bytes):
        return _ints_compared(array, op, value)  # type: ignore[arg-type]
    other: object = value
    if types.is_floating(kind):
        array, other = array.cast(pa.float64()), pa.scalar(as_float(value), pa.float64())  # type: ignore[arg-type]
    elif types.is_decimal(kind) and isinstance(value, float) and not (abs(value) < 2.0**63 and value.is_integer()):
        array, other = array.cast(pa.float64()), pa.scalar(value, pa.float64())
    elif types.is_fixed_size_binary(kind):
        array, other = array.cast(pa.binary()), pa.scalar(value, pa.binary())
    elif types.is_timestamp(kind):
        ticks = Fraction(microseconds_of(value) * _TICKS_PER_S[kind.unit], 10**6)  # type: ignore[arg-type]
        return _ints_compared(array.cast(pa.int64()), op, ticks)  # Arrow refuses times beyond int64 nanoseconds
    else:
        other = pa.scalar(Decimal(value)) if types.is_decimal(kind) else pa.scalar(value, kind)  # type: ignore[arg-type]
    found = _compute().call_function(_NAMES[op], [array, other])
    return _mask(found)


def _ints_compared(array: Arrow, op: str, value: float | Fraction) -> Mask:
    """Compare integers exactly, by the integers next to `value`."""
    pa, (low, high) = library(), _bounds(array.type)
    if op in ("==", "!="):
        if not (_is_whole(value) and low <= value <= high):
            return _mask(array.is_valid()) & (op == "!=")
        return _mask(_compute().call_function(_NAMES[op], [array, pa.scalar(int(value), array.type)]))
    if not math.isfinite(as_float(value)):
        return _mask(array.is_valid()) & ((value > 0) == (op in ("<", "<=")))
    match op:  # as an inclusive bound
        case "<":
            op, bound = "<=", math.ceil(value) - 1
        case "<=":
            bound = math.floor(value)
        case ">":
            op, bound = ">=", math.floor(value) + 1
        case _:
            bound = math.ceil(value)
    if not low <= bound <= high:
        return _mask(array.is_valid()) & ((bound > high) == (op == "<="))
    return _mask(_compute().call_function(_NAMES[op], [array, pa.scalar(bound, array.type)]))


def _is_whole(value: float | Fraction) -> bool:
    return math.isfinite(as_float(value)) and value == int(value)


def _bounds(kind: Arrow) -> tuple[int, int]:
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


def _mask(found: Arrow) -> Mask:
    found = found.fill_null(False) if found.null_count else found
    return np.array(numbers_of(found), np.bool_)


@functools.cache
def _compute() -> Arrow:
    import pyarrow.compute as pc

    return pc
