"""Shards as data sets, read sequentially, or by member with an index, and those of a detected location."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.context import copies_samples, running_charge, running_reader
from headrace._util.reads import Version
from headrace._util.sample_ranges import BLOCK_READS, Rows, Scanner, texts_of
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.compact import packed
from headrace.dataset.source import KeepsKey, ReadsMany, SampleSource, StoredSource, Traits, Wanted, blocking, forwarded
from headrace.dataset.stream import Stream
from headrace.errors import ChecksumError, ObjectChangedError, OptionError, masked
from headrace.fetch.coalescer import paid
from headrace.formats.compression import Decompressor
from headrace.formats.format import Format, ShardEntry, packing_of
from headrace.formats.index import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.opening import BLOCK, PLACE, ROW, Opener, SharedBlock, is_kept
from headrace.formats.pinned_object import for_each
from headrace.formats.tar.member_check import MemberNames
from headrace.formats.tar.scanner import TAR
from headrace.indexes.cache_path import beside, cache_path, cached
from headrace.indexes.index import BuiltFile, FileForEach, HeldReads, Index, IndexFiles, OneFile, OwnTables
from headrace.ops.operator import EachSample
from headrace.readers.indexed_shards import Members
from headrace.readers.protocol import Producer
from headrace.readers.sequential import Expected
from headrace.sources.bodies import (
    FROM_ITS_START,
    UnpackedShards,
    Where,
    bodies_at,
    bodies_of_shards,
    unpacked_bodies,
    version_of,
)
from headrace.sources.discovery import Place, expand
from headrace.sources.entries import Facts, shown, version_at
from headrace.sources.reading import Options, OwnReaders, is_file, number_of
from headrace.types import Ints
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.engine.open_readers import EpochIO
    from headrace.fetch.reader import Reader

T = TypeVar("T")

_LOOKED_AT = 1000  # shard names that are inspected
_FRAMES_BYTES = 4 * 2**20  # serves samples that are read sequentially, or a few at a time


@dataclass(frozen=True)
class Shards:
    urls: Sequence[str]
    storage_options: Options
    limits: Limits
    format: Format
    facts: Facts

    async def expected(self, ordinal: int) -> Expected:
        return Expected(version_at(self.urls, ordinal) or Version(), None)

    def by_index(self, files: IndexFiles) -> IndexedShards:
        index = Index(self.urls, files, self.limits, self.format)
        return IndexedShards(self.urls, index, self.storage_options, self.limits, self.format, self.facts)

    def __sample_source__(self) -> SampleSource:
        return ShardSource(self)


@dataclass(eq=False, repr=False)
class IndexedShards(AsyncDataset):
    """Samples of shards by number, each read by one request for its members, and verified."""

    urls: Sequence[str]
    index: Index
    storage_options: Options
    limits: Limits
    format: Format
    facts: Facts = ()

    def __post_init__(self) -> None:
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self._blocks = HeldReads[tuple[SharedBlock, int]](lambda one: one[1])  # with their sizes
        self._sample_bytes: float | None = None
        self._passing: dict[tuple[int, ...], tuple[tuple[KeepsKey, ...], Ints]] = {}  # by ids of the filters
        self._opener = Opener(self.format, self.limits)
        self._frames = HeldReads[bytes](len, _FRAMES_BYTES)
        self._unpacked = WeakKeyDictionary[asyncio.AbstractEventLoop, UnpackedShards]()

    def __reduce__(self) -> tuple[object, ...]:
        return IndexedShards, (self.urls, self.index, self.storage_options, self.limits, self.format, self.facts)

    def __sample_source__(self) -> SampleSource:
        return IndexedShardSource(self)

    @property
    def _opened(self) -> Index:
        if not self.index.is_open:
            blocking(self.aopen)
        return self.index

    def __len__(self) -> int:
        return int(self._opened.starts[-1])

    def __getitem__(self, key: int) -> dict[str, object]:
        return blocking(partial(self.aget, key))

    @property
    def blocks(self) -> Ints | None:
        """First sample number of each block, then the total, if samples share blocks."""
        return self._opened.blocks

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample, estimated from the first shard if the index has no mean."""
        if self._sample_bytes is None:
            len(self)
            self._sample_bytes = blocking(self._mean_bytes)
        return self._sample_bytes

    async def _mean_bytes(self) -> float:
        if self.index.mean_bytes is not None:
            return self.index.mean_bytes
        filled = np.flatnonzero(np.diff(self.index.starts))
        if not len(filled):
            return 0.0
        async with self._readers.use():
            shard = await self.index.shard(current_reader(), int(filled[0]))
        return max(float(shard.rows.size.sum()), shard.opened_bytes) / len(shard.rows)

    async def aopen(self) -> None:
        if not self.index.is_open:
            async with self._readers.use() as reader:
                await self.index.open(reader)

    async def aclose(self) -> None:
        for held in (self._blocks, self._frames):
            await held.aclose()
            held.clear()
        await self.index.aclose()

    async def aget(self, key: int, wanted: Wanted | None = None) -> dict[str, object]:
        """Return sample `key`: a dict with `__key__`, `__url__` and its (wanted) fields as bytes.

        Outside a loader, concurrent calls on one event loop share their connections.
        """
        async with self._readers.use():
            await self.aopen()
            return await self.get(self.number(key), wanted)

    def number(self, key: int) -> int:
        """Return the number of sample `key`, which may be negative. The index must be open."""
        return number_of(key, int(self.index.starts[-1]), "sample")

    async def get_scattered(self, number: int, wanted: Wanted | None) -> dict[str, object]:
        """Return a sample. Raise OptionError if its shard can be unpacked from its start only."""
        ordinal, _ = self.index.locate(number)
        if self._where(ordinal, await self.index.shard(current_reader(), ordinal)).is_only_in_order:
            raise OptionError.at(self.urls[ordinal], f"{FROM_ITS_START}")
        return await self.get(number, wanted)

    def _where(self, ordinal: int, shard: ShardIndex) -> Where:
        url, unpacked = self.urls[ordinal], self._unpacked.setdefault(asyncio.get_running_loop(), UnpackedShards())
        return Where(url, shard, self.limits, packing_of(self.format_of(ordinal), url), unpacked, self._frames)

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, object]:
        ordinal, row = self.index.locate(number)
        shard = await self.index.shard(current_reader(), ordinal)
        try:
            return (await self._of_block(ordinal, shard, np.array([row]), wanted))[0]
        except (ChecksumError, ObjectChangedError) as error:
            error.key = _key(shard.rows, row)
            raise

    async def _of_block(
        self, ordinal: int, shard: ShardIndex, chosen: Ints, wanted: Wanted | None
    ) -> list[dict[str, object]]:
        """Return the samples in some rows of one block of a shard."""
        reader, rows, block = current_reader(), shard.rows, int(chosen[0])
        if rows.block is not None:
            block = int(rows.block[block])
        part = slice(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = [rows.fields[k] for k in rows.field[part].tolist()]
        places = list(zip(rows.offset[part].tolist(), rows.size[part].tolist(), strict=True))
        crc = [None] * len(names) if shard.crc is None else shard.crc[part].tolist()
        kept = list(range(len(names)))
        if wanted is not None and not any(some.isdisjoint(names) for some in wanted):
            kept = [k for k in kept if any(names[k] in some for some in wanted)]
        source: dict[str, object] = {"__url__": masked(self.urls[ordinal])}
        if places and not self.format_of(ordinal).fields_are_members:
            source[PLACE] = places[0][0]

        async def members() -> list[tuple[str, bytes]]:
            where = self._where(ordinal, shard)
            called = MemberNames.of(rows, part.start + np.array(kept)) if self._has_headers(shard) and kept else None
            bodies = await bodies_at(reader, where, [places[k] for k in kept], [crc[k] for k in kept], called)
            return list(zip([names[k] for k in kept], bodies, strict=True))

        nbytes = sum(places[k][1] for k in kept)

        async def shared() -> tuple[SharedBlock, int]:
            about = None if rows.about is None else rows.about[block]
            return SharedBlock(next(BLOCK_READS), (await members()).copy, about), nbytes

        if rows.row is None:
            source |= await members()
            return [{"__key__": _key(rows, block), **source}]
        await paid(running_charge.get(), nbytes)  # as if it was read for these samples alone: it may be evicted
        found, _ = await self._blocks.get((ordinal, block, *kept), shared)
        source[BLOCK] = found
        samples = [{"__key__": _key(rows, row), **source, ROW: int(rows.row[row])} for row in chosen.tolist()]
        if not copies_samples.get():  # else each task would have the whole block
            return samples
        opened, is_quick = self._opener.opened, self._opener.has(found.number)
        return opened(samples) if is_quick else await anyio.to_thread.run_sync(opened, samples)

    async def get_many(self, numbers: Sequence[int], wanted: Wanted | None = None) -> list[dict[str, object]]:
        """Return samples, see `ReadsMany`. Those of a block share it. Else nearby members are read together."""
        starts, by_shard = self.index.starts.data, dict[int, set[int]]()  # few: arrays would take longer
        for number in numbers:
            by_shard.setdefault(bisect_right(starts, number) - 1, set()).add(number)
        groups, others = list[tuple[int, ShardIndex, Ints]](), list[tuple[int, ShardIndex, Ints]]()
        async with self._readers.use():
            for ordinal, some in by_shard.items():
                shard = await self.index.shard(current_reader(), ordinal)
                rows, block = np.array(sorted(some)) - starts[ordinal], shard.rows.block
                if block is None:
                    others.append((ordinal, shard, rows))
                else:
                    edges = np.flatnonzero(np.diff(block[rows])) + 1
                    groups += [(ordinal, shard, part) for part in np.split(rows, edges)]
            found = await for_each(len(groups), lambda k: self._of_block(*groups[k], wanted))
            found += await self._without_blocks(others, wanted) if others else []
        samples: dict[int, dict[str, object]] = {}
        for (ordinal, _, rows), of_rows in zip(groups + others, found, strict=True):
            samples |= zip((starts[ordinal] + rows).tolist(), of_rows, strict=True)
        return [samples[number].copy() for number in numbers]

    async def _without_blocks(
        self, visits: Sequence[tuple[int, ShardIndex, Ints]], wanted: Wanted | None
    ) -> list[list[dict[str, object]]]:
        """Return the samples of each visit: (shard number, shard, ascending rows)."""
        reader, wheres = current_reader(), [self._where(ordinal, shard) for ordinal, shard, _ in visits]
        members = [await self.members(ordinal, rows, wanted) for ordinal, _, rows in visits]
        if any(where.packing is not None or where.shard.frames is not None for where in wheres):
            bodies = await for_each(len(visits), lambda k: unpacked_bodies(reader, wheres[k], members[k]))
        else:
            bodies = await bodies_of_shards(reader, [(w.url, some) for w, some in zip(wheres, members, strict=True)])
        found = []
        for (ordinal, *_), (rows, *_), values in zip(visits, members, bodies, strict=True):
            url, is_placed = masked(self.urls[ordinal]), not self.format_of(ordinal).fields_are_members
            names, offsets, samples = [rows.fields[k] for k in rows.field.tolist()], rows.offset.tolist(), []
            for key, (begin, end) in zip(texts_of(rows.keys), pairwise(rows.starts.tolist()), strict=True):
                sample: dict[str, object] = {"__key__": key, "__url__": url}
                if is_placed and begin < end:
                    sample[PLACE] = offsets[begin]
                sample.update(zip(names[begin:end], values[begin:end], strict=True))
                samples.append(sample)
            found.append(samples)
        return found

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        """Return the locations of some samples of a shard, by row, with the wanted members."""
        shard = await self.index.shard(current_reader(), ordinal)
        rows, crc = shard.rows, shard.crc
        if len(chosen) < len(rows):
            crc = None if crc is None else crc[rows.members(chosen)]
            rows = rows.take(chosen)
        if wanted is not None and not (mask := _wanted_members(rows, wanted)).all():
            rows, crc = rows.only(mask), None if crc is None else crc[mask]
        return Members(rows, crc, shard.size, version_of(shard), self._has_headers(shard))

    def format_of(self, ordinal: int) -> Format:
        return self.format

    def _has_headers(self, shard: ShardIndex) -> bool:
        return shard.has_names and self.format.name == TAR.name

    async def expected(self, ordinal: int) -> Expected:
        """Return the version and sample count of a shard, as indexed or listed."""
        count = int(self.index.starts[ordinal + 1] - self.index.starts[ordinal])
        return Expected(version_of(await self.index.shard(current_reader(), ordinal)), count)

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints:
        """Return the numbers of all samples whose keys pass. Reads the index of every shard."""
        ids = tuple(map(id, keeps))
        if ids not in self._passing:
            chosen = self.of_each_shard(partial(_passing, keeps=keeps))
            numbers = np.concatenate([a + b for a, b in zip(chosen, self.index.starts[:-1], strict=True)])
            self._passing[ids] = keeps, numbers
        return self._passing[ids][1]

    def of_each_shard(self, of_rows: Callable[[Rows], T]) -> list[T]:
        async def one(ordinal: int) -> T:
            return of_rows((await self.index.shard(current_reader(), ordinal)).rows)

        async def all_of_them() -> list[T]:
            async with self._readers.use():
                await self.aopen()
                return await for_each(len(self.urls), one)

        return blocking(all_of_them)


class _Sharded(StoredSource):
    @property
    def only_in_order(self) -> str | None:
        for url in self.urls:
            if packing_of(self.data.format, url) not in (None, "zstd"):  # zstd may have seekable frames
                return f"{masked(url)} {FROM_ITS_START}"
        return None

    @property
    def is_compressed(self) -> bool:
        return any(packing_of(self.data.format, url) is not None for url in self.urls)

    @property
    def text(self) -> str:
        return f"stream({shown(self.urls)})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        data, urls = self.data, self.urls
        facts = dict(data.facts or [("format", data.format.name)])
        kinds = {kind for url in urls[:_LOOKED_AT] if (kind := packing_of(data.format, url)) is not None}
        packing = f"yes ({', '.join(sorted(kinds))}): read from their start" if kinds else "not as a whole"
        count = f"{len(urls):,}, {masked(urls[0])}" + (f" to {masked(urls[-1])}" if len(urls) > 1 else "")
        known = "the format's own" if self.traits.numbered else "none: samples are found while they are read"
        index = facts.pop("index", known)
        return [("shards", count), *facts.items(), ("compressed", packing), ("index", index)]


class ShardSource(_Sharded):
    data: Shards
    traits = Traits(sharded=True)

    def indexed(self) -> Stream:
        data = self.data
        place = cache_path(data.urls, data.storage_options, data.format)
        return Stream(data.by_index(BuiltFile(str(place), data.limits, data.format)))

    def open(self, io: EpochIO) -> Producer:
        return io.shards(*_ways(self.data), self.data.expected)


class IndexedShardSource(_Sharded, KeySource):
    data: IndexedShards
    traits = Traits(numbered=True, sharded=True)
    sample_bytes = forwarded("data")
    blocks = forwarded("data")

    @property
    def has_count(self) -> bool:
        return self.data.index.is_open

    @property
    def starts(self) -> Ints:
        self.count()
        return self.data.index.starts

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:
        return by_number or by_key or not self.is_compressed

    async def aget(self, key: Any, wanted: Wanted | None = None) -> object:
        return await self.data.aget(key, wanted)

    def many(self, wanted: Wanted | None) -> ReadsMany | None:
        return partial(self.data.get_many, wanted=wanted)

    def divides(self) -> bool:
        return not self.is_compressed

    def keys(self) -> Sequence[str]:
        return packed(key for keys in self.data.of_each_shard(lambda rows: texts_of(rows.keys)) for key in keys)

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints | None:
        return self.data.passing(keeps) if keeps else None

    def open(self, io: EpochIO) -> Producer:
        if io.planning is None:
            return io.shards(*_ways(self.data), self.data.expected)
        wanted = io.pipeline.wanted
        if not io.pipeline.is_by_number:
            return io.ranges(partial(self.data.members, wanted=wanted))
        is_apart = io.pipeline.scatters is not None and self.is_compressed
        get = self.data.get_scattered if is_apart else self.data.get
        is_local = all(map(is_file, self.urls))  # other samples are used as each arrives
        many = self.many(wanted) if is_local and not is_apart else None
        return io.keys(self.data, partial(get, wanted=wanted), many)


def current_reader() -> Reader:
    reader = running_reader.get()
    assert reader is not None
    return reader


def _key(rows: Rows, row: int) -> str:
    return bytes(rows.keys[row]).decode("utf-8", "surrogateescape")


def _passing(rows: Rows, keeps: Sequence[KeepsKey]) -> Ints:
    return np.flatnonzero([all(keep(key) for keep in keeps) for key in texts_of(rows.keys)])


def _wanted_members(rows: Rows, wanted: Wanted) -> NDArray[np.bool_]:
    """Mask the wanted members, or all of a block that lacks one, for a complete error message."""
    count = len(rows.starts) - 1
    mask = np.zeros(len(rows.field), np.bool_)
    is_complete = np.ones(count, np.bool_)
    block = np.repeat(np.arange(count), np.diff(rows.starts))
    for names in wanted:
        numbers = [k for k, name in enumerate(rows.fields) if name in names]
        these = np.isin(rows.field, numbers)
        mask |= these
        is_complete &= np.bincount(block[these], minlength=count) > 0
    return np.asarray(mask | ~is_complete[block])


def _ways(data: Shards | IndexedShards) -> tuple[Callable[[str], Scanner], Callable[[str], Decompressor | None]]:
    def scanner(url: str) -> Scanner:
        found = data.format.scanner(url, data.limits)
        assert found is not None, "shards without a scanner are read by their tables"
        return found

    def unpacks(url: str) -> Decompressor | None:
        kind = packing_of(data.format, url)
        return None if kind is None else Decompressor(kind, url, data.limits, is_padded=True)

    return scanner, unpacks


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
    is_ours = type(source.format).__module__.partition(".")[0] == "headrace"
    step = Step(
        f"open({source.format.name})",
        "map",
        opener,
        is_implied=True,
        open_many=None if type(source.format).open_many is Format.open_many else opener.open_many,
        open_rows=opener.open_rows,
        is_without_torch=is_ours and not source.format.gives_tensors(entries),
    )
    by_field = source.format.members_make_fields
    opens = EachSample(step, opens=True, opens_fields=by_field)
    rows = source.format.row_filter(source.urls)
    if rows is None:
        return (opens,)
    keeps = EachSample(Step(rows.text, "filter", is_kept), opens=True, opens_fields=by_field, asks=rows.fields)
    return opens, keeps


def _by_own_tables(shards: Shards, entries: Sequence[ShardEntry], index: IndexAt) -> IndexedShards:
    name = shards.format.name
    if index not in ("auto", None):
        raise check.invalid(
            "index", index, f"'auto' or None: shards of the format {name!r} bring their own index along"
        )
    if not shards.urls:
        raise check.empty(f"the catalogue of the format {name!r}", "shards")
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
