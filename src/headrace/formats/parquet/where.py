"""Predicates asked of a footer, and of page indexes: what is left out of which their bounds say that no row is kept.

A bound that may mean something else is not asked: then the rows are read, and asked themselves.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from headrace.errors import OptionError
from headrace.formats.parquet.footer import Group
from headrace.formats.parquet.page_index import PageBounds
from headrace.formats.parquet.schema import BYTE_ARRAY, FIXED, INT96, ParquetColumn
from headrace.formats.parquet.thrift import Struct, ThriftReader, Value
from headrace.formats.predicates import NONE, Term, Where, as_float, columns_of, microseconds_of

_BOOLEAN, _INT32, _INT64, _, _FLOAT, _DOUBLE = range(6)
_REPEATED = 2
_UNSIGNED, _SIGNED = (11, 12, 13, 14), (15, 16, 17, 18)  # as converted types
_UNIT_US = {1: (1000, 1), 2: (1, 1), 3: (1, 1000)}  # what a timestamp's unit is in microseconds

_NOT = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "in": "not in", "not in": "in"}

Reads = Callable[[bytes], Any]
"""What makes of a bound's bytes what can be compared; it may raise, or give None."""


class Comparable(NamedTuple):
    """A column that can be asked for.

    Attributes:
        kind: of values that it is compared with, as `Term.kind`.
        bound: reads the bounds in statistics; None: they are not asked.
        of_value: makes what is comparable with a bound of a value that is asked for.
        has_nan: whether rows may be there that no bound is about.
    """

    kind: str
    bound: Reads | None = None
    of_value: Callable[[Any], Any] = lambda value: value
    has_nan: bool = False


class Question(NamedTuple):
    """What a footer, or a page index, is asked of a term.

    Attributes:
        leaf: number of the column's among those of all columns.
        values: what its bounds are compared with, ascending.
    """

    op: str
    leaf: int
    column: Comparable
    values: Sequence[Any]


class Asking(NamedTuple):
    """A predicate, or what is left of it to ask of some rows; and what bounds are asked of each of its terms."""

    where: Where
    questions: Sequence[Sequence[Question]]

    def only(self, kept: Sequence[bool]) -> Asking:
        """Those of its alternatives that are marked."""
        return Asking(tuple(compress(self.where, kept)), list(compress(self.questions, kept)))


def asked_of(where: Where, columns: Sequence[ParquetColumn]) -> Asking:
    """What bounds are asked of each term of `where`.

    Raises:
        ValueError: one is not there, or has values of another kind than it is compared with.
    """
    found, first, names = dict[str, tuple[int, Comparable]](), 0, columns_of(where)
    for column in columns:
        if column.name in names:
            comparable = _comparable(column)
            for term in (term for some in where for term in some if term.column == column.name):
                if comparable is None or comparable.kind != term.kind:
                    raise OptionError(
                        f"where= compares column {column.name!r:.200} with the {term.kind} {term.values[0]!r:.80}, and "
                        f"it is {column.kind:.200}"
                        + ("" if comparable is None else f", which is compared with a {comparable.kind}")
                    )
            assert comparable is not None
            found[column.name] = first, comparable
        first += len(column.leaves)
    return Asking(where, [[_question(term, *found[term.column]) for term in some] for some in where])


def left_of(asked: Asking, group: Group) -> Asking:
    """What is left to ask of the rows of a group; `NONE` where its statistics say that none is kept."""
    if not group.rows:
        return Asking(NONE, ())
    return asked.only([all(_may_hold_in_group(one, group) for one in these) for these in asked.questions])


def is_decided(asked: Asking, group: Group) -> bool:
    """Whether the statistics of a group say that all its rows are kept."""
    return any(all(_must_hold(one, group) for one in these) for these in asked.questions)


def pages_left(asked: Question, bounds: PageBounds) -> list[bool]:
    """In which pages of its column it may hold for a row."""
    return [_may_hold(asked, *said) for said in zip(*bounds, strict=True)]


def _question(term: Term, leaf: int, column: Comparable) -> Question:
    return Question(term.op, leaf, column, sorted(map(column.of_value, term.values)))


def _may_hold_in_group(asked: Question, group: Group) -> bool:
    chunk = group.chunks[asked.leaf]
    return _may_hold(asked, *chunk.statistics, chunk.statistics[2] == chunk.values)


