"""CSV and TSV: each record is a sample, a dict of strings by column."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.decoders import decode_int
from headrace.formats.format import Block, Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.lines import LineScanner
from headrace.formats.tar.headers import looks_like
from headrace.types import Ints

_NEWLINE, _RETURN = 10, 13
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The syntax of records. `header`: the first record has the names of the columns."""

    delimiter: str
    quote: str | None
    header: bool

    def reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Split records with Python's `csv`, within its limits."""
        if self.quote is None:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote)

    def split(self, text: str) -> list[str]:
        """Split one record as `csv` does, but for any size. Raises a ValueError for damage."""
        fields: list[str] = []
        at = 0
        while True:
            parts: list[str] = []
            if self.quote is not None and text.startswith(self.quote, at):
                end, at = at, at + 1
                while True:
                    end = text.find(self.quote, at)
                    if end < 0:
                        raise ValueError("a quote is not closed")
                    parts.append(text[at:end])
                    at = end + 1
                    if not text.startswith(self.quote, at):
                        break
                    parts.append(self.quote)
                    at += 1
            stop = text.find(self.delimiter, at)
            rest = text[at:] if stop < 0 else text[at:stop]
            if "\r" in rest or "\n" in rest:
                raise ValueError("a line ends in a field without quotes")
            parts.append(rest)
            fields.append("".join(parts))
            if stop < 0:
                return fields
            at = stop + 1

    @staticmethod
    def wrong_with(columns: Sequence[str]) -> str | None:
        """Return why these are no valid names of columns, or None."""
        seen: set[str] = set()
        for name in columns:
            if name in seen:
                return f"the column {name[:40]!r} is there twice"
            seen.add(name)
        taken = next((name for name in columns if name.startswith("__")), None)
        if taken is not None:
            return f"the column {taken[:40]!r} begins with '__'; such names are taken"
        return None if columns else "there are no columns"


