"""Tables whose rows name objects: a row is a sample with the bytes of its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np

from headrace._util import check
from headrace._util.sample_ranges import Rows
from headrace.dataset.compact import packed
from headrace.dataset.source import blocking
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.compression import path_of, without_compression
from headrace.formats.format import Block, Format
from headrace.formats.json_values import as_text
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import for_each
from headrace.formats.registry import format_named
from headrace.sources.discovery.kinds import extension_of
from headrace.sources.files import Facts, Objects, classes_of, digest_with
from headrace.sources.reading import read_from

Row = Mapping[str, Any]

URL_COLUMNS = ("file_name", "filename", "file", "filepath", "file_path", "path", "url", "uri", "image", "image_path")
"""Column names that identify the column of objects by default."""

_LIMITS = Limits(fields=2**20)
_CHUNK = 1024


class TableFiles(Objects):
    """The rows of a table, with the bytes of the objects that `columns` name.

    `base` prefixes relative paths.
    """

    def __init__(
        self,
        table: str,
        rows: Sequence[Row],
        columns: Sequence[str],
        base: str,
        *,
        label: str | None = None,
        classes: Sequence[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        facts: Facts = (),
    ) -> None:
        super().__init__((table,), storage_options, facts)
        self.rows, self.columns, self.base, self.label = rows, tuple(columns), base, label
        found = set() if label is None else {str(row[label]) for row in rows}
        self.classes = None if label is None else classes_of(found, classes, table)
        self._numbers = {name: number for number, name in enumerate(self.classes or ())}
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    async def aget(self, key: int) -> dict[str, object]:
        row = self.rows[key]
        places = [self._place(row, column, key) for column in self.columns]
        sample: dict[str, object] = {"__key__": str(row[self.columns[0]]), "__url__": masked(places[0]), **row}
        if self.classes is not None:
            sample["label"] = self._numbers[str(row[str(self.label)])]
        bodies = await for_each(len(places), lambda k: read_from(self.storage_options, places[k]))
        for column, place, body in zip(self.columns, places, bodies, strict=True):
            extension = extension_of(place) or "data"
            field = extension if len(places) == 1 else f"{column}.{extension}"
            if field in row:
                raise FormatError(f"row {key} of {masked(self.urls[0])} has a column {field!r}, as its object would be")
            sample[field] = body
        return sample

    def digest(self) -> str | None:
        if self._digest is None:
            digest = blake2b(digest_size=8)
            for row in self.rows:
                digest.update(repr([row.get(column) for column in self.columns]).encode("utf-8", "surrogatepass"))
            self._digest = digest_with(digest.hexdigest(), self.classes)
        return self._digest

    def _place(self, row: Row, column: str, number: int) -> str:
        value = as_text(row.get(column))
        if not value:
            where = f"row {number} of {masked(self.urls[0])}"
            raise FormatError(
                f"{where}: its column {column!r} names no object: {masked(repr(value)):.80}", url=self.urls[0]
            )
        if "://" not in value and not value.startswith("/"):
            return f"{self.base}{value}"
        if "://" in self.urls[0] and value.startswith(("/", "file:")):
            where = f"row {number} of {masked(self.urls[0])}"
            raise FormatError(f"{where} names a file of this machine: {masked(value)!r:.80}", url=self.urls[0])
        return value


def table_of(
    url: str,
    url_column: str | Sequence[str] | None,
    *,
    base: str | None,
    label_column: str | None,
    classes: Sequence[str] | None,
    storage_options: Mapping[str, object] | None,
    others: Callable[[str], Sequence[Row]],
) -> TableFiles:
    """Return the samples of a table; see `hr.table`.

    `others` reads tables that are neither CSV nor JSON lines.
    """
    rows = _rows(url, storage_options, others)
    if not len(rows):
        raise OptionError.at(url, "has no rows")
    names = list(rows[0])
    columns = [url_column] if isinstance(url_column, str) else list(url_column or _known(url, names))
    for name in [*columns, *([] if label_column is None else [label_column])]:
        check.one_of(f"{masked(url)}: column", name, names)
    if classes is not None and label_column is None:
        raise check.lacking("hr.table(classes=…)", "label_column=, the column with the classes")
    if label_column is not None and "label" in names and label_column != "label":
        raise OptionError.at(url, f"has a column 'label' already: label_column={label_column!r} has no room")
    if taken := [name for name in names if name.startswith("__")]:
        raise OptionError.at(url, f"has the column {taken[0]!r}: names that begin with '__' are taken")
    base = url[: path_of(url).rfind("/") + 1] if base is None else f"{base.rstrip('/')}/" if base else ""
    whose = "as given" if url_column is not None else "by its name"
    facts = [("objects by", f"column {', '.join(columns)} ({whose}) of {masked(url)}"), ("columns", ", ".join(names))]
    table = TableFiles(
        url,
        rows,
        columns,
        base,
        label=label_column,
        classes=classes,
        storage_options=storage_options,
        facts=tuple(facts),
    )
    if table.classes is not None:
        table.facts = (*facts, ("label", f"number of {len(table.classes):,} classes, by column {label_column}"))
    return table


class _Parsed(Sequence[Row]):
    """The rows of a table in memory, each parsed when it is asked for."""

    def __init__(self, form: Format, block: Block, data: bytes, places: Rows) -> None:
        self._form, self._block, self._data = form, block, np.frombuffer(data, np.uint8)
        self._starts, self._stops = places.offset, places.offset + places.size

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        try:
            return self._form.open_block(self._block, [self._body(number)])[0]
        except ValueError as error:
            url = self._block.url
            raise FormatError(f"row {number} of {masked(url)}: {error}", url=url) from error

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _CHUNK):
            numbers = range(start, min(start + _CHUNK, len(self)))
            rows = self._form.open_many(self._block, list(map(self._body, numbers)))
            for number, row in zip_longest(numbers, rows):
                yield self[number] if row is None else row

    def _body(self, number: int) -> bytes:
        return self._data[self._starts[number] : self._stops[number]].tobytes()


def _rows(
    url: str, storage_options: Mapping[str, object] | None, others: Callable[[str], Sequence[Row]]
) -> Sequence[Row]:
    kind = extension_of(url)
    if kind not in ("csv", "tsv", "jsonl", "ndjson") or without_compression(path_of(url)) != path_of(url):
        return packed(others(url))
    form, data = format_named("jsonl" if kind == "ndjson" else kind), blocking(partial(read_from, storage_options, url))
    scanner = form.scanner(url, _LIMITS)
    assert scanner is not None
    places = scanner.feed(memoryview(data), 0, True)
    if scanner.error is not None:
        raise scanner.error
    return _Parsed(form, Block(url, places.fields, _LIMITS), data, places)


def _known(url: str, names: Sequence[str]) -> list[str]:
    known = [name for name in URL_COLUMNS if name in {one.lower() for one in names}]
    found = [name for name in names if name.lower() in known]
    if len(found) != 1:
        which = f"{', '.join(map(repr, found))} may" if found else "none of its columns is known to"
        raise OptionError.at(url, f": {which} name the objects; give url_column=, one of {', '.join(map(repr, names))}")
    return found
