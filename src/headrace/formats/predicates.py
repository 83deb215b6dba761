"""Parses predicates on rows of tables: lists of (column, operator, value), as `filters=`.

A missing value fails every comparison but "not in".
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from hashlib import blake2b
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple

import numpy as np

from headrace._util import check
from headrace.errors import OptionError

_ORDER = {"<", "<=", ">", ">="}
_SETS = {"in", "not in"}
OPERATORS = ("=", "==", "!=", "<", "<=", ">", ">=", "in", "not in")
_FORM = 'a list such as [("year", ">=", 2020), ("lang", "in", ["en", "de"])]'
_COMPARES = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_SHOWN, _WORDS = 80, 200

Plain = bool | int | float | Decimal | str | bytes | dt.date
"""Type of a value; datetimes are dates, too."""


class Term(NamedTuple):
    """One comparison. `op` is one of `OPERATORS` except "="."""

    column: str
    op: str
    values: tuple[Plain, ...]

    @property
    def kind(self) -> str:
        """Kind of the values: "boolean", "number", "text", "bytes", "date" or "time"."""
        return _kind(self.values[0]) or ""

    @property
    def text(self) -> str:
        shown = ", ".join(map(repr, self.values))
        column = self.column if self.column.isidentifier() else repr(self.column)
        return f"{column} {self.op} " + (f"({shown})" if self.op in _SETS else shown)


Where = tuple[tuple[Term, ...], ...]
"""Alternatives of terms: a row is kept if all terms of any alternative hold."""

ALL: Where = ((),)
NONE: Where = ()


def parsed(where: object) -> Where:
    """Parse `where=`. Raises an OptionError for the invalid part."""
    if not isinstance(where, list | tuple) or not where or any(type(one) is str for one in where) or [] in where:
        raise check.invalid("where", where, _FORM)
    is_any = all(isinstance(one, list) for one in where)
    return tuple(tuple(map(_term, some)) for some in (where if is_any else [where]))


def text_of(where: Where) -> str:
    """Return a description, equal in all processes. If truncated, it ends with a digest."""
    text = " or ".join(" and ".join(term.text for term in some) for some in where)
    if len(text) <= _WORDS:
        return text
    return f"{text[:_WORDS]}… {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def columns_of(where: Where) -> tuple[str, ...]:
    return tuple(dict.fromkeys(term.column for some in where for term in some))


def known(where: Where, constants: Mapping[str, object]) -> Where:
    """Return the predicate that remains if some columns are constant. `NONE`: no row is kept."""
    left = tuple(
        tuple(term for term in some if term.column not in constants)
        for some in where
        if all(_holds(term, constants[term.column]) for term in some if term.column in constants)
    )
    return ALL if () in left else left


def microseconds_of(time: dt.datetime) -> int:
    """Return microseconds since 1970, in UTC for times with a zone."""
    epoch = dt.datetime(1970, 1, 1, tzinfo=None if time.tzinfo is None else dt.UTC)
    return (time - epoch) // dt.timedelta(microseconds=1)


def as_float(value: float | Decimal | Fraction) -> float:
    """Return the nearest float, which is infinite beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _term(one: object) -> Term:
    if not isinstance(one, tuple) or len(one) != 3 or type(one[0]) is not str:
        raise check.invalid("where", one, f"(column, operator, value) in {_FORM}")
    column, op, value = one
    check.one_of(f"where={column!r:.80}: operator", op, OPERATORS)
    values = _values(value) if op in _SETS else (_plain(value),)
    kinds = {_kind(value) for value in values}
    if None in kinds or len(kinds) != 1 or (kinds == {"boolean"} and op in _ORDER):
        needed = "a list of one kind of values" if op in _SETS else "one value"
        raise check.invalid(
            f"where={column!r:.80} {op!r}",
            value,
            f"{needed}: numbers (no NaN), booleans (which have no order), text, bytes, dates or times; for what is "
            "missing there is .filter()",
        )
    if op in _SETS:
        values = tuple(sorted(set(values)))
    return Term(column, "==" if op == "=" else op, values)


def _values(value: object) -> tuple[Plain, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return ()
    return tuple(map(_plain, value))


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _kind(value: object) -> str | None:
    match value:
        case bool():
            return "boolean"
        case int():
            return "number"
        case float() | Decimal():
            return None if _is_nan(value) else "number"
        case str():
            return "text"
        case bytes():
            return "bytes"
        case dt.datetime():
            return "time" if value.tzinfo is None else "time with a zone"
        case dt.date():
            return "date"
        case _:
            return None


def _is_nan(value: float | Decimal) -> bool:
    """True for NaN, also for a signaling Decimal."""
    return value.is_nan() if isinstance(value, Decimal) else math.isnan(value)


def _holds(term: Term, said: object) -> bool:
    if said is None:
        return term.op == "not in"
    value = _as_kind(str(said), term)
    if term.op in _SETS:
        return (value in term.values) == (term.op == "in")
    return bool(_COMPARES[term.op](value, term.values[0]))


def _as_kind(text: str, term: Term) -> Any:
    try:
        match term.kind:
            case "text":
                return text
            case "number":
                is_float = any(type(value) is float for value in term.values) and not text.lstrip("+-").isdecimal()
                number = float(text) if is_float else Decimal(text)
                if not _is_nan(number):
                    return number
            case "boolean":
                return {"true": True, "false": False}[text.lower()]
            case "date":
                return dt.date.fromisoformat(text)
            case "time" | "time with a zone":
                found = dt.datetime.fromisoformat(text)
                if (found.tzinfo is None) == (term.kind == "time"):
                    return found
    except (ValueError, KeyError, InvalidOperation):
        pass
    raise OptionError(
        f"its folder has {term.column}={text!r:.80}, and where= compares {term.column!r:.80} with the "
        f"{term.kind} {term.values[0]!r:.{_SHOWN}}"
    )
