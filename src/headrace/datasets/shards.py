"""Tar shards as data sets: read whole, or by member where an index tells where those lie."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace.datasets.base import AsyncDataset, blocking
from headrace.datasets.own_readers import OwnReaders
from headrace.errors import (
    ChecksumError,
    FormatError,
    LimitError,
    ObjectChangedError,
    OptionError,
    masked,
    not_as_indexed,
)
from headrace.fetch.checksums import crc32c_of
from headrace.fetch.members import Members
from headrace.fetch.shards import Expected
from headrace.formats.compression.decompressor import kind_of, unpack_frame
from headrace.formats.compression.seekable import Frames
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.indexes.index import Index, for_each
from headrace.types import Buffer, Ints, Reads, Rows, Version, running_reader

T = TypeVar("T")

_GAP_BYTES = 16 * 1024

KeepsKey = Callable[[str], Any]
"""Says of a sample's key whether it is wanted."""


Wanted = tuple[frozenset[str], ...]
"""Of each of these sets of fields at least one is wanted, if a sample has any."""


@dataclass(frozen=True)
class Shards:
    """Shards in object storage, whose samples are found while they are read."""

    urls: tuple[str, ...]
    storage_options: Mapping[str, Any] | None = None
    limits: Limits = DEFAULTS

    @property
    def is_compressed(self) -> bool:
        """Whether any of them can be read from its start only."""
        return any(kind_of(url) is not None for url in self.urls)


