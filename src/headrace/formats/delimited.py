"""CSV and TSV: each record is a sample, a dict of text by the names of the columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from headrace.errors import OptionError
from headrace.formats.delimited_scanner import DelimitedScanner, RecordLayout
from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits
from headrace.formats.plain import decode_int

_TRUE_AND_FALSE = {"true": True, "false": False, "1": True, "0": False}
_SHOWN = 60


class Csv(Format):
    r"""Records of fields between delimiters, in UTF-8, as RFC 4180 has them and as Python's `csv` reads them.

    A field may be quoted, and have delimiters, newlines and doubled quotes in it then. The first record has the names
    of the columns. Values are text; nothing is guessed: `types=` says what else a column is. Empty lines are passed
    over. A sample's key is the number of the line that it begins in, from 1.

    Args:
        delimiter: between fields, one ASCII character.
        quote: around fields, one ASCII character; None: fields are never quoted.
        header: whether the first record has the names of the columns.
        columns: the names of the columns where no header has them. Where one has, they must be the same.
        types: for some columns what makes a value of the text: `int`, `float`, `bool` ("true", "false", 1 or 0), or any
            function of a string that raises a ValueError for what it does not take.

    Raises:
        OptionError: an argument is none of these.

    Examples:
        >>> import headrace as hr
        >>> from headrace.fetch.stores import memory
        >>> from headrace.formats.delimited import Csv
        >>> memory.put("memory://table/0.csv", b'name,n\n"Ada, Countess",3\n')
        >>> [(row["name"], row["n"]) for row in hr.stream("memory://table/0.csv", format=Csv(types={"n": int}))]
        [('Ada, Countess', 3)]
    """

    name = "csv"
    suffixes: tuple[str, ...] = (".csv",)

    def __init__(
        self,
        *,
        delimiter: str = ",",
        quote: str | None = '"',
        header: bool = True,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        names = None if columns is None else tuple(columns)
        self._layout = RecordLayout(
            _byte("delimiter", delimiter), None if quote is None else _byte("quote", quote), header
        )
        if quote == delimiter:
            raise OptionError(f"quote={quote!r} is the delimiter, too")
        if names is None and not header:
            raise OptionError("header=False: give the names of the columns by columns=[…]")
        if names is not None and (wrong := RecordLayout.wrong_with(names)):
            raise OptionError(f"columns={list(names)!r:.200}: {wrong}")
        if names is not None and types is not None and (unknown := set(types) - set(names)):
            raise OptionError(f"types={sorted(unknown)!r:.200}: there are no such columns in columns=")
        self._columns, self._types = names, {name: _STRICT.get(fn, fn) for name, fn in (types or {}).items()}
        usual = type(self).__init__.__kwdefaults__ or {}
        given = {"delimiter": delimiter, "quote": quote, "header": header, "columns": names}
        said = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != usual[name])
        self.name = f"{type(self).name}({said})" if said else type(self).name  # an index of it is no other's

    def scanner(self, url: str, limits: Limits) -> DelimitedScanner:
        return DelimitedScanner(url, self._layout, self._columns, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        columns = self._columns_of(block.members)
        text = str(bodies[0], "utf-8").removesuffix("\r")
        if "\0" in text:
            raise ValueError("it has a NUL byte")
        row = self._layout.split(text)
        if len(row) != len(columns):
            raise ValueError(f"it has {len(row)} fields, and there are {len(columns)} columns")
        return [self._sample(columns, row)]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        try:
            columns = self._columns_of(block.members)
            texts = [str(body, "utf-8") for body in bodies]
            rows = list(self._layout.reader(texts))
        except (ValueError, csv.Error):
            return ()  # said better of one alone
        if len(rows) != len(texts):
            return ()  # quotes that are not closed
        joined = "".join(texts)
        if "\0" in joined or "\r\r" in joined:  # of two ends of a line `csv` overlooks the second
            return ()
        count = len(columns)
        if self._types:
            return [self._sample_if_any(columns, row) if len(row) == count else None for row in rows]
        return [dict(zip(columns, row, strict=True)) if len(row) == count else None for row in rows]

    def _columns_of(self, members: tuple[str, ...]) -> tuple[str, ...]:
        layout, columns = _said(members[0])
        if layout != self._layout:
            raise ValueError(f"its index is of {layout}, and {self._layout} is asked for")
        if self._columns is not None and columns != self._columns:
            raise ValueError(f"its columns are {list(columns)!r:.200}, and columns= says others")
        if missing := [name for name in self._types if name not in columns]:
            raise ValueError(f"it has no column {missing[0]!r}, of which types= tells")
        return columns

    def _sample(self, columns: tuple[str, ...], row: Sequence[str]) -> dict[str, object]:
        sample: dict[str, object] = dict(zip(columns, row, strict=True))
        for name, make in self._types.items():
            text = row[columns.index(name)]
            try:
                sample[name] = make(text)
            except (ValueError, ArithmeticError) as error:
                raise ValueError(f"column {name!r}, {text[:_SHOWN]!r}: {error}") from error
        return sample

    def _sample_if_any(self, columns: tuple[str, ...], row: Sequence[str]) -> dict[str, object] | None:
        try:
            return self._sample(columns, row)
        except Exception:
            return None


class Tsv(Csv):
    """The same with tabs between fields; see `Csv`."""

    name = "tsv"
    suffixes = (".tsv",)

    def __init__(
        self,
        *,
        delimiter: str = "\t",
        quote: str | None = '"',
        header: bool = True,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        super().__init__(delimiter=delimiter, quote=quote, header=header, columns=columns, types=types)


def _byte(name: str, given: str) -> str:
    if len(given) != 1 or not given.isascii() or given in "\r\n\0":
        raise OptionError(f"{name}={given!r} must be one ASCII character, and no line's end")
    return given


def _int(text: str) -> int:
    return decode_int(text.encode())


def _float(text: str) -> float:
    if "_" in text:
        raise ValueError("it is no number")
    return float(text)


def _bool(text: str) -> bool:
    value = _TRUE_AND_FALSE.get(text.strip().lower())
    if value is None:
        raise ValueError("it is neither true nor false")
    return value


_STRICT: dict[Callable[[str], object], Callable[[str], object]] = {int: _int, float: _float, bool: _bool}


@lru_cache(maxsize=64)
def _said(member: str) -> tuple[RecordLayout, tuple[str, ...]]:
    """What a scanner has written of its shard."""
    try:
        said = json.loads(member)
        return RecordLayout(said["delimiter"], said["quote"], said["header"]), tuple(said["columns"])
    except (ValueError, KeyError, TypeError):
        raise ValueError("its index is of another format") from None


CSV, TSV = Csv(), Tsv()
