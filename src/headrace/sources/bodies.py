"""Reading, unpacking and verification of single members of shards."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from headrace._util.context import running_charge
from headrace._util.reads import Ranges, Reads, Version, crc32c_of
from headrace.errors import ChecksumError, FormatError, LimitError, OptionError, not_as_indexed
from headrace.fetch.coalescer import coalesce, span_of
from headrace.fetch.reader import Reader
from headrace.formats.compression import Decompressor, Frames, unpack_frame
from headrace.formats.index import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import for_each
from headrace.formats.tar.member_check import MemberNames, misplaced
from headrace.indexes.index import HeldReads
from headrace.readers.indexed_shards import Checker, Members
from headrace.sources.reading import is_file
from headrace.types import Buffer

FROM_ITS_START = (
    "can only be unpacked from its start: read it in order, shuffle it by='window' without .pack(), or repack the "
    "shards once, by `headrace pack URL… FOLDER --format parquet`"
)

_SHARD_BYTES = 4 * 2**20
_OPEN_MOST = 64
_JUMPS_MOST = 64
_STEP_BYTES = 2**20
_READ_BYTES, _READ_BYTES_MOST = 2**18, 4 * 2**20


class UnpackedShards:
    """The content of shards, unpacked in order as it is requested. For use on one event loop.

    The last 4 MiB of each shard are kept. A request before them unpacks the shard from its start once more, and both
    places continue from there.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Unpacking] = OrderedDict()
        self._opened = self._jumps = self._reads = 0

    async def read(
        self, reader: Reads, url: str, version: Version, begin: int, end: int, unpacks: Callable[[], Decompressor]
    ) -> bytes:
        """Return bytes [begin, end) of the content.

        Raises:
            FormatError, LimitError: The shard is damaged.
            ObjectChangedError: The content ends before.
            OptionError: Requests are mostly of random places.
        """
        self._reads += 1
        while True:
            one = self._nearest(url, version, begin) or self._opened_at(url, version, begin, unpacks)
            async with one.lock:
                if one.start <= begin:  # else another request was first
                    return await one.read(reader, begin, end)

    def drop(self, url: str) -> None:
        self._open = OrderedDict((number, one) for number, one in self._open.items() if one.url != url)

    def _nearest(self, url: str, version: Version, begin: int) -> _Unpacking | None:
        found = [
            (one.end, number)
            for number, one in self._open.items()
            if one.start <= begin and (one.url, one.version) == (url, version)
        ]
        if not found:
            return None
        _, number = max(found)
        self._open.move_to_end(number)
        return self._open[number]

    def _opened_at(self, url: str, version: Version, begin: int, unpacks: Callable[[], Decompressor]) -> _Unpacking:
        self._jumps += begin > _STEP_BYTES
        if self._jumps > _JUMPS_MOST and 4 * self._jumps > self._reads:
            raise OptionError.at(url, f": its samples are wanted at random places, and it {FROM_ITS_START}")
        if len(self._open) >= _OPEN_MOST:
            self._open.popitem(last=False)
        self._opened += 1
        one = self._open[self._opened] = _Unpacking(url, version, unpacks())
        return one


class _Unpacking:
    """One shard, unpacked up to `end`. The content from `start` on is kept."""

    def __init__(self, url: str, version: Version, decompressor: Decompressor) -> None:
        self.url, self.version, self._decompressor = url, version, decompressor
        self.lock = anyio.Lock()
        self.start, self._content = 0, bytearray()
        self._at = 0  # bytes of the shard that were read

    @property
    def end(self) -> int:
        return self.start + len(self._content)

    async def read(self, reader: Reads, begin: int, end: int) -> bytes:
        while self.end < end:
            if await anyio.to_thread.run_sync(self._unpack, begin):
                continue
            stop = self._at + min(_READ_BYTES + self._at, _READ_BYTES_MOST)
            stop = stop if self.version.size is None else min(stop, self.version.size)
            charge = running_charge.set(None)  # other samples wait for these bytes, too
            try:
                data = await reader.read(self.url, self._at, stop, version=self.version) if stop > self._at else b""
            finally:
                running_charge.reset(charge)
            if not data:
                self._decompressor.finish()
                raise not_as_indexed(self.url, f"it unpacks to {self.end} bytes, and bytes {begin} to {end} are wanted")
            self._decompressor.feed(data)
            self._at += len(data)
        return bytes(self._content[begin - self.start : end - self.start])

    def _unpack(self, begin: int) -> int:
        """Unpack up to 1 MiB, and drop what is long before `begin`. Return the number of bytes; 0: more must be fed."""
        piece = memoryview(bytearray(_STEP_BYTES))
        count = self._decompressor.read_into(piece)
        self._content += piece[:count]
        gone = min(begin, self.end - _SHARD_BYTES) - self.start
        if gone > 0:
            del self._content[:gone]
            self.start += gone
        return count


