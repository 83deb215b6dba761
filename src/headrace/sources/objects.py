"""Samples that are objects of their own: single files, files of a folder, and objects that a table names."""

from __future__ import annotations

import os
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, groupby, zip_longest
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np

from headrace._util import check
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.compact import packed
from headrace.dataset.source import SampleSource, StoredSource, Traits, blocking
from headrace.dataset.stream import Stream
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.compression import path_of, without_compression
from headrace.formats.decoders import IMAGE_EXTENSIONS
from headrace.formats.limits import Limits
from headrace.formats.registry import format_named
from headrace.sources.discovery import Pattern, Urls, folders_at, is_pattern, names_at
from headrace.sources.entries import Entries, Facts, Listing, entries_of, is_data_folder, survey_of, version_at
from headrace.sources.kinds import extension_of, stem_of, without_extension
from headrace.sources.reading import Options, read_from
from headrace.types import Ints

if TYPE_CHECKING:  # tables import more modules, and folders need none
    from headrace._util.sample_ranges import Rows
    from headrace.formats.format import Block, Format


def classes_of(found: set[str], given: Sequence[str] | None, place: str) -> tuple[str, ...]:
    """Return the classes in the order of their numbers: as given, or sorted."""
    if given is None:
        return tuple(sorted(found))
    classes = tuple(given)
    if isinstance(given, str) or len(set(classes)) < len(classes):
        raise check.invalid("classes", given, "a list of different names")
    if missing := sorted(found - set(classes)):
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        raise OptionError.at(
            place, f"has classes that classes= does not list: {shown}. Add them, or drop their samples"
        )
    return classes