def _must_hold(asked: Question, group: Group) -> bool:
    chunk = group.chunks[asked.leaf]
    if chunk.statistics[2] != 0 or asked.column.has_nan:
        return False
    return not _may_hold_in_group(asked._replace(op=_NOT[asked.op]), group)


def _may_hold(asked: Question, low: Any, high: Any, missing: int | None, are_missing: bool) -> bool:
    """Whether it may hold for a row of some that have these bounds."""
    op, column, values = asked.op, asked.column, asked.values
    if are_missing:
        return op == "not in"
    low, high = _bound(column, low), _bound(column, high)
    if low is None or high is None or low > high:
        return True
    value, least = values[0], bisect.bisect_left(values, low)  # where the first is that is not under the bounds
    is_one = low == high and not column.has_nan and type(low) is not bytes  # bounds of bytes may be cut off
    match op:
        case "==" | "in":
            return least < len(values) and bool(values[least] <= high)
        case "<":
            return bool(low < value)
        case "<=":
            return bool(low <= value)
        case ">":
            return bool(high > value)
        case ">=":
            return bool(high >= value)
        case "!=":
            return not (is_one and low == value)
        case _:
            return not (is_one and missing == 0 and least < len(values) and low == values[least])


def _bound(column: Comparable, said: Value | None) -> Any:
    if column.bound is None or type(said) is not bytes:
        return None
    try:
        return column.bound(said)
    except (struct.error, ValueError):
        return None


def _comparable(column: ParquetColumn) -> Comparable | None:
    """How a column can be asked for; None: it cannot."""
    if len(column.elements) != 1:
        return None
    element, leaf = ThriftReader(column.elements[0]).struct(), column.leaves[0]
    if element.get(3) == _REPEATED:
        return None
    logical, converted = element.get(10), element.get(6)
    number, more = next(iter(logical.items())) if type(logical) is dict and logical else (None, None)
    if number == 5 or converted == 5:
        return Comparable("number")  # decimals
    if leaf.kind == BYTE_ARRAY:
        if number == 1 or (number is None and converted == 0):
            return Comparable("text", bytes, lambda text: text.encode("utf-8", "surrogatepass"))
        return Comparable("bytes", bytes) if number is None and converted is None else None
    if leaf.kind in (FIXED, INT96):
        return Comparable("bytes") if leaf.kind == FIXED and number is None and converted is None else None
    if number == 8:
        return _of_times(more)
    if number == 6 or (number is None and converted == 6):
        return Comparable("date", _integer(leaf.kind, is_signed=True), lambda day: day.toordinal() - _EPOCH)
    if number is None and converted is None:
        return _plain(leaf.kind)
    is_known = number == 10 or (number is None and converted in (*_UNSIGNED, *_SIGNED))
    if leaf.kind not in (_INT32, _INT64) or not is_known:
        return None
    is_signed = more.get(2) is True if number == 10 and type(more) is dict else converted in _SIGNED
    return Comparable("number", _integer(leaf.kind, is_signed=is_signed))


_EPOCH = 719163  # 1970-01-01


def _plain(kind: int) -> Comparable | None:
    if kind == _BOOLEAN:
        return Comparable("boolean", {b"\0": False, b"\1": True}.get)
    if kind in (_FLOAT, _DOUBLE):
        reads = struct.Struct("<f" if kind == _FLOAT else "<d")
        return Comparable("number", lambda data: _no_nan(reads.unpack(data)[0]), as_float, has_nan=True)
    return Comparable("number", _integer(kind, is_signed=True))


def _no_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _integer(kind: int, *, is_signed: bool) -> Reads:
    letter = "i" if kind == _INT32 else "q"
    reads = struct.Struct("<" + (letter if is_signed else letter.upper()))
    return lambda data: reads.unpack(data)[0]


def _of_times(said: Value | None) -> Comparable | None:
    """A timestamp: whole numbers of its unit since 1970."""
    if type(said) is not dict or type(said.get(2)) is not dict:
        return None
    unit: Struct = said[2]  # type: ignore[assignment]
    times, parts = _UNIT_US.get(next(iter(unit), 0), (0, 1))
    if not times:
        return None
    read = _integer(_INT64, is_signed=True)
    return Comparable(
        "time with a zone" if said.get(1) is True else "time",
        lambda data: read(data) * times,
        lambda time: microseconds_of(time) * parts,
    )
