"""The index of a data set's shards: numbers of samples, and their locations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from headrace._util.context import running_charge
from headrace._util.pickled import Lru
from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, OptionError, StageError, masked
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index import Directory, ShardIndex, check_block, read_directory, read_head
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import for_each
from headrace.types import Ints

_FIRST_BYTES = 4 * 2**20


class OpenedIndex(NamedTuple):
    """An opened index.

    Attributes:
        counts: Number of samples of each shard.
        mean_bytes: Mean size of a sample with all its members. None: unknown.
        blocks: If samples share blocks, the first sample number of each block, and the total last.
        load: Returns the sample locations of a shard, or None if only the count of its samples is known.
    """

    counts: Ints
    load: Callable[[Reads, int], Awaitable[ShardIndex | None]]
    mean_bytes: float | None = None
    blocks: Ints | None = None


class IndexFiles(Protocol):
    """Location of an index. Holds nothing that it read, so it can be sent to other processes."""

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        """Read the numbers of samples of the shards. `hold` gets a shard's index if known already."""
        ...


class Index:
    """Sample locations of shards. A shard's part is read when needed, and cached.

    Thread-safe; for several event loops. Copies, also in other processes, are opened again. `limits` are for reading an
    archive's headers, if the index has only counts.
    """

    def __init__(self, urls: Sequence[str], files: IndexFiles, limits: Limits, form: Format) -> None:
        self._urls, self._files, self._limits, self._format = urls, files, limits, form
        self._opened: OpenedIndex | None = None
        self._starts: Ints | None = None
        self._held = HeldReads(_nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self._urls, self._files, self._limits, self._format)

    @property
    def is_open(self) -> bool:
        return self._starts is not None

    @property
    def mean_bytes(self) -> float | None:
        return None if self._opened is None else self._opened.mean_bytes

    @property
    def blocks(self) -> Ints | None:
        """First sample number of each block, and the total; None if samples share no blocks."""
        return None if self._opened is None else self._opened.blocks

    @property
    def starts(self) -> Ints:
        """First sample number of each shard, and the total. The index must be open."""
        assert self._starts is not None
        return self._starts

    async def open(self, reader: Reads) -> None:
        """Read the numbers of samples: one request, or one for each shard with its own index."""
        if not self.is_open:
            self._opened = await self._files.open(reader, self._urls, self._held.hold)
            self._starts = np.concatenate([[0], np.cumsum(self._opened.counts)])

    async def aclose(self) -> None:
        await self._held.aclose()

    def locate(self, number: int) -> tuple[int, int]:
        """Return the shard of sample `number`, and its number in the shard."""
        ordinal = int(np.searchsorted(self.starts, number, side="right")) - 1
        return ordinal, number - int(self.starts[ordinal])

    async def shard(self, reader: Reads, ordinal: int) -> ShardIndex:
        return await self._held.get(ordinal, partial(self._load, reader, ordinal))

    async def _load(self, reader: Reads, ordinal: int) -> ShardIndex:
        assert self._opened is not None
        url = self._urls[ordinal]
        shard = await self._opened.load(reader, ordinal)
        if shard is None:
            from headrace.indexes.building import build_shard

            shard = await build_shard(reader, url, form=self._format, limits=self._limits, headers_only=True)
        count = int(self._opened.counts[ordinal])
        if len(shard.rows) != count:
            raise FormatError(
                f"the index counts {count} samples of {masked(url)}, which has {len(shard.rows)}; make a new index",
                url=url,
            )
        return shard