def digest_with(digest: str | None, classes: Sequence[str] | None) -> str | None:
    if digest is None or classes is None:
        return digest
    return blake2b(repr((digest, classes)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(eq=False, repr=False)
class Objects(AsyncDataset):
    """Samples that are objects of their own in a store, each read by one or a few requests."""

    urls: Sequence[str]
    storage_options: Options = None
    facts: Facts = ()

    def __len__(self) -> int:
        return len(self.urls)

    def digest(self) -> str | None:
        """Return a digest of the samples. None: the names of the objects suffice."""
        return None

    async def body(self, number: int) -> bytes:
        """Read an object, in the version that was listed, if known."""
        return await read_from(self.storage_options, self.urls[number], version=version_at(self.urls, number))

    def __sample_source__(self) -> SampleSource:
        return ObjectSource(self)


class Files(Objects):
    """One sample per object: a dict with `__key__`, `__url__` and the bytes under the extension."""

    async def aget(self, key: int) -> dict[str, object]:
        url = self.urls[key]
        name, _, extension = posixpath.basename(urlsplit(url).path).partition(".")
        return {"__key__": name, "__url__": masked(url), extension.lower() or "data": await self.body(key)}


def files(
    urls: Urls, *, listing: Literal["new", "kept"] = "new", storage_options: Mapping[str, object] | None = None
) -> Stream:
    """Read each object as one sample, by random access, with a global shuffle and length.

    Args:
        urls: A URL or path, a pattern such as "photos/{000..999}.jpg" or "photos/**/*.jpg", a folder, or a list of
            these.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Examples:
        >>> photos = hr.files("https://example.org/{000..999}.jpg").shuffle()
        >>> len(photos)
        1000
    """
    names = names_at(urls, storage_options, kept=listing == "kept", folders=())
    return Stream(Files(names.urls, storage_options, names.facts))


class ObjectSource(StoredSource, KeySource):
    data: Objects
    traits = Traits(numbered=True, objects=True)

    @property
    def facts(self) -> list[tuple[str, str]]:
        return [("objects", f"{len(self.urls):,}, read by themselves"), *self.data.facts]

    def fingerprint_with(self, sizes: Ints) -> str:
        digest = self.data.digest()
        if digest is not None and sizes.tolist() == [len(self.data)]:
            return digest
        return super().fingerprint_with(sizes)


_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"})
_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_NAME = re.compile(r"[A-Za-z]\w*")
_KINDS = {"d": r"-?\d+", None: r"[^/]+?"}
_SHOWN = 5


class NamePattern:
    """A pattern of file names: "{split}/{label}_{id:d}.png", where `:d` is a whole number."""

    def __init__(self, text: str) -> None:
        self.text, self.fields, self._numbers = text, list[str](), set[str]()
        regex, end = "", 0
        for match in _FIELD.finditer(text):
            name, kind = match[1], match[2]
            if not _NAME.fullmatch(name) or kind not in _KINDS or name in self.fields:
                raise check.invalid(
                    "pattern", text, f"of fields like {{name}} or {{name:d}}, each name once, not {match[0]!r}"
                )
            regex += f"{re.escape(text[end : match.start()])}(?P<{name}>{_KINDS[kind]})"
            end = match.end()
            self.fields.append(name)
            if kind == "d":
                self._numbers.add(name)
        if not self.fields:
            raise check.invalid("pattern", text, "a pattern with a {name} in it")
        self._regex = re.compile(regex + re.escape(text[end:]))

    def __reduce__(self) -> tuple[object, ...]:
        return NamePattern, (self.text,)

    def of(self, path: str) -> dict[str, object] | None:
        """Return the fields of a path. None: the path does not match."""
        match = self._regex.fullmatch(path)
        if match is None:
            return None
        return {name: int(value) if name in self._numbers else value for name, value in match.groupdict().items()}


async def _bodies(count: int, read: Callable[[int], Awaitable[bytes]]) -> list[bytes]:
    if count == 1:
        return [await read(0)]
    from headrace.formats.pinned_object import for_each

    return await for_each(count, read)


@dataclass(eq=False, repr=False, kw_only=True)
class FolderFiles(Objects):
    """Samples in a folder. Files that differ only in their extension are one sample.

    Attributes:
        urls: All files, sorted.
        starts: First file of each sample, then the number of files. None: each file is a sample.
        has_images: True if image files are the field `image`, whatever their extension.
    """

    folder: str
    has_images: bool
    starts: Ints | None
    classes: tuple[str, ...] | None
    pattern: NamePattern | None

    def __post_init__(self) -> None:
        self._numbers = {name: number for number, name in enumerate(self.classes or ())}

    def __len__(self) -> int:
        return len(self.urls) if self.starts is None else len(self.starts) - 1

    async def aget(self, key: int) -> dict[str, object]:
        first, last = (key, key + 1) if self.starts is None else (int(self.starts[key]), int(self.starts[key + 1]))
        urls = [self.urls[k] for k in range(first, last)]
        path = _path_below(self.folder, urls[0])
        stem = without_extension(path)
        sample: dict[str, object] = {"__key__": stem, "__url__": masked(urls[0]), **self._said(path)}
        bodies = await _bodies(len(urls), lambda k: self.body(first + k))
        for url, body in zip(urls, bodies, strict=True):
            extension = extension_of(url)
            field = "image" if self.has_images and extension in IMAGE_EXTENSIONS else extension or "data"
            if field in sample:
                raise OptionError.at(url, f": sample {stem!r} has two fields {field!r}")
            sample[field] = body
        return sample

    def digest(self) -> str | None:
        return digest_with(survey_of(self.urls).digest, self.classes)

    def _said(self, path: str) -> dict[str, object]:
        if self.pattern is None:
            said: dict[str, object] = {} if self.classes is None else {"label": path.partition("/")[0]}
        else:
            said = self.pattern.of(path) or {}
        label = said.get("label")
        if self.classes is not None and isinstance(label, str):
            said["label"] = self._numbers[label]
        return said


def folder(
    url: str | os.PathLike[str],
    *,
    pattern: str | None = None,
    labels: bool | None = None,
    classes: Sequence[str] | None = None,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read the files of a folder as samples, by random access, with a global shuffle and length.

    Files that differ only in their extension are one sample, with a field for each: `a.jpg` and `a.json`. An image is
    the field `image`, whatever its extension; if a sample has two images, extensions name the fields. If files are in
    subfolders, the first subfolder is their class: `label` is its number, in the order of `source.classes`.

    Args:
        url: The folder, or a pattern such as "photos/**/*.jpg". Files that do not match it are ignored.
        pattern: Meaning of names relative to the folder, such as "{split}/{label}_{id:d}.png". There is a field for
            each `{name}`; `{name:d}` is a number; `label` becomes the number of its class.
        labels: False: subfolders are not classes. True: they are, even if called train and test.
        classes: Class names in the order of their numbers, for equal numbers in training and validation. A class
            without a subfolder counts. By default, the sorted names of the subfolders. Empty local subfolders count,
            too; object stores have none.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: Names do not match the pattern; or files are beside subfolders that may be classes; or a subfolder
            is not in `classes`.
        StorageError: The folder could not be listed.

    Examples:
        >>> from headrace.fetch.stores import memory
        >>> for name in ("cat/1.txt", "cat/2.txt", "dog/3.txt"):
        ...     memory.put(f"memory://pets-at-home/{name}", b"a pet")
        >>> pets = hr.folder("memory://pets-at-home/")
        >>> [(sample["__key__"], sample["label"]) for sample in pets], pets.source.classes
        ([('cat/1', 0), ('cat/2', 0), ('dog/3', 1)], ('cat', 'dog'))
    """
    kept, place = listing == "kept", os.fspath(url)
    if is_pattern(place):
        there = names_at([place], storage_options, kept=kept)
    else:
        there = folders_at((place,), storage_options, kept=kept)
    if len(there.listings) != 1:
        raise OptionError.at(place, "is several places, and hr.folder takes one folder, or one pattern")
    return Stream(
        folder_of(
            there.listings[0],
            pattern,
            labels=labels,
            storage_options=storage_options,
            classes=classes,
            facts=there.facts,
        )
    )


def folder_of(
    listing: Listing,
    pattern: str | None,
    *,
    labels: bool | None,
    storage_options: Options,
    classes: Sequence[str] | None = None,
    facts: Facts = (),
) -> FolderFiles:
    """Return the samples of a listed folder; see `hr.folder`."""
    folder = listing.folder
    named = None if pattern is None else NamePattern(pattern)
    is_asked = labels is True or classes is not None
    found, is_by_folder = set[str](), named is None or named.text.startswith("{label}/")
    if named is not None:
        found = _labels_by_pattern(named, listing)
    elif labels is not False:
        found = _labels_by_folder(listing, is_asked=is_asked)
    if classes is not None and (labels is False or (named is not None and not found)):
        why = "labels=False" if labels is False else f"pattern={pattern!r} has no {{label}} that is a name"
        raise check.conflict("classes=", f"{why}, so that there are no classes,")
    without_files = set[str]()
    if found and is_by_folder and classes is None:
        without_files = _local_folders(listing) - found
    numbered = classes_of(found | without_files, classes, listing.place) if found or classes is not None else None
    urls, starts, fields = _grouped(listing.urls)
    why = "each file" if starts is None else "files that differ in their extensions alone"
    said = [("samples are", f"{why}: {_shown(fields)}")]
    extensions = {extension for sample in fields for extension in sample.split("+")}
    has_images = _has_images(fields) and not (named is not None and "image" in named.fields)
    if has_images:
        said.append(("image", f"field of the files in {', '.join(sorted(extensions & IMAGE_EXTENSIONS))}"))
    if numbered is not None:
        shown = ", ".join(numbered[:_SHOWN]) + (", …" if len(numbered) > _SHOWN else "")
        by = "the pattern" if named is not None else "the first folder's name"
        empty = len(numbered) - len(found)
        count = f"{len(numbered):,} classes" + (f" ({empty:,} of them without files)" if empty else "")
        said.append(("label", f"number of {count}, by {by}: {shown}"))
    return FolderFiles(
        urls,
        folder=folder,
        has_images=has_images,
        starts=starts,
        classes=numbered,
        pattern=named,
        storage_options=storage_options,
        facts=(*facts, *said),
    )


def _labels_by_pattern(pattern: NamePattern, listing: Listing) -> set[str]:
    urls = listing.urls
    found: set[str] = set()
    others, first = 0, ""
    for url in urls:
        path = _path_below(listing.folder, url)
        said = pattern.of(path)
        if said is None:
            others, first = others + 1, first or path
            continue
        label = said.get("label")
        if isinstance(label, str):
            found.add(label)
    if others:
        remedy = f"leave these out by a pattern of addresses, such as '{masked(listing.folder)}*.png'"
        why = f"has {others:,} of {len(urls):,} files that are not named as pattern={pattern.text!r}, such as {first!r}"
        raise OptionError.at(listing.place, f"{why}; {remedy}")
    return found


def _labels_by_folder(listing: Listing, *, is_asked: bool) -> set[str]:
    survey, folder = listing.urls.survey, listing.folder
    found, loose = {_path_below(folder, folder + name) for name in survey.folders}, survey.loose
    if loose and (found or is_asked):
        raise OptionError.at(
            listing.place,
            f"has {loose:,} files beside {len(found)} folders, which may be classes or not: "
            "give labels=False, or the address of the folder whose folders are the classes",
        )
    if found and found <= _SPLITS and not is_asked:
        raise OptionError.at(
            listing.place,
            f"has the folders {', '.join(sorted(found))}, which are no classes: give the "
            f"address of one, such as {masked(listing.folder)}{min(found)}/, or labels=False",
        )
    return found


def _local_folders(listing: Listing) -> set[str]:
    """Return a local folder's subfolders, also empty ones, which listings of files omit."""
    if "://" in listing.folder:
        return set()
    pattern = None if listing.is_whole else Pattern(listing.place)
    with os.scandir(listing.folder or ".") as entries:
        names = {entry.name for entry in entries if entry.is_dir()}
    return {name for name in names if (is_data_folder(name) if pattern is None else pattern.matches_below(name))}


def _path_below(folder: str, url: str) -> str:
    """Return the path of a URL below a folder, unescaped for http(s)."""
    path = url[len(folder) :]
    if "%" not in path or not folder.startswith(("http://", "https://")):
        return path
    return "/".join(unquote(part, errors="surrogateescape").replace("/", "%2F") for part in path.split("/"))


def _has_images(samples: Iterable[str]) -> bool:
    """True if there are images, and at most one per sample. `samples` are extensions, as `a+b`."""
    counts = [sum(extension in IMAGE_EXTENSIONS for extension in sample.split("+")) for sample in samples]
    return max(counts, default=0) == 1 and all("image" not in sample.split("+") for sample in samples)


def _grouped(urls: Entries) -> tuple[Entries, Ints | None, Counter[str]]:
    """Group sorted files into samples. Return the files, starts of samples, and their kinds.

    Sorting keeps files together that agree up to the first dot, but not always those that agree up to the last.
    """
    if urls.survey.is_single:
        return urls, None, Counter({name or "data": n for name, n in urls.survey.extensions.items()})
    is_sorted, lengths, fields = True, array("q"), Counter[str]()
    for _, group in groupby(urls, stem_of):
        some = list(group)
        in_order = sorted(some, key=_name_and_url) if len(some) > 1 else some
        is_sorted = is_sorted and in_order == some
        for _, files in groupby(in_order, without_extension):
            extensions = [extension_of(url) or "data" for url in files]
            lengths.append(len(extensions))
            fields["+".join(extensions)] += 1
    if not is_sorted:
        groups = groupby(urls.listed(), lambda one: stem_of(one.path))
        in_groups = (sorted(group, key=lambda one: _name_and_url(one.path)) for _, group in groups)
        revision, urls = urls.revision, entries_of(chain.from_iterable(in_groups), urls.start)
        urls.revision = revision
    if len(lengths) == len(urls):
        return urls, None, fields
    return urls, np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))]), fields


