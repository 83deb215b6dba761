"""Constructors of streams: from URLs, and from other data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never

from headrace._util import check
from headrace.dataset.source import blocking
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.ops.operator import EachSample
from headrace.sources.discovery import Names, folders_at, is_pattern, names_at, place_of
from headrace.sources.reading import read_from

if TYPE_CHECKING:
    from headrace.dataset.asynchronous import RanksBy
    from headrace.formats.format import Format
    from headrace.formats.lines import By

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def stream(
    urls: Urls,
    *,
    format: str | Format | None = None,  # noqa: A002 (the common name)
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
    **misplaced: Never,
) -> Stream:
    """Read samples from shards on demand. Nothing is downloaded first.

    Construction makes no request if names show the format. Otherwise a folder, or the folder of a pattern, is listed,
    or the head of the first object is read. `describe()` reports what was found, and how it was detected. A folder of
    images, sounds or the like is `hr.folder`; with a `metadata.csv` beside them it is `hr.table`.

    Members of a tar shard whose names agree up to the first dot after the last slash are one sample: a dict with
    `__key__`, `__url__`, and a field of bytes for the rest of each name, in lower case. Shards may be compressed:
    .tar.gz, .tar.zst, .tar.bz2, .tar.xz, .tar.lz4. A sample of .jsonl is a line, with the object's members as fields;
    of .csv and .tsv a record; of .txt a line; .jsonl.gz and so on, too. A sample of .parquet is a row. A folder of MDS
    shards is given by its own URL, and has its own index.

    With an index, samples have numbers and keys before they are read. Then `len(data)`, `data[i]`,
    `.shuffle("global")`, `.slice()` and `.sample()` work; filters on keys and `.select()` avoid reading what they drop.
    The bytes of each sample are verified with checksums in the index.

    Args:
        urls: A URL or path; a folder; a pattern that lists shards, such as "s3://bucket/train-{000..999}.tar"; a
            pattern that is looked up, such as "s3://bucket/**/*.tar"; or a list of these. Schemes: s3, gs, az, hf,
            http(s), files, and all of fsspec. http(s) is looked up in a server's index pages.
        format: "tar", "jsonl", "parquet" and so on, as in the reference's table; the name of a registered format; or a
            format object with its own options. By default it is detected from the names, or else from the content.
        index: URL of an index file for all shards (`headrace index` makes it), or a list or pattern with one for each
            shard. "beside": one per shard, at its URL plus ".hri". "build": the index in this machine's cache, made
            first if missing. "auto": the index in the cache, if present. None: no index.
        limits: Limits on the resources that archives may demand.
        listing: "new": listings are made now. "kept": the last listing on this machine is used, however old; if there
            is none, it is made and stored.
        storage_options: Options of the store: credentials, endpoint, region.
        **misplaced: Refused. Options of one format, such as columns, belong to the format object.

    Raises:
        OptionError: There is no URL, or the format is unknown.
        FormatError: The catalogue of a folder is damaged.
        TypeError: Another argument was given. For options of a format, the message states where they belong.

    Examples:
        >>> data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().to_tuple("jpg;png", "cls")
        >>> len(data.source.urls)
        1282
    """
    from headrace.sources.shards import opening, shards_at

    if misplaced:
        raise _not_taken(next(iter(misplaced)))
    names = names_at(urls, storage_options, kept=listing == "kept")
    place = place_of(names, format, limits, storage_options, kept=listing == "kept")
    if place.table is not None:
        return table(place.table, storage_options=storage_options)
    if place.folder is not None:
        from headrace.sources.objects import folder_of

        return Stream(folder_of(place.folder, None, labels=None, storage_options=storage_options, facts=place.facts))
    source = shards_at(place, index, limits, storage_options)
    return Stream(source, opening(source, place.entries or ()))


def _not_taken(name: str) -> TypeError:
    """Return the error for an argument that `hr.stream` does not have."""
    way = ""
    if name in ("columns", "where", "filters"):
        name_there = "where" if name == "filters" else name
        way = (
            f": it belongs to the format, as in format=hr.Parquet({name_there}=[…]); .select() takes some of any fields"
        )
    return TypeError(f"hr.stream() got an unexpected keyword argument {name!r}{way}")


def text(
    urls: Urls,
    *,
    by: By = "line",
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    r"""Read lines, paragraphs or wholes of UTF-8 text files as samples with the field `text`.

    Empty lines are samples, too. Line and paragraph ends are removed. The key is the number of a sample's first line,
    from 1. Files may be compressed: .txt.gz, .txt.zst, …, as for `hr.stream`, which also explains the other arguments.

    Args:
        urls: A URL or path, a pattern such as "s3://bucket/{000..999}.txt" or "books/**/*.txt", a folder, or a list of
            these.
        by: "line"; "paragraph": lines between blank lines; "file": a whole object.
        index: Index, so that samples have numbers. "build" makes it if missing.
        limits: Limits on the resources that files may demand.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no URL, or `by` is invalid.

    Examples:
        >>> from headrace.fetch.stores import memory
        >>> memory.put("memory://poems/0.txt", b"Tyger Tyger,\nburning bright\n")
        >>> [sample["text"] for sample in hr.text("memory://poems/0.txt")]
        ['Tyger Tyger,', 'burning bright']
    """
    from headrace.formats.lines import Text

    form = Text(by)
    return stream(urls, format=form, index=index, limits=limits, listing=listing, storage_options=storage_options)


def energon(
    url: str | os.PathLike[str],
    *,
    split: str = "train",
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read a split of a folder prepared by Megatron-Energon, using its indexes.

    Samples are dicts of their members' bytes, as in other tar shards; `__key__` is the sample's number in its shard.
    Samples have numbers from the start: counts are in `.nv-meta`, and only the needed parts of a shard's `.tar.idx` are
    read. Sample processing requested by `dataset.yaml` is not applied; `describe()` reports that.

    Args:
        url: The folder that contains `.nv-meta`.
        split: A split of `split.yaml`.
        limits: Limits on the resources that archives may demand.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no such split; or PyYAML and braceexpand are not installed.
        FormatError: `.nv-meta` is damaged. Raised later for an index that does not match its shard.
        StorageError: There is no such folder.
    """
    from headrace.formats.catalogues import split_path
    from headrace.formats.energon import NAME, Energon
    from headrace.sources.shards import opening, shards_at

    place = os.fspath(url)
    path, rest = split_path(place)
    if not path.endswith(NAME):
        place = f"{path.rstrip('/')}/{NAME}{rest}"
    found = place_of(Names((place,)), Energon(split), limits, storage_options)
    if found.entries is None:
        blocking(partial(read_from, storage_options, place))  # raises the reason
        raise OptionError.at(place, "is no file of Energon's")
    source = shards_at(found, "auto", limits, storage_options)
    return Stream(source, opening(source))


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
    from headrace.sources.objects import Files

    names = names_at(urls, storage_options, kept=listing == "kept", folders=())
    return Stream(Files(names.urls, storage_options, names.facts))


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
    from headrace.sources.objects import folder_of

    kept = listing == "kept"
    place = os.fspath(url)
    if is_pattern(place):
        found = names_at([place], storage_options, kept=kept)
    else:
        found = folders_at((place,), storage_options, kept=kept)
    if len(found.listings) != 1:
        raise OptionError.at(place, "is several places, and hr.folder takes one folder, or one pattern")
    data = folder_of(
        found.listings[0],
        pattern,
        labels=labels,
        storage_options=storage_options,
        classes=classes,
        facts=found.facts,
    )
    return Stream(data)


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
    from headrace.sources.objects import table_of

    data = table_of(
        os.fspath(url),
        url_column,
        base=base,
        label_column=label_column,
        classes=classes,
        storage_options=storage_options,
    )
    return Stream(data)