class OneFile:
    """One index file for all shards."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        file = await open_file(reader, self._url, urls)

        async def load(reader: Reads, ordinal: int) -> ShardIndex | None:
            block = await file.block(reader, ordinal)
            return ShardIndex.unpack(block, masked(file.url)) if block else None

        samples, nbytes = file.directory.samples[file.order], file.directory.nbytes[file.order]
        mean = None if not nbytes.all() or not samples.sum() else float(nbytes.sum() / samples.sum())
        return OpenedIndex(samples, load, mean)


class BuiltFile(OneFile):
    """An index file on this machine, built from headers if missing, without checksums."""

    def __init__(self, url: str, limits: Limits, form: Format) -> None:
        super().__init__(url)
        self._limits, self._format = limits, form

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        from headrace.indexes.building import build_file

        await build_file(reader, urls, Path(self._url), form=self._format, limits=self._limits)
        return await super().open(reader, urls, hold)


class FileForEach:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        if len(urls) != len(self._urls):
            raise OptionError(f"index= names {len(self._urls)} files for {len(urls)} shards; one for each is needed")
        load = partial(self._load, urls)

        async def count(ordinal: int) -> int:
            shard = await load(reader, ordinal)
            hold(ordinal, shard)
            return len(shard.rows)

        return OpenedIndex(np.array(await for_each(len(urls), count), np.int64), load)

    async def _load(self, shards: Sequence[str], reader: Reads, ordinal: int) -> ShardIndex:
        url = self._urls[ordinal]
        what = masked(url)
        data = await reader.read(url)
        directory = read_directory(data, what)
        found = 0 if len(directory) == len(shards) == 1 else directory.find(shards[ordinal])
        if found is None:
            raise FormatError(f"{what} does not list {masked(shards[ordinal])}", url=url)
        start, stop, check = directory.block(found)
        check_block(data[start:stop], check, what)
        return ShardIndex.unpack(data[start:stop], what)


class OpenedFile(NamedTuple):
    """An index file: its first bytes, its directory, and the number of each shard in the directory."""

    url: str
    head: bytes
    directory: Directory
    order: Ints

    async def block(self, reader: Reads, ordinal: int) -> bytes:
        """Return the block of a shard. Empty if only its samples were counted."""
        start, stop, check = self.directory.block(int(self.order[ordinal]))
        block = self.head[start:stop] if stop <= len(self.head) else await reader.read(self.url, start, stop)
        if stop > start:
            check_block(block, check, masked(self.url))
        return block


async def open_file(reader: Reads, url: str, urls: Sequence[str]) -> OpenedFile:
    """Read the directory of the index file at `url`, which must list `urls`."""
    what = masked(url)
    head = await reader.read(url, 0, _FIRST_BYTES)
    end = read_head(head, what)
    if end > len(head):
        head += await reader.read(url, len(head), end)
    directory = read_directory(head, what)
    order = directory.find_all(urls)
    missing = np.flatnonzero(order < 0)
    if len(missing):
        more = f" and {len(missing) - 1} more shards" if len(missing) > 1 else ""
        raise FormatError(
            f"{what} does not list {masked(urls[missing[0]])}{more}: make an index of all shards", url=url
        )
    return OpenedFile(url, head, directory, order)


def _nbytes(shard: ShardIndex) -> int:
    rows = shard.rows
    arrays = (rows.starts, rows.field, rows.offset, rows.size, rows.block, rows.row)
    return rows.keys.nbytes + sum(array.nbytes for array in arrays if array is not None)


class JoinedFiles:
    """Concatenated indexes, which stay open with their caches for other users."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = tuple(indexes)

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        for index in self._indexes:
            await index.open(reader)
        counts = [np.diff(index.starts) for index in self._indexes]
        firsts = np.cumsum([0, *map(len, counts)])

        async def load(reader: Reads, ordinal: int) -> ShardIndex:
            k = int(np.searchsorted(firsts, ordinal, side="right")) - 1
            return await self._indexes[k].shard(reader, ordinal - int(firsts[k]))

        totals = [int(index.starts[-1]) for index in self._indexes]
        means = [index.mean_bytes for index in self._indexes]
        nbytes = sum(mean * total for mean, total in zip(means, totals, strict=True) if mean is not None)
        mean_bytes = None if None in means else nbytes / max(1, sum(totals))
        begins = [None if index.blocks is None else index.blocks[:-1] for index in self._indexes]
        return OpenedIndex(np.concatenate(counts), load, mean_bytes, _blocks(np.array(totals, np.int64), begins))


_Columns = tuple[tuple[str, str], ...]