_GAP_BYTES = 16 * 1024


class Where(NamedTuple):
    """A shard whose members are read.

    Attributes:
        packing: Compression of the shard as a whole.
        unpacked: Content of shards that are unpacked in order.
        frames: Unpacked frames of compressed shards. None: they are not kept.
    """

    url: str
    shard: ShardIndex
    limits: Limits
    packing: str | None = None
    unpacked: UnpackedShards | None = None
    frames: HeldReads[bytes] | None = None

    @property
    def is_only_in_order(self) -> bool:
        """True if the shard can be unpacked from its start only: its frames are not in a table, which follows them."""
        frames, size = self.shard.frames, self.shard.size
        return self.packing is not None and (frames is None or int(frames.packed[-1]) == size)


async def bodies_at(
    reader: Reads, where: Where, places: list[tuple[int, int]], crc: list[int | None], names: MemberNames | None = None
) -> list[bytes]:
    """Read and verify the members at (offset, size). Nearby members are read together.

    Args:
        crc: Checksum of each member, if known.
        names: Names in a tar archive, to compare with the headers that are read with the members.
    """
    if not places:
        return []
    url, shard = where.url, where.shard
    if shard.frames is not None or where.packing is not None:
        return await _unpacked_bodies(reader, where, places, crc, names)
    own = [(at, at + size) for at, size in places]
    groups = coalesce(own, gap=_GAP_BYTES)
    bodies: list[bytes] = [b""] * len(places)

    async def read(group: list[int]) -> None:
        begin, end = span_of(own, group)
        inside = [(k, own[k][0] - begin, own[k][1] - begin) for k in group]
        why: list[str | None] = []

        def is_right(data: Buffer) -> bool:
            for k, a, b in inside:
                bodies[k] = bytes(data[a:b])
            if names is not None:
                why.append(_misplaced(data, begin, [places[k] for k in group], names.take(group)))
            has_headers = not why or why[-1] is None or len(why) > 1
            return has_headers and all(crc[k] in (None, crc32c_of(bodies[k])) for k in group)

        data = await reader.read(url, begin, end, check=is_right, version=version_of(shard))
        if why and (said := why[-1]) is not None:
            raise not_as_indexed(url, said)
        _check_length(data, url, begin, end)

    await for_each(len(groups), lambda k: read(groups[k]))
    return bodies


async def unpacked_bodies(reader: Reads, where: Where, members: Members) -> list[bytes]:
    """Read and verify members of a compressed shard, nearby ones together, in order of position."""
    rows, own = members.rows, list(zip(members.rows.offset.tolist(), members.rows.size.tolist(), strict=True))
    crc = [None] * len(own) if members.crc is None else members.crc.tolist()
    names = MemberNames.of(rows, np.arange(len(own))) if members.has_headers else None
    bodies = [b""] * len(own)
    for group in _nearby([(at, at + size) for at, size in own]):
        some = None if names is None else names.take(group)
        read = await bodies_at(reader, where, [own[k] for k in group], [crc[k] for k in group], some)
        for k, body in zip(group, read, strict=True):
            bodies[k] = body
    return bodies


async def bodies_of_shards(reader: Reader, shards: Sequence[tuple[str, Members]]) -> list[list[bytes]]:
    """Read and verify members of uncompressed shards, nearby ones together. Local files: by one call in a thread."""
    tables = [members.rows for _, members in shards]
    own = [list(zip(rows.offset.tolist(), (rows.offset + rows.size).tolist(), strict=True)) for rows in tables]
    groups = [(k, group) for k, ranges in enumerate(own) for group in _nearby(ranges)]
    spans = [span_of(own[k], group) for k, group in groups]

    def is_right(n: int, data: bytes) -> bool:
        (k, group), (begin, _) = groups[n], spans[n]
        url, members = shards[k]
        if members.crc is None and not members.has_headers:
            return True
        checker = Checker(url, members, np.array(group))
        checker.feed(memoryview(data), begin, True)
        return not checker.wrong

    async def read(n: int) -> bytes:
        (url, members), (begin, end) = shards[groups[n][0]], spans[n]
        data = await reader.read(url, begin, end, check=partial(is_right, n), version=members.version)
        _check_length(data, url, begin, end)
        return data

    if all(is_file(url) for url, _ in shards):
        both = zip(groups, spans, strict=True)
        found = await reader.read_each([(shards[k][0], shards[k][1].version, span) for (k, _), span in both])
        for n, data in enumerate(found):
            if not is_right(n, data):
                raise ChecksumError("the bytes differ from the index", url=shards[groups[n][0]][0])
    else:
        found = await for_each(len(groups), read)
    bodies = [[b""] * len(ranges) for ranges in own]
    for (k, group), (begin, _), data in zip(groups, spans, found, strict=True):
        for member in group:
            start, stop = own[k][member]
            bodies[k][member] = data[start - begin : stop - begin]
    return bodies


