"""The base of table formats, and predicates on rows: lists of (column, operator, value), as `filters=`.

A missing value fails every comparison but "not in". Results on Arrow columns are those of pyarrow's `filters=`.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from hashlib import blake2b
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.arrow_values import Arrow, kind_of, library, numbers_of, whole_array
from headrace.formats.compression import path_of
from headrace.formats.format import Format, RowFilter, errors_named
from headrace.formats.limits import Limits

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
            f"{needed}: numbers (no NaN), booleans (which have no order), text, bytes, dates or datetimes; for what is "
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


Mask = NDArray[np.bool_]

_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = dt.date(1970, 1, 1).toordinal()
_BEYOND = 2**65  # larger than any number of a column
_NAMES = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}


def kept_rows(where: Where, table: Arrow) -> Mask:
    """Return a mask of the rows that are kept. An incomparable column raises a ValueError."""
    kept = np.zeros(table.num_rows, np.bool_)
    for some in where:
        these = np.ones(table.num_rows, np.bool_)
        for term in some:
            array = whole_array(table.column(term.column))
            try:
                these &= _column_holds(array.storage if hasattr(array, "storage") else array, term)
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
        kind = _kind_of_column(types[term.column])
        if kind != term.kind:
            raise OptionError(
                f"where= compares column {term.column!r:.200} with the {term.kind} {term.values[0]!r:.80}, and it is "
                f"{kind_of(types[term.column]):.200}" + (f", which is compared with a {kind}" if kind else "")
            )


def stored_type(kind: Arrow) -> Arrow:
    """Return the type of the values of extension types and dictionaries."""
    while library().types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if library().types.is_dictionary(kind) else kind.storage_type
    return kind


def _kind_of_column(kind: Arrow) -> str | None:
    """Return the kind of values that a type is compared with, as `Term.kind`. None: none."""
    types = library().types
    kind = stored_type(kind)
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


def _column_holds(array: Arrow, term: Term) -> Mask:
    pa = library()
    if pa.types.is_dictionary(array.type):
        of_values = _column_holds(array.dictionary, term)
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
        limits = np.iinfo(kind.to_pandas_dtype())
        inside = [value for value in cast("Sequence[float]", values) if limits.min <= value <= limits.max]
        values = [int(value) for value in inside if value == int(value)]
    elif not (types.is_string(kind) or types.is_large_string(kind) or types.is_date32(kind)):
        return functools.reduce(np.logical_or, [_compared(array, "==", value) for value in values])
    return _mask(_compute().is_in(array, value_set=pa.array(values, kind)))


def _compared(array: Arrow, op: str, value: Plain) -> Mask:
    """Compare each element with `value`. False for missing elements."""
    pa, types, kind = library(), library().types, array.type
    if isinstance(value, str | bytes):
        array = array.cast(pa.binary()) if types.is_fixed_size_binary(kind) else array
        return _mask(_compute().call_function(_NAMES[op], [array, pa.scalar(value, array.type)]))
    if types.is_decimal(kind):
        is_exact = not isinstance(value, float) or (abs(value) < 2.0**63 and value.is_integer())
        other = pa.scalar(Decimal(value) if is_exact else value)  # type: ignore[arg-type]
        return _mask(_compute().call_function(_NAMES[op], [array if is_exact else array.cast(pa.float64()), other]))
    number = number_of(value, kind)
    if types.is_floating(kind):
        found = _COMPARES[op](numbers_of(array).astype(np.float64), number)
    elif types.is_boolean(kind):
        found = _COMPARES[op](numbers_of(array), number)
    else:
        whole = pa.int32() if types.is_date32(kind) else pa.int64() if types.is_timestamp(kind) else kind
        found = _COMPARES[op](numbers_of(array.cast(whole)), _whole_bound(op, number))
    return np.asarray(found & _mask(array.is_valid()) if array.null_count else found)


def number_of(value: Any, kind: Arrow) -> Any:
    """Return the number that a value is in a column of a type: days, or ticks of a timestamp."""
    types = library().types
    if types.is_timestamp(kind):
        epoch = dt.datetime(1970, 1, 1, tzinfo=None if value.tzinfo is None else dt.UTC)
        return Fraction((value - epoch) // dt.timedelta(microseconds=1) * _TICKS_PER_S[kind.unit], 10**6)
    if types.is_date32(kind):
        return value.toordinal() - _EPOCH
    if not types.is_floating(kind):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _whole_bound(op: str, value: float | Decimal | Fraction) -> int:
    """Return the integer that integers are compared with in place of `value`."""
    value = max(-_BEYOND, min(value, _BEYOND))
    bound = math.ceil(value) if op in ("<", ">=") else math.floor(value)
    return bound if op in _ORDER or bound == value else _BEYOND


def _mask(found: Arrow) -> Mask:
    found = found.fill_null(False) if found.null_count else found
    return np.array(numbers_of(found), np.bool_)


@functools.cache
def _compute() -> Arrow:
    import pyarrow.compute as pc

    return pc


Asked = Sequence[tuple[str, str, object]] | Sequence[Sequence[tuple[str, str, object]]]
"""A predicate as given by users."""


_ROW_BYTES = 32  # size of a row in the table of samples


class ListedTable(NamedTuple):
    """The rows and size of a file in a catalogue. Secrets in the catalogue's URL are hidden."""

    rows: int
    nbytes: int
    catalogue: str

    def check(self, rows: int, nbytes: int) -> None:
        """Raise a ValueError if the file differs from its catalogue."""
        if (rows, nbytes) != (self.rows, self.nbytes):
            raise ValueError(
                f"it has {rows} rows in {nbytes} bytes, and its catalogue {self.catalogue} has {self.rows} in "
                f"{self.nbytes}: make a new one"
            )