class OwnTables:
    """The index of shards whose format has its own tables."""

    def __init__(self, form: Format, entries: Sequence[ShardEntry], limits: Limits) -> None:
        self._format, self._entries, self._limits = form, tuple(entries), limits

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        columns: dict[int, _Columns] = {}

        async def learn(ordinal: int) -> tuple[int, Ints | None]:
            entry = self._entries[ordinal]
            if entry.samples is not None:
                return entry.samples, np.zeros(min(entry.samples, 1), np.int64) if entry.shares_blocks else None
            shard = await self._load(reader, ordinal)
            hold(ordinal, shard)
            if shard.columns is not None:
                columns[ordinal] = shard.columns
            return len(shard.rows), _begins(shard.rows)

        learned = await for_each(len(self._entries), learn)
        self._compare(columns)
        counts = np.array([count for count, _ in learned], np.int64)
        return OpenedIndex(counts, self._load, blocks=_blocks(counts, [begins for _, begins in learned]))

    def _compare(self, columns: Mapping[int, _Columns]) -> None:
        if not columns:
            return
        first = min(columns)
        wanted = dict(columns[first])
        for ordinal in sorted(ordinal for ordinal in columns if columns[ordinal] != columns[first]):
            have, url = dict(columns[ordinal]), self._entries[ordinal].url
            for name in [*wanted, *have]:
                if wanted.get(name) != have.get(name):
                    raise FormatError(
                        f"column {name!r:.200} is {have.get(name, 'not there')} in {masked(url)}, and "
                        f"{wanted.get(name, 'not there')} in {masked(self._entries[first].url)}: the shards of a "
                        "stream have the same columns; leave it out, or read them as two streams",
                        url=url,
                    )

    async def _load(self, reader: Reads, ordinal: int) -> ShardIndex:
        entry = self._entries[ordinal]
        shard = await self._format.index(reader, entry, self._limits)
        (entry.version or Version()).check_listed(entry.url, shard.size, shard.etag)
        try:
            _check(shard)
        except ValueError as error:
            raise FormatError(
                f"the format {self._format.name!r} describes {masked(entry.url)} as no shard can be: {error}",
                url=entry.url,
            ) from None
        return shard


def _begins(rows: Rows) -> Ints | None:
    if rows.block is None:
        return None
    return np.flatnonzero(np.diff(rows.block, prepend=-1))


def _blocks(counts: Ints, begins: Sequence[Ints | None]) -> Ints | None:
    if not any(some is not None for some in begins):
        return None
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    numbers = [
        start + (np.arange(count) if some is None else some)
        for start, count, some in zip(starts.tolist(), counts.tolist(), begins, strict=False)
    ]
    return np.concatenate([*numbers, starts[-1:]])


def _check(shard: ShardIndex) -> None:
    rows = shard.rows
    blocks = len(rows.starts) - 1
    if len(rows.offset) and 0 <= shard.size < int((rows.offset + rows.size).max()):
        raise ValueError(f"a member ends after its {shard.size} bytes")
    if len(rows.size) and int(rows.size.min()) < 0:
        raise ValueError("a member has less than no bytes")
    if (np.diff(rows.offset, prepend=0) < 0).any() or (np.diff(rows.offset + rows.size) < 0).any():
        raise ValueError("its members begin, or end, before those that precede them")
    if (
        blocks < 0
        or int(rows.starts[0])
        or int(rows.starts[-1]) != len(rows.offset)
        or (np.diff(rows.starts) < 0).any()
    ):
        raise ValueError(f"its blocks do not have {len(rows.offset)} members")
    if rows.block is None:
        is_whole = blocks == len(rows)
    else:
        is_whole = len(rows.block) == len(rows) and (
            not len(rows) or 0 <= rows.block.min() <= rows.block.max() < blocks
        )
    if not is_whole:
        raise ValueError(f"its {len(rows)} samples are not of its {blocks} blocks")


T = TypeVar("T")

HELD_BYTES = 256 * 2**20


class HeldReads(Lru[T]):
    """LRU cache with single-flight reads. For several event loops."""

    def __init__(self, nbytes: Callable[[T], int], most: int = HELD_BYTES) -> None:
        super().__init__(nbytes, most)
        self._loading: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Task[T]] = {}

    async def get(self, key: Hashable, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the cached item, or load it. Concurrent callers on one loop share the load."""
        if (held := self.held(key)) is not None:
            return held
        asked = asyncio.get_running_loop(), key
        if asked not in self._loading:
            task = self._loading[asked] = asyncio.create_task(self._load(key, load))
            task.add_done_callback(partial(self._loaded, asked))
        loading, waiting = self._loading[asked], asyncio.current_task()
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if not loading.cancelled() or waiting is None or waiting.cancelling():
                raise
            return await self.get(key, load)  # another user on this loop was closed
        except StageError as error:
            raise deepcopy(error) from error.__cause__  # each waiter adds its own notes

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [self._loading.pop(asked) for asked in list(self._loading) if asked[0] is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, key: Hashable, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        running_charge.set(None)  # shared with other waiters, so not charged to the first sample
        return self.hold(key, await load())

    def _loaded(self, asked: tuple[asyncio.AbstractEventLoop, Hashable], task: asyncio.Task[T]) -> None:
        if self._loading.get(asked) is task:
            del self._loading[asked]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all waiters may be gone
