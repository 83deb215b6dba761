"""What streams are made by: of addresses, and of data sets of others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.datasets.files import Files
from headrace.datasets.places import opening, shards_at, with_index_built
from headrace.datasets.sharing import RanksBy
from headrace.datasets.stream import Stream
from headrace.datasets.synchronous import FromIterable, FromMap, makes_one
from headrace.datasets.urls import expand
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def stream(
    urls: Urls,
    *,
    format: str | None = None,  # noqa: A002 (the name that the field uses)
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """The samples of shards, read while they are needed; nothing is downloaded first.

    Nothing is asked for here either, but where names do not say the format: then the head of the first object is, or
    the catalogue of a folder.

    Members of a tar shard whose names agree up to the first dot behind the last slash are one sample: a dict with
    `__key__`, `__url__`, and the rest of each name, in lower case, as a field of bytes. Shards may be compressed:
    .tar.gz, .tar.zst, .tar.bz2, .tar.xz, .tar.lz4. Of .jsonl each line is a sample, with the members of its object as
    fields; .jsonl.gz and so on, too. A folder of MDS shards is named by itself, and has an index of its own.

    With an index the samples have numbers and keys before they are read: `len(data)`, `data[i]`, `.shuffle("global")`,
    `.slice()`, `.sample()`, and filters on keys and `.select()` of which nothing is read that they leave out. The
    bytes of each sample are compared with the checksums in it.

    Args:
        urls: an address, a pattern such as "s3://bucket/train-{000..999}.tar", or a list of them; of MDS that of its
            folder. s3, gs, az, http(s), files, and every scheme that fsspec knows.
        format: "tar", "jsonl", "mds", or the name of one that was registered. By default it follows from the names;
            where they do not say it, from what lies there.
        index: the address of an index file for all shards (`headrace index` makes it; wids' are read, too), or a list
            or pattern of one for each (DALI's are read, too). "beside": one for each, at its address with ".hri"
            behind it. "build": the one in this machine's cache, made first where it is missing. "auto": the one in the
            cache, where there is one. None: none.
        limits: how much archives may ask for.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address, or a format that is not known.
        FormatError: the catalogue of a folder is damaged.

    Examples:
        >>> import headrace as hr
        >>> data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().to_tuple("jpg;png", "cls")
        >>> len(data.source.urls)
        1282
    """
    source = shards_at(expand(urls), format, index, limits, storage_options)
    return Stream(source, opening(source))


def with_built_index(stream: Stream) -> Stream:
    """The same stream, its shards with the index of this machine's cache, which is made where it is missing."""
    return Stream(with_index_built(stream.pipeline().source.data), stream.operators)


def files(urls: Urls, *, storage_options: Mapping[str, object] | None = None) -> Stream:
    """One sample for each object, by random access: shuffled globally, with a length.

    Args:
        urls: an address, a pattern, or a list of them.
        storage_options: for the store: credentials, endpoint, region.
    """
    return Stream(Files(expand(urls), storage_options))


def from_map(dataset: Any) -> Stream:
    """Any data set with `__len__` and `__getitem__`, its calls made in threads: as many at once as `fetch_concurrency`
    allows.

    What `__getitem__` draws from Python's, numpy's and torch's global generators is the trainer's, and differs from run
    to run; `hr.rng()` goes by the sample, and so does all that a `.map()` behind it draws in workers.
    """
    return Stream(FromMap(dataset))


def from_iterable(iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, ranks_by: RanksBy | None = None) -> Stream:
    """Any iterable, its `iter` and `next` called in a thread.

    Args:
        iterable: iterated over anew in each epoch; or a function that is called for one in each epoch.
        ranks_by: how several ranks divide its samples, as `AsyncIterableDataset.ranks_by` has it; `hr.shard_info()`
            answers in the function, and in the iterable's `iter` and `next`.

    Raises:
        OptionError: it is neither.
    """
    if not (hasattr(iterable, "__iter__") or makes_one(iterable)):
        raise OptionError(f"hr.from_iterable({iterable!r:.200}): an iterable, or a function that gives one, is needed")
    return Stream(FromIterable(iterable, ranks_by))
