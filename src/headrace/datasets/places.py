"""What addresses stand for: shards of which format, and where their index lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.datasets.blocking import blocking
from headrace.datasets.operators import EachSample
from headrace.datasets.shards import IndexedShards, Shards
from headrace.datasets.urls import expand
from headrace.errors import OptionError, masked
from headrace.formats.format import Format, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.opening import Opener
from headrace.formats.registry import SNIFFED_BYTES, format_named, format_of, known_formats, sniffed
from headrace.indexes.building import beside, cache_path, cached
from headrace.indexes.index import BuiltFile, FileForEach, Index, IndexFiles, OneFile
from headrace.indexes.of_format import OwnTables
from headrace.reading import found
from headrace.tasks import Step

IndexAt = str | os.PathLike[str] | Sequence[str] | None
Asks = Callable[[str, int | None], bytes | None]
Options = Mapping[str, object] | None


def shards_at(
    urls: tuple[str, ...],
    format_name: str | None,
    index: IndexAt,
    limits: Limits,
    storage_options: Options,
) -> Shards | IndexedShards:
    """The shards at some addresses; see `hr.stream`.

    Raises:
        OptionError: their format, or where their index lies, is not said.
        FormatError, StorageError: a catalogue that lists them cannot be read.
    """
    form = format_of(urls) if format_name is None else format_named(format_name)
    asks = partial(_read, storage_options)
    if form is None and (listed := _catalogue(urls, None, asks, limits)) is not None:
        form, entries = listed
        return _with_own_tables(form, entries, index, limits, storage_options)
    if form is None:
        form = _sniffed(urls, asks)
    if form.catalogue is not None and (listed := _catalogue(urls, form, asks, limits)) is not None:
        return _with_own_tables(form, listed[1], index, limits, storage_options)
    if form.scanner(urls[0], limits) is None:
        return _with_own_tables(form, [ShardEntry(url) for url in urls], index, limits, storage_options)
    where = _index_of(urls, index, form, limits, storage_options)
    if where is None:
        return Shards(urls, storage_options, limits, form)
    return IndexedShards(urls, Index(urls, where, limits, form), storage_options, limits, form)


def opening(source: Shards | IndexedShards) -> tuple[EachSample, ...]:
    """What must be done to the samples of shards before all else: nothing, where they are their members."""
    if source.format.fields_are_members:
        return ()
    opener = Opener(source.format, source.limits)
    return (EachSample(Step(f"open({source.format.name})", "map", opener, is_implied=True), opens=True),)


def with_index_built(source: Shards) -> IndexedShards:
    """The same shards with the index of this machine's cache, which is made where it is missing."""
    where = BuiltFile(str(cache_path(source.urls, source.storage_options, source.format)), source.limits, source.format)
    index = Index(source.urls, where, source.limits, source.format)
    return IndexedShards(source.urls, index, source.storage_options, source.limits, source.format)


def _with_own_tables(
    form: Format, entries: Sequence[ShardEntry], index: IndexAt, limits: Limits, storage_options: Options
) -> IndexedShards:
    if index not in ("auto", None):
        raise OptionError(f"index={index!r}: shards of the format {form.name!r} bring their own index along")
    urls = tuple(entry.url for entry in entries)
    if not urls:
        raise OptionError(f"the catalogue of the format {form.name!r} names no shards")
    return IndexedShards(
        urls, Index(urls, OwnTables(form, entries, limits), limits, form), storage_options, limits, form
    )


def _catalogue(
    urls: tuple[str, ...], form: Format | None, asks: Asks, limits: Limits
) -> tuple[Format, list[ShardEntry]] | None:
    """(the format, the shards) of the folders, or catalogues, at `urls`; None where they are none.

    Args:
        form: whose catalogues; None: any, which is found by what they say.
    """
    named = {one.catalogue: one for one in known_formats().values() if one.catalogue and form in (None, one)}
    entries: list[ShardEntry] = []
    for url in urls:
        end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
        name = url[:end].rpartition("/")[2]
        places = {url: named[name]} if name in named else {}
        if not places and "." not in name:
            places = {f"{url[:end].rstrip('/')}/{known}{url[end:]}": one for known, one in named.items()}
        for place, one in places.items():
            data = asks(place, None)
            if data is None or (form is None and one.sniff(one.catalogue or "", data[:SNIFFED_BYTES]) <= 0):
                continue
            form = form or one
            entries += one.listed(place, data, limits)
            break
        else:
            if entries:
                raise OptionError(f"{masked(url)} is no folder of {form.name if form else 'shards'}, and others are")
            return None
    return None if form is None else (form, entries)


def _sniffed(urls: tuple[str, ...], asks: Asks) -> Format:
    head = asks(urls[0], SNIFFED_BYTES)
    form = None if head is None else sniffed(urls[0], head)
    if form is None:
        names = ", ".join(suffix for one in known_formats().values() for suffix in one.suffixes)
        raise OptionError(
            f"{masked(urls[0])} does not say its format, and its first bytes do not either; names in {names} do, or "
            "give format='tar'"
        )
    return form


def _read(storage_options: Options, url: str, count: int | None) -> bytes | None:
    """The first bytes of an object, or all of it; None where it cannot be read."""
    return blocking(partial(found, url, count, storage_options))


def _index_of(
    urls: tuple[str, ...], index: IndexAt, form: Format, limits: Limits, storage_options: Options
) -> IndexFiles | None:
    if index is None:
        return None
    if not index or not isinstance(index, str | os.PathLike | list | tuple):
        raise OptionError(f"index={index!r}: an address, a list of them, 'beside', 'build', 'auto' or None is meant")
    if index == "build":
        return BuiltFile(str(cache_path(urls, storage_options, form)), limits, form)
    if index == "auto":
        place = cached(urls, storage_options, form)
        return None if place is None else OneFile(str(place))
    if index == "beside":
        return FileForEach([beside(url) for url in urls])
    files = expand(index)
    return OneFile(files[0]) if len(files) == 1 else FileForEach(files)
