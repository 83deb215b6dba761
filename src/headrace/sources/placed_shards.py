"""Shards of a detected location, with their index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from headrace._util import check
from headrace.errors import OptionError, masked_text
from headrace.formats.format import Format, ShardEntry, opens_many
from headrace.formats.limits import Limits
from headrace.formats.opening import Opener, is_kept
from headrace.indexes.cache_path import beside, cache_path, cached
from headrace.indexes.index import BuiltFile, FileForEach, IndexFiles, OneFile
from headrace.ops.operator import EachSample
from headrace.sources.discovery.entries import version_at
from headrace.sources.discovery.guessing import Options, Place
from headrace.sources.discovery.urls import expand
from headrace.sources.shards import IndexedShards, Shards
from headrace.workers.tasks import Step

IndexAt = str | os.PathLike[str] | Sequence[str] | None

_INDEX_WORDS = {
    "auto": "that of this machine's cache",
    "build": "built where it is missing",
    "beside": "beside each shard",
}


def shards_at(place: Place, index: IndexAt, limits: Limits, storage_options: Options) -> Shards | IndexedShards:
    """Return the shards of a location; see `hr.stream`."""
    form, entries = place.format, place.entries
    assert form is not None, "single samples are there, and no shards"
    urls: Sequence[str] = place.urls if entries is None else [one.url for one in entries]
    shards = Shards(urls, storage_options, limits, form, place.facts)
    if entries is None and form.scanner(urls[0], limits) is None:
        entries = [ShardEntry(url, version=version_at(urls, k)) for k, url in enumerate(urls)]
    if entries is not None:
        return _by_own_tables(shards, entries, index)
    where = _index_of(urls, index, form, limits, storage_options)
    if where is None:
        return shards
    facts = (*place.facts, ("index", _INDEX_WORDS.get(str(index), "as given")))
    return replace(shards, facts=facts).by_index(where)


def opening(source: Shards | IndexedShards, entries: Sequence[ShardEntry] = ()) -> tuple[EachSample, ...]:
    """Return the steps that decode blocks of shards. Empty for formats whose fields are members."""
    if source.format.fields_are_members:
        return ()
    opener = Opener(source.format, source.limits)
    name = f"open({source.format.name})"
    step = Step(
        name,
        "map",
        opener,
        is_implied=True,
        open_many=opener.open_many if opens_many(source.format) else None,
        open_rows=opener.open_rows,
        is_without_torch=_is_ours(source.format) and not source.format.gives_tensors(entries),
    )
    by_field = source.format.members_make_fields
    opens = EachSample(step, opens=True, opens_fields=by_field)
    rows = source.format.row_filter(source.urls)
    if rows is None:
        return (opens,)
    keeps = EachSample(Step(rows.text, "filter", is_kept), opens=True, opens_fields=by_field, asks=rows.fields)
    return opens, keeps


def _is_ours(form: Format) -> bool:
    return type(form).__module__.partition(".")[0] == "headrace"


def _by_own_tables(shards: Shards, entries: Sequence[ShardEntry], index: IndexAt) -> IndexedShards:
    name = shards.format.name
    if index not in ("auto", None):
        raise OptionError(
            f"index={masked_text(repr(index))}: shards of the format {name!r} bring their own index along"
        )
    from headrace.indexes.embedded import OwnTables

    if not shards.urls:
        raise OptionError(f"the catalogue of the format {name!r} names no shards")
    return shards.by_index(OwnTables(shards.format, entries, shards.limits))


def _index_of(
    urls: Sequence[str], index: IndexAt, form: Format, limits: Limits, storage_options: Options
) -> IndexFiles | None:
    if index is None:
        return None
    if not index or not isinstance(index, str | os.PathLike | list | tuple):
        raise check.invalid("index", index, "an address, a list of them, 'beside', 'build', 'auto' or None")
    if index == "build":
        return BuiltFile(str(cache_path(urls, storage_options, form)), limits, form)
    if index == "auto":
        place = cached(urls, storage_options, form)
        return None if place is None else OneFile(str(place))
    if index == "beside":
        return FileForEach([beside(url) for url in urls])
    files = expand(index)
    return OneFile(files[0]) if len(files) == 1 else FileForEach(files)