class DelimitedScanner(LineScanner):
    """Finds records: lines, joined where a newline is within quotes.

    A quote opens a field at its start, and closes it. Elsewhere it is a plain character, as in Python's `csv`. If all
    quotes follow RFC 4180, every second one closes, and no loop is needed.
    """

    def __init__(
        self, url: str, layout: RecordLayout, columns: tuple[str, ...] | None = None, limits: Limits = DEFAULTS
    ) -> None:
        super().__init__(url, limits, unit="record")
        self._layout, self._columns, self._limits = layout, columns, limits
        self._record: tuple[int, int] | None = None  # (start, first line) of an incomplete record of several lines
        self._is_inside = False  # True if the fed bytes end within quotes
        self._has_closed = False  # True if the last byte was a closing quote, unless another quote follows
        self._last = _NEWLINE  # the last fed byte
        self._head = b""  # the fed part of the header
        self._lacks_header = layout.header or columns is None
        if columns is not None and not layout.header:
            self._member = self._described(columns)

    @property
    def _open(self) -> tuple[int, int]:
        return super()._open if self._record is None else self._record

    def _begins_well(self, head: bytes) -> bool:
        if head.startswith(_UTF_16):
            self._fail("it is UTF-16, and UTF-8 is read", 1, self._start)
        elif said := looks_like(head):
            self._fail(f"these are no records of text{said}", 1, self._start)
        return self.error is None

    def _samples(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        base = offset or self._start  # without a byte order mark
        data, (starts, numbers, ends) = data[base - offset :], lines
        newlines = ends[ends < self._end] - base
        are_ends = self._are_outside(data, newlines)
        if len(newlines) < len(ends):  # the last line has no newline
            are_ends = np.append(are_ends, not self._is_inside)
        closing = np.flatnonzero(are_ends)
        rest = int(closing[-1]) + 1 if len(closing) else 0
        if len(closing) == len(ends):  # usually
            records = lines
        else:
            begun = np.concatenate([[0], closing + 1])[: len(closing)]
            records = np.stack([starts[begun], numbers[begun], ends[closing]])
        if len(closing):
            records[:2, 0], self._record = self._record or records[:2, 0], None
        if rest < len(ends) and self._record is None:
            self._record = int(starts[rest]), int(numbers[rest])
        are_kept = self._are_kept(records, data, base)
        records = records if are_kept.all() else records[:, are_kept]
        if self._lacks_header and records.shape[1]:
            start, number, end = records[:, 0].tolist()
            if end - start <= self._longest:
                before = self._head if start < base else b""
                self._take_header(before + data[max(0, start - base) : end - base].tobytes(), number, start)
                records = records[:, 1:] if self.error is None else records[:, :0]
        start, number = self._record or (int(ends[-1]) + 1 if len(ends) else self._start, self._line + len(ends))
        if self._lacks_header and self.error is None:
            self._head = (b"" if len(closing) else self._head) + data[max(0, start - base) :].tobytes()
            if len(self._head) > self._limits.header_bytes:
                text = f"the header has more than {self._limits.header_bytes} bytes, the limit"
                self._fail(text, number, start, LimitError)
        if self.error is None and last and self._is_inside and self._end - start <= self._longest:
            self._fail("a quote is opened in the record, and not closed", number, start)
        self._last = int(data[-1]) if len(data) else self._last
        return records

    def _rows(self, starts: Ints, lines: Ints, ends: Ints) -> Rows:
        return super()._rows(starts, lines, ends) if len(starts) else Rows.empty()

    def _are_kept(self, records: Ints, data: NDArray[np.uint8], base: int) -> NDArray[np.bool_]:
        """Return a mask of the records that are not empty."""
        starts, _, ends = records
        are_kept: NDArray[np.bool_] = ends > starts
        for k in np.flatnonzero(ends - starts == 1).tolist():
            at = int(starts[k]) - base
            are_kept[k] = (int(data[at]) if at >= 0 else self._last) != _RETURN
        return are_kept

    def _are_outside(self, data: NDArray[np.uint8], newlines: Ints) -> NDArray[np.bool_]:
        """Return a mask of the newlines outside of quotes, which end records."""
        if self._layout.quote is None or not len(data):
            return np.ones(len(newlines), np.bool_)
        quotes = np.flatnonzero(data == ord(self._layout.quote))
        turns = quotes if self._are_regular(quotes, data) else self._turns(quotes, data)
        inside = (np.searchsorted(turns, newlines) + self._is_inside) % 2
        self._is_inside = bool((len(turns) + self._is_inside) % 2)
        self._has_closed = not self._is_inside and len(turns) > 0 and int(turns[-1]) == len(data) - 1
        return np.asarray(inside == 0)

    def _are_regular(self, quotes: Ints, data: NDArray[np.uint8]) -> bool:
        """True if quotes alternate and only stand at starts and ends of fields, or are doubled."""
        if not len(quotes):
            return True
        delimiter, quote = (ord(text) for text in (self._layout.delimiter, self._layout.quote or ""))
        opening, closing = quotes[int(self._is_inside) :: 2], quotes[1 - int(self._is_inside) :: 2]
        before = np.where(opening > 0, data[opening - 1], self._last)
        behind = data[np.minimum(closing + 1, len(data) - 1)]  # the byte after the last one is not known yet
        if self._has_closed and data[0] not in (delimiter, quote, _NEWLINE, _RETURN):
            return False
        if not self._has_closed and len(opening) and opening[0] == 0 and self._last == quote:
            return False
        return bool(
            ((before == delimiter) | (before == quote) | (before == _NEWLINE)).all()
            and ((behind == delimiter) | (behind == quote) | (behind == _NEWLINE) | (behind == _RETURN)).all()
        )

    def _turns(self, quotes: Ints, data: NDArray[np.uint8]) -> Ints:
        starts = (ord(self._layout.delimiter), _NEWLINE)
        inside, closed = self._is_inside, -1 if self._has_closed else -2
        turns: list[int] = []
        for at, before in zip(quotes.tolist(), data[quotes - 1].tolist(), strict=True):
            if inside:
                closed = at
            elif closed != at - 1 and (before if at else self._last) not in starts:
                continue
            inside = not inside
            turns.append(at)
        return np.array(turns, np.int64)

    def _take_header(self, data: bytes, line: int, start: int) -> None:
        try:
            text = str(data, "utf-8").removesuffix("\r")
            if "\0" in text:
                raise ValueError("it has a NUL byte")
            if len(data) > self._limits.header_bytes:
                raise ValueError(f"it has {len(data)} bytes, over the limit of {self._limits.header_bytes}")
            columns = tuple(self._layout.split(text))
            if len(columns) > self._limits.fields:
                raise ValueError(f"it has {len(columns)} columns, over the limit of {self._limits.fields}")
            if wrong := RecordLayout.wrong_with(columns):
                raise ValueError(wrong)
            if self._columns is not None and columns != self._columns:
                raise ValueError(f"it has the columns {list(columns)!r:.200}, and columns= has others")
        except ValueError as error:
            self._fail(f"the header cannot be used: {error}", line, start)
            return
        self._head, self._member, self._lacks_header = b"", self._described(columns), False

    def _described(self, columns: Sequence[str]) -> str:
        """Return the data that decoding one record needs, as the name of its member."""
        layout = self._layout
        said = {"columns": columns, "delimiter": layout.delimiter, "quote": layout.quote, "header": layout.header}
        return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


_TRUE_AND_FALSE = {"true": True, "false": False, "1": True, "0": False}
_SHOWN = 60


class Csv(Format):
    r"""Records of delimited fields in UTF-8, with the syntax of RFC 4180 and Python's `csv`.

    A quoted field may contain delimiters, newlines and doubled quotes. The first record has the names of the columns.
    Values are strings; `types=` converts columns. Empty lines are skipped. The key of a sample is the number of its
    first line, from 1.

    Args:
        delimiter: Separator of fields, one ASCII character. None: a comma, of `Tsv` a tab.
        quote: Quote around fields, one ASCII character. None: fields are never quoted.
        header: True if the first record has the names of the columns.
        columns: Names of the columns, if there is no header. If there is one, it must have the same names.
        types: Conversions of some columns from strings: `int`, `float`, `bool` ("true", "false", 1 or 0), or any
            function that raises a ValueError for invalid strings.

    Raises:
        OptionError: An argument is invalid.

    Examples:
        >>> from headrace.fetch.stores import memory
        >>> from headrace import Csv
        >>> memory.put("memory://table/0.csv", b'name,n\n"Ada, Countess",3\n')
        >>> [(row["name"], row["n"]) for row in hr.stream("memory://table/0.csv", format=Csv(types={"n": int}))]
        [('Ada, Countess', 3)]
    """

    name = "csv"
    suffixes: tuple[str, ...] = (".csv",)
    _separator = ","

    def __init__(
        self,
        *,
        delimiter: str | None = None,
        quote: str | None = '"',
        header: bool = True,
        columns: Sequence[str] | None = None,
        types: Mapping[str, Callable[[str], object]] | None = None,
    ) -> None:
        names = None if columns is None else tuple(columns)
        delimiter = self._separator if delimiter is None else delimiter
        self._layout = RecordLayout(
            _byte("delimiter", delimiter), None if quote is None else _byte("quote", quote), header
        )
        if quote == delimiter:
            raise check.conflict(f"quote={quote!r}", f"delimiter={delimiter!r}", "give different characters")
        if names is None and not header:
            raise check.lacking("header=False", "the names of the columns: columns=[…]")
        if names is not None and (wrong := RecordLayout.wrong_with(names)):
            raise check.invalid("columns", list(names), f"the names of columns: {wrong}")
        if names is not None and types is not None and (unknown := set(types) - set(names)):
            raise check.invalid("types", sorted(unknown), "of columns in columns=, and there are no such columns")
        self._columns, self._types = names, {name: _STRICT.get(fn, fn) for name, fn in (types or {}).items()}
        usual = {"delimiter": self._separator, "quote": '"', "header": True, "columns": None}
        given = {"delimiter": delimiter, "quote": quote, "header": header, "columns": names}
        said = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != usual[name])
        self.name = f"{type(self).name}({said})" if said else type(self).name  # indexes with other options do not match

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
            return ()  # decoding one alone gives a better error
        if len(rows) != len(texts):
            return ()  # unclosed quotes
        joined = "".join(texts)
        if "\0" in joined or "\r\r" in joined:  # `csv` ignores the second of two line ends
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
            raise ValueError(f"its columns are {list(columns)!r:.200}, and columns= has others")
        if missing := [name for name in self._types if name not in columns]:
            raise ValueError(f"it has no column {missing[0]!r}, which types= names")
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
    """Records of fields separated by tabs; see `Csv`."""

    name = "tsv"
    suffixes = (".tsv",)
    _separator = "\t"


def _byte(name: str, given: str) -> str:
    if len(given) != 1 or not given.isascii() or given in "\r\n\0":
        raise check.invalid(name, given, "one ASCII character that does not end lines")
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
    try:
        said = json.loads(member)
        return RecordLayout(said["delimiter"], said["quote"], said["header"]), tuple(said["columns"])
    except (ValueError, KeyError, TypeError):
        raise ValueError("its index is of another format") from None


CSV, TSV = Csv(), Tsv()
