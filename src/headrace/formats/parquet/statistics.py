"""Compares predicates with the statistics of row groups, to skip groups without kept rows.

A bound of uncertain meaning is ignored: the rows are read, and the predicate is evaluated on each.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from headrace.formats.arrow_values import library
from headrace.formats.parquet.footer import Footer, Group, ParquetColumn, Value
from headrace.formats.predicates import NONE, Term, Where, as_float, check_kinds, microseconds_of

_UNIT_US = {"ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}  # a unit in microseconds
_EPOCH = 719163  # 1970-01-01


class Comparison(NamedTuple):
    """How the bounds of a column are compared with the values of a term.

    Attributes:
        bound: Parses the bytes of a bound. May raise, or return None. None: bounds are ignored.
        of_value: Converts a value of a term.
    """

    bound: Callable[[bytes], Any] | None = None
    of_value: Callable[[Any], Any] = lambda value: value


class Question(NamedTuple):
    """A term of a predicate for the bounds of a leaf. Its values ascend."""

    op: str
    position: int
    column: Comparison
    values: Sequence[Any]


def remaining(where: Where, footer: Footer) -> list[Where]:
    """Return the alternatives of `where` that may hold in each row group. Incomparable columns raise an OptionError."""
    by_name = {column.name: column for column in footer.columns}
    check_kinds(where, {name: column.type for name, column in by_name.items()})
    ways = {term.column: _comparison(by_name[term.column]) for some in where for term in some}

    def question(term: Term) -> Question:
        way = ways[term.column]
        values = sorted(map(way.of_value, term.values))
        return Question(term.op, by_name[term.column].leaves[0].position, way, values)

    asked = [list(map(question, some)) for some in where]
    return [
        tuple(compress(where, [all(_may_hold(one, group) for one in these) for these in asked])) if group.rows else NONE
        for group in footer.groups
    ]


def _may_hold(asked: Question, group: Group) -> bool:
    op, values, said = asked.op, asked.values, group.statistics[asked.position]
    if op == "not in":
        return True
    if said.missing == group.chunks[asked.position].values:
        return False
    low, high = _bound(asked.column, said.low), _bound(asked.column, said.high)
    if low is None or high is None or low > high:
        return True
    match op:
        case "==" | "in":
            least = bisect.bisect_left(values, low)  # the first value that is not below the bounds
            return least < len(values) and bool(values[least] <= high)
        case "<":
            return bool(low < values[0])
        case "<=":
            return bool(low <= values[0])
        case ">":
            return bool(high > values[0])
        case ">=":
            return bool(high >= values[0])
        case _:
            return True


def _bound(column: Comparison, said: Value | None) -> Any:
    if column.bound is None or type(said) is not bytes:
        return None
    try:
        return column.bound(said)
    except (struct.error, ValueError):
        return None


def _comparison(column: ParquetColumn) -> Comparison:
    """Return how the bounds of a column are compared. `check_kinds` has accepted its type."""
    types, kind, physical = library().types, column.type, column.leaves[0].physical
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    if types.is_boolean(kind):
        return Comparison({b"\0": False, b"\1": True}.get)
    if types.is_float32(kind) or types.is_float64(kind):
        reads = struct.Struct("<f" if physical == "FLOAT" else "<d")
        return Comparison(lambda data: _no_nan(reads.unpack(data)[0]), as_float)
    if types.is_string(kind) or types.is_large_string(kind):
        return Comparison(bytes, lambda text: text.encode("utf-8", "surrogatepass"))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return Comparison(bytes)
    if physical not in ("INT32", "INT64") or types.is_decimal(kind) or len(column.leaves) != 1:
        return Comparison()
    integer = struct.Struct("<" + ("i" if physical == "INT32" else "q"))
    if types.is_unsigned_integer(kind):
        integer = struct.Struct(integer.format.upper())
    if types.is_timestamp(kind):
        times, parts = _UNIT_US.get(kind.unit, (0, 1))
        if not times:
            return Comparison()
        return Comparison(lambda data: integer.unpack(data)[0] * times, lambda time: microseconds_of(time) * parts)
    if types.is_date32(kind):
        return Comparison(lambda data: integer.unpack(data)[0], lambda day: day.toordinal() - _EPOCH)
    return Comparison(lambda data: integer.unpack(data)[0])


def _no_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
