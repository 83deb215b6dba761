"""The index of a data set's shards: numbers of samples, and their locations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from headrace._util.reads import Reads
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.format import Format
from headrace.formats.index.file import Directory, check_block, read_directory, read_head
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import for_each
from headrace.indexes.single_flight import HeldReads
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

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], None]) -> OpenedIndex:
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
            from headrace.indexes.build_shard import build_shard

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

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], None]) -> OpenedIndex:  # noqa: ARG002 (blocks are read later)
        url, what = self._url, masked(self._url)
        head, directory, order = await open_file(reader, url, urls)

        async def load(reader: Reads, ordinal: int) -> ShardIndex | None:
            start, stop, check = directory.block(int(order[ordinal]))
            if start == stop:
                return None
            block = head[start:stop] if stop <= len(head) else await reader.read(url, start, stop)
            check_block(block, check, what)
            return ShardIndex.unpack(block, what)

        samples, nbytes = directory.samples[order], directory.nbytes[order]
        mean = None if not nbytes.all() or not samples.sum() else float(nbytes.sum() / samples.sum())
        return OpenedIndex(samples, load, mean)


class BuiltFile(OneFile):
    """An index file on this machine, built from headers if missing, without checksums."""

    def __init__(self, url: str, limits: Limits, form: Format) -> None:
        super().__init__(url)
        self._limits, self._format = limits, form

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], None]) -> OpenedIndex:
        from headrace.indexes.building import build_file

        await build_file(reader, urls, Path(self._url), form=self._format, limits=self._limits)
        return await super().open(reader, urls, hold)


class FileForEach:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], None]) -> OpenedIndex:
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


async def open_file(reader: Reads, url: str, urls: Sequence[str]) -> tuple[bytes, Directory, Ints]:
    """Read the directory of the index file at `url`.

    Return the first bytes of the file, the directory, and the number of each of `urls` in the directory.
    """
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
    return head, directory, order


def _nbytes(shard: ShardIndex) -> int:
    rows = shard.rows
    arrays = (rows.starts, rows.field, rows.offset, rows.size, rows.block, rows.row)
    return rows.keys.nbytes + sum(array.nbytes for array in arrays if array is not None)