class IndexedShards(AsyncDataset):
    """The samples of tar shards by number, each got by one request: just its members, and those checked.

    Args:
        urls: the shards.
        index: where the samples lie.
        storage_options: for the store.
        limits: how much archives may ask for.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        index: Index,
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        self.urls, self.index, self.storage_options, self.limits = urls, index, storage_options, limits
        self._readers = OwnReaders(storage_options, index.aclose)
        self._sample_bytes: float | None = None
        self._passing: dict[tuple[int, ...], tuple[tuple[KeepsKey, ...], Ints]] = {}  # by their ids, which live as long

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedShards, (self.urls, self.index, self.storage_options, self.limits)

    def __len__(self) -> int:
        if not self.index.is_open:
            blocking(self.aopen)
        return int(self.index.starts[-1])

    def __getitem__(self, key: int) -> dict[str, Any]:
        return cast("dict[str, Any]", blocking(partial(self.aget, key)))

    @property
    def has_members(self) -> bool:
        """Whether the index tells where samples lie, and not only how many there are."""
        if not self.index.is_open:
            blocking(self.aopen)
        return self.index.has_members

    @property
    def is_compressed(self) -> bool:
        """Whether any of them can be read from its start only."""
        return any(kind_of(url) is not None for url in self.urls)

    @property
    def sample_bytes(self) -> float:
        """The mean size of a sample, with all its members; of the first shard where the index says it of each alone."""
        if self._sample_bytes is None:
            len(self)
            self._sample_bytes = cast("float", blocking(self._mean_bytes))
        return self._sample_bytes

    async def _mean_bytes(self) -> float:
        if self.index.mean_bytes is not None:
            return self.index.mean_bytes
        filled = np.flatnonzero(np.diff(self.index.starts))
        if not len(filled):
            return 0.0
        async with self._readers.use():
            shard = await self.index.shard(_reader(), int(filled[0]))
        return float(shard.rows.size.sum()) / len(shard.rows)

    async def aopen(self) -> None:
        if not self.index.is_open:
            async with self._readers.use() as reader:
                await self.index.open(reader)

    async def aclose(self) -> None:
        await self.index.aclose()

    async def aget(self, key: int) -> dict[str, Any]:
        """Sample `key` of all: a dict with `__key__`, `__url__` and its fields as bytes.

        Outside a loader, those who ask at the same time on one event loop share their connections.

        Raises:
            IndexError: there are fewer samples.
            ChecksumError: its bytes are not those that were indexed.
            ObjectChangedError: the shard is another one.
        """
        async with self._readers.use():
            await self.aopen()
            return await self.get(self.number(key), None)

    def number(self, key: int) -> int:
        """The number of sample `key`, which counts from the end where it is negative; the index is open.

        Raises:
            IndexError, TypeError: there is no such sample.
        """
        count = int(self.index.starts[-1])
        try:
            return range(count)[operator.index(key)]
        except IndexError:
            raise IndexError(f"there is no sample {key}: there are {count}") from None

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, Any]:
        """Sample `number`, with those of its fields that are wanted."""
        reader = _reader()
        ordinal, row = self.index.locate(number)
        shard = await self.index.shard(reader, ordinal)
        rows, url = shard.rows, self.urls[ordinal]
        key = rows.keys[row].decode("utf-8", "surrogateescape")
        part = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
        names = [rows.fields[k] for k in rows.field[part].tolist()]
        places = list(zip(rows.offset[part].tolist(), rows.size[part].tolist(), strict=True))
        crc = [None] * len(names) if shard.crc is None else shard.crc[part].tolist()
        kept = list(range(len(names)))
        if wanted is not None and not any(some.isdisjoint(names) for some in wanted):
            kept = [k for k in kept if any(names[k] in some for some in wanted)]
        try:
            bodies = await self._bodies(reader, url, shard, [places[k] for k in kept], [crc[k] for k in kept])
        except ChecksumError as error:
            error.key = key
            raise
        return {"__key__": key, "__url__": url, **dict(zip([names[k] for k in kept], bodies, strict=True))}

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        """Some samples of one shard, by their numbers there, with the members that are wanted."""
        shard = await self.index.shard(_reader(), ordinal)
        rows, crc = shard.rows, shard.crc
        if len(chosen) < len(rows):
            crc = None if crc is None else crc[rows.members(chosen)]
            rows = rows.take(chosen)
        if wanted is not None and not (mask := _wanted_members(rows, wanted)).all():
            rows, crc = rows.only(mask), None if crc is None else crc[mask]
        return Members(rows, crc, shard.size, _version(shard))

    async def expected(self, ordinal: int) -> Expected:
        """What the index says of one shard, without its members where it does not tell those."""
        count = int(self.index.starts[ordinal + 1] - self.index.starts[ordinal])
        if not self.index.has_members:
            return Expected(Version(), count)
        return Expected(_version(await self.index.shard(_reader(), ordinal)), count)

    def passing(self, keeps: tuple[KeepsKey, ...]) -> Ints:
        """The numbers of all samples whose keys are wanted; every shard's index is read for that."""
        ids = tuple(map(id, keeps))
        if ids not in self._passing:
            chosen = self._of_each_shard(partial(_passing, keeps=keeps))
            numbers = np.concatenate([a + b for a, b in zip(chosen, self.index.starts[:-1], strict=True)])
            self._passing[ids] = keeps, numbers
        return self._passing[ids][1]

    def keys_of_samples(self) -> list[str]:
        """The keys of all samples, in the order of the shards; every shard's index is read for that."""
        return [key for keys in self._of_each_shard(_texts) for key in keys]

    def _of_each_shard(self, told: Callable[[Rows], T]) -> list[T]:
        async def one(ordinal: int) -> T:
            return told((await self.index.shard(_reader(), ordinal)).rows)

        async def all_of_them() -> list[T]:
            async with self._readers.use():
                await self.aopen()
                return await for_each(len(self.urls), one)

        return cast("list[T]", blocking(all_of_them))

    async def _bodies(
        self, reader: Reads, url: str, shard: ShardIndex, places: list[tuple[int, int]], crc: list[int | None]
    ) -> list[bytes]:
        """The members at these (offset, size), checked; what lies together is read at once."""
        if not places:
            return []
        if shard.frames is not None or kind_of(url) is not None:
            return await self._unpacked_bodies(reader, url, shard, places, crc)
        groups: list[list[int]] = []
        for k, (at, _) in enumerate(places):
            if groups and at - sum(places[groups[-1][-1]]) <= _GAP_BYTES:
                groups[-1].append(k)
            else:
                groups.append([k])
        bodies: list[bytes] = [b""] * len(places)

        async def read(group: list[int]) -> None:
            begin, end = places[group[0]][0], sum(places[group[-1]])
            inside = [(k, places[k][0] - begin, sum(places[k]) - begin) for k in group]

            def is_right(data: Buffer) -> bool:
                for k, a, b in inside:
                    bodies[k] = bytes(data[a:b])
                return all(crc[k] in (None, crc32c_of(bodies[k])) for k in group)

            data = await reader.read(url, begin, end, check=is_right, version=_version(shard))
            if len(data) < end - begin:
                raise _another(url, begin, end, len(data))

        if len(groups) == 1:
            await read(groups[0])
        else:
            await for_each(len(groups), lambda k: read(groups[k]))
        return bodies

    async def _unpacked_bodies(
        self, reader: Reads, url: str, shard: ShardIndex, places: list[tuple[int, int]], crc: list[int | None]
    ) -> list[bytes]:
        """The same of a compressed shard: whole frames of it are read."""
        frames = shard.frames
        if frames is None or len(frames.packed) < 3:
            raise OptionError(
                f"{masked(url)} can only be unpacked from its start: read it in order or shuffled by windows, "
                "or pack it in the seekable format of Zstandard"
            )
        begin, end = places[0][0], sum(places[-1])
        first = int(np.searchsorted(frames.unpacked, begin, side="right")) - 1
        stop = int(np.searchsorted(frames.unpacked, max(end, begin + 1), side="left"))
        packed, unpacked = frames.packed[first : stop + 1].tolist(), frames.unpacked[first : stop + 1].tolist()
        some = Frames(np.array(packed), np.array(unpacked))

        def bodies_of(data: Buffer) -> list[bytes] | None:
            """The members, if they are right."""
            try:
                whole = _unpack(data, some, self.limits)
            except LimitError:
                raise
            except FormatError:
                return None
            bodies = [whole[at - unpacked[0] : at - unpacked[0] + size] for at, size in places]
            is_right = all(want in (None, crc32c_of(body)) for body, want in zip(bodies, crc, strict=True))
            return bodies if is_right else None

        read = partial(reader.read, url, packed[0], packed[-1], version=_version(shard))
        bodies = await anyio.to_thread.run_sync(bodies_of, await read())
        if bodies is None:
            bodies = bodies_of(await read(check=lambda data: bodies_of(data) is not None))
        assert bodies is not None
        return bodies