def _nearby(ranges: Ranges) -> list[list[int]]:
    return coalesce(ranges, gap=_GAP_BYTES, longest=_READ_BYTES_MOST)


def _misplaced(data: Buffer, start: int, places: list[tuple[int, int]], names: MemberNames) -> str | None:
    """Describe the first member whose header disagrees with the index; `data` begins at `start`."""
    offsets, sizes = np.array(places, np.int64).T
    wrong = misplaced(memoryview(data), names, offsets - start, sizes)
    return next(iter(wrong.values()), None)


async def _unpacked_bodies(
    reader: Reads, where: Where, places: list[tuple[int, int]], crc: list[int | None], names: MemberNames | None
) -> list[bytes]:
    """Read members of a compressed shard, in whole compression frames."""
    url, shard = where.url, where.shard
    frames = shard.frames
    if where.is_only_in_order or frames is None:
        return await _bodies_from_start(reader, where, places, crc, names)
    begin, end = places[0][0], sum(places[-1])
    first = int(np.searchsorted(frames.unpacked, begin, side="right")) - 1
    stop = int(np.searchsorted(frames.unpacked, max(end, begin + 1), side="left"))
    packed, unpacked = frames.packed[first : stop + 1].tolist(), frames.unpacked[first : stop + 1].tolist()
    some, version = Frames(np.array(packed), np.array(unpacked)), version_of(shard)
    kept, name = where.frames, (url, version, packed[0], packed[-1])
    unpack = partial(_unpack, frames=some, where=where)

    def bodies_of(data: Buffer) -> list[bytes] | None:
        try:
            return _bodies_of(url, unpack(data), unpacked[0], places, crc, names)
        except LimitError:
            raise
        except FormatError:
            return None

    async def read() -> bytes:
        return await anyio.to_thread.run_sync(unpack, await reader.read(url, packed[0], packed[-1], version=version))

    with contextlib.suppress(FormatError):
        whole = await (read() if kept is None else kept.get(name, read))
        if (bodies := _bodies_of(url, whole, unpacked[0], places, crc, names)) is not None:
            return bodies
    if kept is not None:
        kept.drop(name)
    is_right = lambda data: bodies_of(data) is not None
    bodies = bodies_of(await reader.read(url, packed[0], packed[-1], check=is_right, version=version))
    assert bodies is not None
    return bodies


async def _bodies_from_start(
    reader: Reads, where: Where, places: list[tuple[int, int]], crc: list[int | None], names: MemberNames | None
) -> list[bytes]:
    """Read members of a shard that can be unpacked from its start only."""
    url, unpacked, begin, end = where.url, where.unpacked, places[0][0], sum(places[-1])
    assert unpacked is not None
    unpacks = partial(Decompressor, str(where.packing), url, where.limits, is_padded=True)
    for _ in range(2):
        whole = await unpacked.read(reader, url, version_of(where.shard), begin, end, unpacks)
        bodies = _bodies_of(url, whole, begin, places, crc, names)
        if bodies is not None:
            return bodies
        unpacked.drop(url)
    raise ChecksumError("what it unpacks to is not what the index was made of", url=url, attempts=2)


def _bodies_of(
    url: str, whole: bytes, start: int, places: list[tuple[int, int]], crc: list[int | None], names: MemberNames | None
) -> list[bytes] | None:
    """Cut members out of the content from `start` on. None if a checksum differs."""
    bodies = [whole[at - start : at - start + size] for at, size in places]
    if not all(want in (None, crc32c_of(body)) for body, want in zip(bodies, crc, strict=True)):
        return None
    if names is not None and (why := _misplaced(whole, start, places, names)) is not None:
        raise not_as_indexed(url, why)
    return bodies


async def read_exactly(reader: Reads, url: str, start: int, stop: int, version: Version) -> bytes:
    data = await reader.read(url, start, stop, version=version)
    _check_length(data, url, start, stop)
    return data


def _check_length(data: bytes, url: str, start: int, stop: int) -> None:
    if len(data) < stop - start:
        raise not_as_indexed(url, f"of bytes {start} to {stop} it has only {len(data)}")


def _unpack(data: Buffer, frames: Frames, where: Where) -> bytes:
    packed, sizes = frames.packed - frames.packed[0], np.diff(frames.unpacked)
    pieces = zip(packed[:-1].tolist(), packed[1:].tolist(), sizes.tolist(), strict=True)
    return b"".join(unpack_frame(data[a:b], size, where.limits, url=where.url) for a, b, size in pieces)


def version_of(shard: ShardIndex) -> Version:
    """Return a shard's expected version, without ETag if members have checksums, as in copies."""
    return Version(None if shard.size < 0 else shard.size, shard.etag if shard.crc is None else None)