def _shown(fields: Counter[str]) -> str:
    counts = [*fields.most_common(_SHOWN)]
    return ", ".join(f"{count:,} of {name}" for name, count in counts) + (", …" if len(fields) > _SHOWN else "")


def _name_and_url(url: str) -> tuple[str, str]:
    return without_extension(url), url


Row = Mapping[str, Any]

URL_COLUMNS = ("file_name", "filename", "file", "filepath", "file_path", "path", "url", "uri", "image", "image_path")
"""Column names that identify the column of objects by default."""

_LIMITS = Limits(fields=2**20)
_CHUNK = 1024


@dataclass(eq=False, repr=False, kw_only=True)
class TableFiles(Objects):
    """The rows of a table, with the bytes of the objects that `columns` name.

    `base` prefixes relative paths. `classes` are the values of the column `label`.
    """

    rows: Sequence[Row]
    columns: tuple[str, ...]
    base: str
    label: str | None
    classes: tuple[str, ...] | None

    def __post_init__(self) -> None:
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
        bodies = await _bodies(len(places), lambda k: read_from(self.storage_options, places[k]))
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
        value = row.get(column)
        if type(value) is not str or not value:
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


def table(
    url: str | os.PathLike[str],
    *,
    url_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
    base: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read the rows of a table as samples, each with the bytes of the object that it names.

    The table is read when the stream is made, and an object when its sample is requested, by random access. A sample
    has the row's columns, and the object's bytes under its extension.

    Args:
        url: A .csv, .tsv or .jsonl file, or shards that `hr.stream` reads. CSV has a header line, and its values are
            texts.
        url_column: Column with URLs of objects, or paths relative to the table's folder. For several columns, the bytes
            are stored under the column's name and the extension, as in "mask.png". By default the one called file_name,
            path, image or the like.
        label_column: Column of class names: `label` is the class number, in the order of `source.classes`.
        classes: Values of that column in the order of their numbers, including those without rows. By default, the
            sorted values of the rows.
        base: Folder of relative paths, instead of the table's.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no such column; or a value of `label_column` is not in `classes`.
        FormatError: The table is damaged.
    """
    url = os.fspath(url)
    rows = _rows(url, storage_options)
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
    numbered: tuple[str, ...] | None = None
    if label_column is not None:
        for lacking in (number for number, row in enumerate(rows) if label_column not in row):
            raise FormatError.at(url, f"row {lacking} has no column {label_column!r}")
        numbered = classes_of({str(row[label_column]) for row in rows}, classes, url)
        facts.append(("label", f"number of {len(numbered):,} classes, by column {label_column}"))
    data = TableFiles(
        (url,),
        storage_options,
        tuple(facts),
        rows=rows,
        columns=tuple(columns),
        base=base,
        label=label_column,
        classes=numbered,
    )
    return Stream(data)


def _rows(url: str, storage_options: Mapping[str, object] | None) -> Sequence[Row]:
    kind = extension_of(url)
    if kind not in ("csv", "tsv", "jsonl", "ndjson") or without_compression(path_of(url)) != path_of(url):
        from headrace.sources.constructors import stream

        rows = stream(url, storage_options=storage_options)
        return packed({name: value for name, value in row.items() if not name.startswith("__")} for row in rows)
    from headrace.formats.format import Block

    form, data = format_named("jsonl" if kind == "ndjson" else kind), blocking(partial(read_from, storage_options, url))
    scanner = form.scanner(url, _LIMITS)
    assert scanner is not None
    places = scanner.feed(memoryview(data), 0, True)
    if scanner.error is not None:
        raise scanner.error
    return packed(_parsed(form, Block(url, places.fields, _LIMITS), data, places))


def _parsed(form: Format, block: Block, data: bytes, places: Rows) -> Iterator[Row]:
    starts, stops = places.offset.tolist(), (places.offset + places.size).tolist()
    for at in range(0, len(starts), _CHUNK):
        bodies = [
            data[start:stop] for start, stop in zip(starts[at : at + _CHUNK], stops[at : at + _CHUNK], strict=True)
        ]
        for k, (row, body) in enumerate(zip_longest(form.open_many(block, bodies), bodies)):
            try:
                found = form.open_block(block, [body])[0] if row is None else row
            except ValueError as error:
                raise FormatError(f"row {at + k} of {masked(block.url)}: {error}", url=block.url) from error
            assert found is not None
            yield found


def _known(url: str, names: Sequence[str]) -> list[str]:
    known = [name for name in URL_COLUMNS if name in {one.lower() for one in names}]
    found = [name for name in names if name.lower() in known]
    if len(found) != 1:
        which = f"{', '.join(map(repr, found))} may" if found else "none of its columns is known to"
        raise OptionError.at(url, f": {which} name the objects; give url_column=, one of {', '.join(map(repr, names))}")
    return found
