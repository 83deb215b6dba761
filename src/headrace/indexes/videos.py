"""Frame tables of videos, read from each video or from one index file, and cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from headrace._util.reads import Reads, Version
from headrace.errors import masked
from headrace.formats.index.file import Directory, check_block
from headrace.formats.limits import Limits
from headrace.formats.mp4.finding import Tables
from headrace.formats.mp4.format import MP4, VideoTable, read_tables, table_of, unpack_tables
from headrace.formats.pinned_object import PinnedObject, for_each
from headrace.indexes.building import build_file
from headrace.indexes.index import open_file
from headrace.indexes.single_flight import HeldReads
from headrace.types import Ints

Video = tuple[VideoTable, Version]
"""The frames of a video, and the object's version."""


class Videos:
    """Frame locations of videos. Thread-safe; for several event loops. Copies are opened again.

    Args:
        place: Address of an index file. None: each video's own tables are read.
        is_built: True if that file is on this machine and built if missing.
    """

    def __init__(self, urls: Sequence[str], place: str | None, limits: Limits, *, is_built: bool = False) -> None:
        self.urls, self.place, self.limits, self.is_built = urls, place, limits, is_built
        self._directory: tuple[Directory, Ints] | None = None
        self._held = HeldReads[Video](lambda video: video[0].nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Videos, is_built=self.is_built), (self.urls, self.place, self.limits)

    async def counts(self, reader: Reads) -> Ints:
        """Return the number of displayed frames of each video. May read all tables."""
        if self.place is None:
            return np.array(await for_each(len(self.urls), partial(self._count, reader)), np.int64)
        directory, found = await self._opened(reader, self.place)
        return directory.samples[found]

    async def open(self, reader: Reads) -> None:
        """Build the index file if needed, and read its directory."""
        if self.place is not None:
            await self._opened(reader, self.place)

    async def _count(self, reader: Reads, ordinal: int) -> int:
        return len((await self.video(reader, ordinal))[0])

    async def video(self, reader: Reads, ordinal: int) -> Video:
        return await self._held.get(ordinal, partial(self._load, reader, ordinal))

    async def aclose(self) -> None:
        await self._held.aclose()

    async def _load(self, reader: Reads, ordinal: int) -> Video:
        url = self.urls[ordinal]
        if self.place is None:
            shard = PinnedObject(reader, url)
            tables = await read_tables(shard, self.limits)
            version = Version(shard.size, shard.etag)
        else:
            tables, version = await self._kept(reader, self.place, ordinal)
        size = -1 if version.size is None else version.size
        return table_of(tables, url, size, self.limits), version

    async def _kept(self, reader: Reads, place: str, ordinal: int) -> tuple[Tables, Version]:
        directory, found = await self._opened(reader, place)
        at, what = int(found[ordinal]), masked(place)
        start, stop, check = directory.block(at)
        block = await reader.read(place, start, stop)
        check_block(block, check, what)
        return unpack_tables(block, what), Version(int(directory.sizes[at]), directory.etag(at))

    async def _opened(self, reader: Reads, place: str) -> tuple[Directory, Ints]:
        if self._directory is not None:
            return self._directory
        if self.is_built:
            await build_file(reader, self.urls, Path(place), form=MP4, limits=self.limits)
        _, directory, found = await open_file(reader, place, self.urls)
        self._directory = directory, found
        return self._directory
