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

from headrace.formats.arrow_values import Arrow, library
from headrace.formats.parquet.footer import Footer, Group, ParquetColumn, Value
from headrace.formats.predicates import NONE, Term, Where, check_kinds, number_of, stored_type


class Question(NamedTuple):
    """A term of a predicate for the bounds of a leaf.

    Attributes:
        bound: Parses the bytes of a bound. May raise, or return None for an unknown bound.
        values: The values of the term, comparable with bounds, ascending.
    """

    op: str
    position: int
    bound: Callable[[bytes], Any]
    values: Sequence[Any]


def remaining(where: Where, footer: Footer) -> list[Where]:
    """Return the alternatives of `where` that may hold in each row group. Incomparable columns raise an OptionError."""
    by_name = {column.name: column for column in footer.columns}
    check_kinds(where, {name: column.type for name, column in by_name.items()})

    def question(term: Term) -> Question:
        column = by_name[term.column]
        kind = stored_type(column.type)
        if term.kind == "text":
            values = [str(value).encode("utf-8", "surrogatepass") for value in term.values]
        else:
            values = [number_of(value, kind) for value in term.values]
        return Question(term.op, column.leaves[0].position, _bounds(column, kind), sorted(values))

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
    low, high = _bound(asked, said.low), _bound(asked, said.high)
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


def _bound(asked: Question, said: Value | None) -> Any:
    try:
        return asked.bound(said) if type(said) is bytes else None
    except (struct.error, ValueError):
        return None


def _bounds(column: ParquetColumn, kind: Arrow) -> Callable[[bytes], Any]:
    """Return a parser of the bounds of a column, whose values are stored as `kind`."""
    types, physical = library().types, column.leaves[0].physical
    if types.is_boolean(kind):
        return {b"\0": False, b"\1": True}.get
    if types.is_floating(kind):
        number = struct.Struct("<f" if physical == "FLOAT" else "<d")
        return lambda data: None if math.isnan(value := number.unpack(data)[0]) else value
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return bytes
    is_scaled = types.is_decimal(kind) or (types.is_timestamp(kind) and kind.unit == "s")  # Parquet has no seconds
    if physical not in ("INT32", "INT64") or is_scaled:
        return lambda data: None  # noqa: ARG005
    whole = struct.Struct("<" + ("i" if physical == "INT32" else "q"))
    if types.is_unsigned_integer(kind):
        whole = struct.Struct(whole.format.upper())
    return lambda data: whole.unpack(data)[0]