def check_table(columns: int, rows: int, nbytes: int, limits: Limits) -> None:
    """Raise a LimitError for too many columns to read, or more rows than a file of `nbytes` may claim."""
    if columns > limits.fields:
        raise LimitError(
            f"{columns} columns would be read, over the limit of {limits.fields}: name those that are needed by "
            "columns=, or give Limits(fields=…)"
        )
    if rows * _ROW_BYTES > (most := limits.unpacked(nbytes)):
        raise LimitError(f"a table of {rows} rows in {nbytes} bytes would take over {most} bytes, the limit")


class TableFormat(Format):
    """Files of tables. Each row is a sample. Folders such as `year=2026/` are columns, too.

    Args:
        columns: Columns that are fields of samples. None: all whose names do not begin with "__".
        where: Predicate for the rows to keep.
    """

    members_make_fields = True

    def __init__(self, *, columns: Iterable[str] | None = None, where: Asked | None = None) -> None:
        self.columns = None if columns is None else tuple(columns)
        if isinstance(columns, str) or (
            self.columns is not None and (not self.columns or any(name.startswith("__") for name in self.columns))
        ):
            raise check.invalid("columns", columns, "a list of names, at least one, that do not begin with '__'")
        self.where = ALL if where is None else parsed(where)

    def row_filter(self, urls: Sequence[str]) -> RowFilter | None:
        names = columns_of(self.where)
        if not names or all(set(names) <= constants_of(url).keys() for url in urls):
            return None
        return RowFilter(f"where({text_of(self.where)})", names)

    @contextmanager
    def errors_named(self, url: str) -> Iterator[None]:
        """Name the file at `url` in errors. An OptionError is one of `columns` or `where` for this file."""
        try:
            yield
        except OptionError as error:
            raise FormatError.at(url, f": {error}") from None
        except (LimitError, ValueError):
            with errors_named(url, "is damaged, or not read here"):
                raise

    def is_left_out(self, url: str) -> bool:
        """True if the folders of a file exclude all of its rows."""
        return known(self.where, constants_of(url)) == NONE

    def is_shown(self, name: str) -> bool:
        return not name.startswith("__") if self.columns is None else name in self.columns

    def is_read(self, name: str) -> bool:
        return self.is_shown(name) or name in columns_of(self.where)

    def check_columns(self, names: Collection[str], constants: Mapping[str, object]) -> None:
        """Raise an OptionError for a missing column, or one of `where` that a folder has, too."""
        for name in columns_of(self.where):
            if name in names and name in constants:
                raise OptionError(
                    f"column {name!r:.200} is in it, and its folder has {constants[name]!r:.80} of it: where= "
                    "cannot mean both"
                )
        for name in (*(self.columns or ()), *columns_of(self.where)):
            if name not in names and name not in constants:
                have = ", ".join(sorted([*names, *constants]))[:1000]
                raise OptionError(f"it has no column {name!r:.200}; its columns are: {have or 'none'}")


def constants_of(url: str) -> dict[str, object]:
    """Return the values in the folders of a URL, such as `year=2026/`."""
    said = [part.partition("=") for part in path_of(url).split("/")[:-1]]
    return {
        unquote(name): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for name, equals, value in said
        if equals and name and not name.startswith("__")
    }
