"""The base of table formats: columns to read, rows to keep, and columns in folder names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote

from headrace._util import check
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.compression import path_of
from headrace.formats.format import Format, RowFilter, errors_named
from headrace.formats.limits import Limits
from headrace.formats.predicates import ALL, NONE, columns_of, known, parsed, text_of

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
