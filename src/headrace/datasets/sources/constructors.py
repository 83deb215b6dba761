"""What streams are made by: of addresses, and of data sets of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never

from headrace.datasets.blocking import blocking
from headrace.datasets.operators.values import EachSample
from headrace.datasets.places.guessing import Names, folders_at, names_at, place_of
from headrace.datasets.places.patterns import is_pattern
from headrace.datasets.sharing import RanksBy
from headrace.datasets.sources.placed_shards import opening, shards_at, with_index_built
from headrace.datasets.stream import Stream
from headrace.errors import OptionError, masked
from headrace.formats.format import Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.numbers import is_whole
from headrace.producers.resumable import gives_state
from headrace.reading import read_from

if TYPE_CHECKING:
    from headrace.formats.plain_text import By

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def stream(
    urls: Urls,
    *,
    format: str | Format | None = None,  # noqa: A002 (the name that the field uses)
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
    **misplaced: Never,
) -> Stream:
    """The samples of shards, read while they are needed; nothing is downloaded first.

    Nothing is asked for here either, but where names do not say what is there: then a folder, or that of a pattern, is
    listed, or the head of the first object is read. `describe()` says what was found, and why it was taken for that.
    A folder of pictures, sounds or the like is `hr.folder`; with a `metadata.csv` beside them it is `hr.table`.

    Members of a tar shard whose names agree up to the first dot behind the last slash are one sample: a dict with
    `__key__`, `__url__`, and the rest of each name, in lower case, as a field of bytes. Shards may be compressed:
    .tar.gz, .tar.zst, .tar.bz2, .tar.xz, .tar.lz4. Of .jsonl each line is a sample, with the members of its object as
    fields, of .csv and .tsv each record, of .txt each line; .jsonl.gz and so on, too. Of .parquet each row is one. A
    folder of MDS shards is named by itself, and has an index of its own.

    With an index the samples have numbers and keys before they are read: `len(data)`, `data[i]`, `.shuffle("global")`,
    `.slice()`, `.sample()`, and filters on keys and `.select()` of which nothing is read that they leave out. The
    bytes of each sample are compared with the checksums in it.

    Args:
        urls: an address; that of a folder; a pattern, such as "s3://bucket/train-{000..999}.tar", which names each, or
            "s3://bucket/**/*.tar", which is looked up; or a list of them. s3, gs, az, hf, http(s), files, and every
            scheme that fsspec knows; http(s) is looked up by a server's index pages.
        format: "tar", "jsonl", "parquet" and so on, as the reference's table has them, or the name of one that was
            registered; or a format itself, with options of its own. By default it follows from the names; where they do
            not say it, from what lies there.
        index: the address of an index file for all shards (`headrace index` makes it; wids' are read, too), or a list
            or pattern of one for each (DALI's are read, too). "beside": one for each, at its address with ".hri"
            behind it. "build": the one in this machine's cache, made first where it is missing. "auto": the one in the
            cache, where there is one. None: none.
        limits: how much archives may ask for.
        listing: "new": what has to be looked up is looked up now. "kept": the list that this machine has from the last
            time is taken, however old it is; without one it is looked up, and kept.
        storage_options: for the store: credentials, endpoint, region.
        **misplaced: nothing: what a format alone knows, such as columns, is said with it.

    Raises:
        OptionError: no address, or a format that is not known.
        FormatError: the catalogue of a folder is damaged.
        TypeError: another argument; of those that are a format's the message says where they belong.

    Examples:
        >>> import headrace as hr
        >>> data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().to_tuple("jpg;png", "cls")
        >>> len(data.source.urls)
        1282
    """
    if misplaced:
        raise _not_taken(next(iter(misplaced)))
    names = names_at(urls, storage_options, kept=listing == "kept")
    place = place_of(names, format, limits, storage_options, kept=listing == "kept")
    if place.table is not None:
        return table(place.table, storage_options=storage_options)
    if place.folder is not None:
        from headrace.datasets.sources.folders import folder_of

        return Stream(folder_of(place.folder, None, labels=None, storage_options=storage_options, facts=place.facts))
    source = shards_at(place, index, limits, storage_options)
    return Stream(source, opening(source, place.entries or ()))


def _not_taken(name: str) -> TypeError:
    """The error of an argument that `hr.stream` does not have."""
    way = ""
    if name in ("columns", "where", "filters"):
        name_there = "where" if name == "filters" else name
        way = (
            f": it belongs to the format, as in format=hr.Parquet({name_there}=[…]); .select() takes some of any fields"
        )
    return TypeError(f"hr.stream() got an unexpected keyword argument {name!r}{way}")


def with_built_index(stream: Stream) -> Stream:
    """The same stream, its shards with the index of this machine's cache, which is made where it is missing."""
    return Stream(with_index_built(stream.pipeline().source.data), stream.operators)


def text(
    urls: Urls,
    *,
    by: By = "line",
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    r"""The lines of text files in UTF-8, each a sample with the field `text`; or their paragraphs, or all of each.

    Empty lines are samples, too. What ends a line, or a paragraph, is left out. The key is the number of the line that
    a sample begins in, from 1. Files may be compressed: .txt.gz, .txt.zst, …, as for `hr.stream`, which the other
    arguments are of.

    Args:
        urls: an address, a pattern such as "s3://bucket/{000..999}.txt" or "books/**/*.txt", that of a folder, or a
            list of them.
        by: "line"; "paragraph": lines between those that are blank; "file": all of an object.
        index: where samples lie, so that they have numbers: "build" makes it where it is missing.
        limits: how much they may ask for.
        listing: as in `hr.stream`.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address, or another `by`.

    Examples:
        >>> import headrace as hr
        >>> from headrace.fetch.stores import memory
        >>> memory.put("memory://poems/0.txt", b"Tyger Tyger,\nburning bright\n")
        >>> [sample["text"] for sample in hr.text("memory://poems/0.txt")]
        ['Tyger Tyger,', 'burning bright']
    """
    from headrace.formats.plain_text import Text

    form = Text(by)
    return stream(urls, format=form, index=index, limits=limits, listing=listing, storage_options=storage_options)


def energon(
    url: str | os.PathLike[str],
    *,
    split: str = "train",
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """A split of a folder that Megatron-Energon has prepared, by the indexes that lie there.

    Samples are dicts of their members' bytes, as those of other tar shards are; `__key__` is the sample's number in its
    shard. They have numbers from the start: the counts are in `.nv-meta`, and of a shard's `.tar.idx` as much is read
    as is needed. What `dataset.yaml` wants done with samples is not done, and `describe()` says so.

    Args:
        url: the folder, in which `.nv-meta` lies.
        split: one of those in `split.yaml`.
        limits: how much archives may ask for.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: there is no such split; or PyYAML and braceexpand are not installed.
        FormatError: `.nv-meta` is damaged. An index that does not fit its shard is one when that is read.
        StorageError: there is no such folder.
    """
    from headrace.formats.energon import NAME, Energon

    place = os.fspath(url)
    end = min((at for at in (place.find("?"), place.find("#")) if at >= 0), default=len(place))
    if not place[:end].endswith(NAME):
        place = f"{place[:end].rstrip('/')}/{NAME}{place[end:]}"
    found = place_of(Names((place,)), Energon(split), limits, storage_options)
    if found.entries is None:
        blocking(partial(read_from, storage_options, place))  # says why it cannot be read
        raise OptionError(f"{masked(place)} is no file of Energon's")
    source = shards_at(found, "auto", limits, storage_options)
    return Stream(source, opening(source))


def files(
    urls: Urls, *, listing: Literal["new", "kept"] = "new", storage_options: Mapping[str, object] | None = None
) -> Stream:
    """One sample for each object, by random access: shuffled globally, with a length.

    Args:
        urls: an address, a pattern such as "photos/{000..999}.jpg" or "photos/**/*.jpg", that of a folder, or a list
            of them.
        listing: as in `hr.stream`.
        storage_options: for the store: credentials, endpoint, region.
    """
    from headrace.datasets.sources.files import Files

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
    """The files of a folder as samples, by random access: shuffled globally, with a length.

    Files that differ in their extensions alone are one sample, with a field for each: `a.jpg` and `a.json`. An image is
    the field `image`, whatever its extension; if samples have two images, extensions name the fields. Where files lie
    in folders, the first folder's name is their class: `label` is its number, in the order of `source.classes`.

    Args:
        url: the folder, or a pattern such as "photos/**/*.jpg": what it leaves out is not looked at.
        pattern: what names say, from the folder on, such as "{split}/{label}_{id:d}.png": a field for each `{name}`, of
            `{name:d}` a number; of `label` the number of its class.
        labels: False: folders are no classes. True: they are, also such as are called train and test.
        classes: The class names in the order of their numbers, for the same numbers in training and validation. A
            class without a folder counts. By default these are the sorted names of the folders. Empty folders of this
            machine count, too; object stores have no empty folders.
        listing: as in `hr.stream`.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: files are not named as the pattern says; or lie beside folders that may be classes; or a folder
            is not in `classes`.
        StorageError: the folder was not listed.

    Examples:
        >>> import headrace as hr
        >>> from headrace.fetch.stores import memory
        >>> for name in ("cat/1.txt", "cat/2.txt", "dog/3.txt"):
        ...     memory.put(f"memory://pets/{name}", b"a pet")
        >>> pets = hr.folder("memory://pets/")
        >>> [(sample["__key__"], sample["label"]) for sample in pets], pets.source.classes
        ([('cat/1', 0), ('cat/2', 0), ('dog/3', 1)], ('cat', 'dog'))
    """
    from headrace.datasets.sources.folders import folder_of

    kept = listing == "kept"
    place = os.fspath(url)
    if is_pattern(place):
        found = names_at([place], storage_options, kept=kept)
    else:
        found = folders_at((place,), storage_options, kept=kept)
    if len(found.listings) != 1:
        raise OptionError(f"hr.folder({masked(place)!r}): one folder, or one pattern, is needed")
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
    """The rows of a table as samples, each with the bytes of the object that it names, by random access.

    The table is read when the stream is made; of the objects each when its sample is asked for. A sample has the row's
    columns, and the object's bytes under its extension.

    Args:
        url: of .csv, .tsv or .jsonl, or of shards that `hr.stream` reads. CSV has a line of names, and gives texts.
        url_column: the column that names the objects: an address, or a path from the table's folder on. Of several the
            bytes are under the column's name and the extension, as in "mask.png". By default the one that is called
            file_name, path, image or the like.
        label_column: the column whose values are classes: `label` is their number, in the order of `source.classes`.
        classes: The values of that column in the order of their numbers, also such as no row has. By default these are
            the values of the rows, sorted.
        base: the folder that paths are meant from, in the place of the table's.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: there is no such column; or a value of `label_column` is not in `classes`.
        FormatError: the table is damaged.
    """
    from headrace.datasets.sources.tables import table_of

    place = os.fspath(url)

    def rows_of(other: str) -> list[dict[str, Any]]:
        rows = stream(other, storage_options=storage_options)
        return [{name: value for name, value in row.items() if not name.startswith("__")} for row in rows]

    return Stream(
        table_of(
            place,
            url_column,
            base=base,
            label_column=label_column,
            classes=classes,
            storage_options=storage_options,
            others=rows_of,
        )
    )


def from_map(dataset: Any, *, threads: int | None = None) -> Stream:
    """Read samples from a data set with `__len__` and `__getitem__`, which is called in the workers.

    Each worker has a copy of the data set. What `__getitem__` draws from random number generators depends on the seed,
    the epoch and the sample only.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        threads: Call `__getitem__` in so many threads of this process instead, and copy nothing. With 1 no two calls
            overlap, also if several loaders use the data set. If calls wait for a disk or the network, and are safe in
            several threads, try 16 or more. What they draw from the global generators differs from run to run.

    Raises:
        OptionError: `threads` is not a number of 1 or more.

    Examples:
        >>> import headrace as hr
        >>> list(hr.from_map(["a", "b", "c"]))
        ['a', 'b', 'c']
    """
    from headrace.datasets.sources.synchronous import FromMap, get_step

    if threads is not None and not is_whole(threads, 1):
        raise OptionError(f"hr.from_map(threads={threads!r}): a number of 1 or more is needed")
    data = FromMap(dataset, threads)
    return Stream(data) if threads is not None else Stream(data, (EachSample(get_step(dataset)),))


def from_iterable(
    iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, ranks_by: RanksBy | None = None, one_epoch: bool = False
) -> Stream:
    """Read samples from an iterable, whose `iter` and `next` are called in a thread.

    One with `state_dict` and `load_state_dict`, as Hugging Face's `IterableDataset` is, is resumed by these.

    Args:
        iterable: iterated over anew in each epoch; or a function that is called for one in each epoch.
        ranks_by: how several ranks divide its samples, as `AsyncIterableDataset.ranks_by` has it; `hr.shard_info()`
            answers in the function, and in the iterable's `iter` and `next`.
        one_epoch: Accept an iterator, such as a generator or an open file. It has samples for one epoch; a second one
            raises an error.

    Raises:
        OptionError: `iterable` is neither an iterable nor a function, or an iterator without `one_epoch=True`.
    """
    from headrace.datasets.sources.synchronous import FromIterable, ResumableIterable, is_iterator, makes_one

    if not (hasattr(iterable, "__iter__") or makes_one(iterable)):
        raise OptionError(f"hr.from_iterable({iterable!r:.200}): an iterable, or a function that gives one, is needed")
    if not one_epoch and not makes_one(iterable) and is_iterator(iterable):
        raise OptionError(
            f"hr.from_iterable({iterable!r:.200}) is an iterator, which would be empty in its second epoch. Give a "
            "function that returns a new one, as in hr.from_iterable(lambda: …), or one_epoch=True"
        )
    is_resumable = gives_state(iterable) and not makes_one(iterable)
    return Stream((ResumableIterable if is_resumable else FromIterable)(iterable, ranks_by, one_epoch=one_epoch))