def _reader() -> Reads:
    reader = running_reader.get()
    assert reader is not None
    return reader


def _another(url: str, start: int, stop: int, count: int) -> ObjectChangedError:
    return not_as_indexed(url, f"of bytes {start} to {stop} it has only {count}")


def _unpack(data: Buffer, frames: Frames, limits: Limits) -> bytes:
    packed, sizes = frames.packed - frames.packed[0], np.diff(frames.unpacked)
    pieces = zip(packed[:-1].tolist(), packed[1:].tolist(), sizes.tolist(), strict=True)
    return b"".join(unpack_frame(data[a:b], size, limits) for a, b, size in pieces)


def _version(shard: ShardIndex) -> Version:
    """What a shard must be like; where each member is checked, its ETag may be that of a copy."""
    return Version(None if shard.size < 0 else shard.size, shard.etag if shard.crc is None else None)


def _texts(rows: Rows) -> list[str]:
    return [key.decode("utf-8", "surrogateescape") for key in rows.keys.tolist()]


def _passing(rows: Rows, keeps: Sequence[KeepsKey]) -> Ints:
    return np.flatnonzero([all(keep(key) for keep in keeps) for key in _texts(rows)])


def _wanted_members(rows: Rows, wanted: Wanted) -> NDArray[np.bool_]:
    """Which members are wanted; all of a sample that lacks one of them: it will be said what it has."""
    mask = np.zeros(len(rows.field), np.bool_)
    is_complete = np.ones(len(rows), np.bool_)
    sample = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    for names in wanted:
        numbers = [k for k, name in enumerate(rows.fields) if name in names]
        these = np.isin(rows.field, numbers)
        mask |= these
        is_complete &= np.bincount(sample[these], minlength=len(rows)) > 0
    return np.asarray(mask | ~is_complete[sample])