def from_map(dataset: Any, *, threads: int | None = None) -> Stream:
    """Read samples from a data set, whose `__getitem__` is called in the workers.

    Each worker has a copy of the data set. Random numbers that `__getitem__` draws depend on the seed, the epoch and
    the sample only.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        threads: Call `__getitem__` in this many threads of this process instead, without copies. With 1, calls never
            overlap, even if several loaders use the data set. If calls wait for a disk or the network, and are
            thread-safe, try 16 or more. Draws from the global generators then differ from run to run.

    Raises:
        OptionError: `threads` is not a number of 1 or more.

    Examples:
        >>> list(hr.from_map(["a", "b", "c"]))
        ['a', 'b', 'c']
    """
    from headrace.sources.synchronous import FromMap, get_step

    check.whole_or_none("hr.from_map(): threads", threads, 1)
    data = FromMap(dataset, threads)
    return Stream(data) if threads is not None else Stream(data, (EachSample(get_step(dataset)),))


def from_iterable(
    iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, ranks_by: RanksBy | None = None, one_epoch: bool = False
) -> Stream:
    """Read samples from an iterable, whose `iter` and `next` are called in a thread.

    An iterable with `state_dict` and `load_state_dict`, such as Hugging Face's `IterableDataset`, is resumed with
    these.

    Args:
        iterable: An iterable, iterated over again in each epoch; or a function that is called for one in each epoch.
        ranks_by: How several ranks divide the samples, as in `AsyncIterableDataset.ranks_by`. `hr.shard_info()` works
            in the function, and in the iterable's `iter` and `next`.
        one_epoch: Accept an iterator, such as a generator or an open file. It has samples for one epoch; a second one
            raises an error.

    Raises:
        OptionError: `iterable` is neither an iterable nor a function, or an iterator without `one_epoch=True`.
    """
    from headrace.sources.synchronous import FromIterable, ResumableIterable, is_iterator, makes_one
    from headrace.torch_compat.stateful import is_stateful

    if not (hasattr(iterable, "__iter__") or makes_one(iterable)):
        raise check.invalid("hr.from_iterable(): iterable", iterable, "an iterable, or a function that returns one")
    if not one_epoch and not makes_one(iterable) and is_iterator(iterable):
        needed = "a function that returns a new iterator, as in hr.from_iterable(lambda: …), as one ends with its epoch"
        remedy = "or give one_epoch=True, and loop once"
        raise check.invalid("hr.from_iterable(): iterable", iterable, f"{needed}; {remedy}")
    is_resumable = is_stateful(iterable) and not makes_one(iterable)
    return Stream((ResumableIterable if is_resumable else FromIterable)(iterable, ranks_by, one_epoch=one_epoch))
