"""Constructors of streams: from URLs, and from other data sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Never

from headrace.dataset.source import blocking
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.sources.discovery import Names, Urls, names_at, place_of
from headrace.sources.reading import read_from

if TYPE_CHECKING:
    from headrace.formats.format import Format
    from headrace.formats.lines import By


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
        from headrace.sources.objects import table

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
