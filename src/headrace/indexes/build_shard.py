"""Builds the index of one shard by reading it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial

import anyio.to_thread
import google_crc32c
import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.compression import FOOTER_BYTES, Decompressor, Frames, kind_of, seek_table, seek_table_bytes
from headrace.formats.format import Format, Scanner
from headrace.formats.index.shard import TAR_BLOCK, ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.tar.format import TAR
from headrace.formats.tar.scanner import TarScanner
from headrace.types import Ints

_UNPACKED_PIECE = 2**20
_TAIL_BYTES = 64 * 1024


async def build_shard(
    reader: Reads,
    url: str,
    *,
    form: Format = TAR,
    limits: Limits = DEFAULTS,
    headers_only: bool = False,
    on_bytes: Callable[[int], object] | None = None,
) -> ShardIndex:
    """Build the index of a shard, from one version of the object.

    The whole shard is read, decompressed according to its name, and all members get checksums. Memory: the longest
    sample, 30 MiB, and about 100 bytes for each member.

    Args:
        form: Must have a scanner.
        headers_only: Skip long bodies; then there are no checksums. Compressed shards and shards of small members are
            read completely.
        on_bytes: Called with the number of bytes of each read.
    """
    shard = PinnedObject(reader, url, on_bytes)
    scanner, kind = form.scanner(url, limits), kind_of(url)
    if headers_only and kind is None and form.name == TAR.name:
        rows = await hop(shard, TarScanner(url, limits))
        if rows is not None:
            return ShardIndex(rows, None, shard.size, shard.etag)
    if scanner is None:
        raise OptionError.at(shard.url, f": shards of the format {form.name!r} bring their own index along")
    scan = _Scan(scanner)
    takes = scan if kind is None else _Unpacked(scan, Decompressor(kind, shard.url, limits, is_padded=True))
    end = 0
    async with aclosing(shard.pieces()) as pieces:
        async for data in pieces:
            end += len(data)
            await anyio.to_thread.run_sync(partial(takes.feed, data, last=end == shard.size))
    frames = None if kind is None else await _frames(shard, kind, scan.end, limits)
    rows = Rows.concat(scan.tables) if scan.tables else Rows.empty()
    crc = np.concatenate(scan.checksums) if scan.tables else np.zeros(0, np.uint32)
    return ShardIndex(rows, crc, shard.size, shard.etag, frames)


class _Scan:
    def __init__(self, scanner: Scanner) -> None:
        self.end = 0
        self.tables, self.checksums = list[Rows](), list[NDArray[np.uint32]]()
        self._scanner = scanner
        self._kept: deque[tuple[int, memoryview]] = deque()  # pieces that may contain incomplete samples

    @property
    def has_ended(self) -> bool:
        """True if only padding may follow."""
        return getattr(self._scanner, "has_ended", False)

    def feed(self, data: memoryview, *, last: bool) -> None:
        rows = self._scanner.feed(data, self.end, last)
        if self._scanner.error is not None:
            raise self._scanner.error
        self._kept.append((self.end, data))
        self.end += len(data)
        if len(rows):
            checksums = map(self._checksum, rows.offset.tolist(), rows.size.tolist())
            self.tables.append(rows)
            self.checksums.append(np.fromiter(checksums, np.uint32, len(rows.offset)))
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= self._scanner.low:
            self._kept.popleft()

    def _checksum(self, start: int, size: int) -> int:
        checksum, stop = 0, start + size
        for at, data in self._kept:
            if at < stop and start < at + len(data):
                # a copy, as the library takes only read-only memory
                part = bytes(data[max(start - at, 0) : stop - at])
                checksum = google_crc32c.extend(checksum, part)
        return checksum


class _Unpacked:
    def __init__(self, scan: _Scan, decompressor: Decompressor) -> None:
        self._scan, self._decompressor = scan, decompressor
        self._begin()

    def _begin(self) -> None:
        self._piece, self._filled = memoryview(bytearray(_UNPACKED_PIECE)), 0

    def feed(self, data: memoryview, *, last: bool) -> None:
        self._decompressor.feed(data)
        while True:
            try:
                self._filled += self._decompressor.read_into(self._piece[self._filled :])
            except FormatError:
                whole = self._filled // TAR_BLOCK * TAR_BLOCK
                self._scan.feed(self._piece[:whole], last=False)  # raises an earlier error of the archive, if any
                raise
            if self._filled < len(self._piece):
                break
            self._scan.feed(self._piece, last=False)
            self._decompressor.is_past_end = self._scan.has_ended
            self._begin()
        if last:
            self._decompressor.finish()
            self._scan.feed(self._piece[: self._filled], last=True)


async def _frames(shard: PinnedObject, kind: str, unpacked: int, limits: Limits) -> Frames:
    whole = Frames(np.array([0, shard.size]), np.array([0, unpacked]))
    if kind != "zstd":
        return whole
    tail = await shard.read(max(shard.size - _TAIL_BYTES, 0), _TAIL_BYTES)
    need = seek_table_bytes(tail[-FOOTER_BYTES:])
    if len(tail) < need <= shard.size:
        tail = await shard.read(max(shard.size - need, 0), need)
    table = seek_table(tail, shard.size, url=shard.url, limits=limits)
    if table is None:
        return whole
    if int(table.unpacked[-1]) != unpacked:
        raise FormatError(
            f"by the seek table {int(table.unpacked[-1])} bytes come out of the frames;  "
            f"it is {unpacked} ({masked(shard.url)})",
            url=shard.url,
        )
    return Frames(table.packed, table.unpacked)


REQUEST_BYTES = 32 * 1024
"""Cost of a request in bytes. Archives with shorter members are read completely."""

_FIRST_WINDOW = 4096
_LONGEST = 256 * 1024  # of a read that continues the last one
_WINDOWS = [512 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
_LEARN_FROM, _LEARN_FROM_MOST = 8, 256  # members


async def hop(archive: PinnedObject, scanner: TarScanner) -> Rows | None:
    """Find all samples by reading headers; None if reading the whole archive costs less.

    The read size is learned from the members so far, so that the next long body is skipped.
    """
    tables: list[Rows] = []
    at, window, length, learn_at, members = 0, _FIRST_WINDOW, _FIRST_WINDOW, _LEARN_FROM, 0
    while not scanner.done:
        data = await archive.read(at, length)
        end = at + len(data)
        rows = scanner.feed(data, at, end == archive.size)
        if scanner.error is not None:
            raise scanner.error
        if len(rows):
            tables.append(rows)
            members += len(rows.offset)
        if members >= learn_at:
            learn_at = min(2 * members, members + _LEARN_FROM_MOST)
            recent = _latest(tables)
            window, rate = best_window(recent.offset, recent.size)
            if rate * (archive.size - end) > archive.size:
                return None
        at, length = end, window
        target = min(scanner.next_header, archive.size)
        if target > end:
            with suppress(ValueError):  # it is the body of an extended header
                scanner.skip(target)
                at = target
        else:
            length = min(max(2 * len(data), window), _LONGEST)  # the end's padding, or a long row of small members
    return Rows.concat(tables) if tables else Rows.empty()


def best_window(offset: Ints, size: Ints) -> tuple[int, float]:
    """Return the bytes to read after each skip, and the cost per byte, for consecutive members."""
    stops = offset + size + 511 & -512
    heads: list[int] = stops[:-1].tolist()
    bodies: list[int] = offset[1:].tolist()
    costs = [_cost(heads, bodies, window) for window in _WINDOWS]
    best = int(np.argmin(costs))
    return _WINDOWS[best], costs[best] / int(stops[-1] - stops[0])


def _cost(heads: list[int], bodies: list[int], window: int) -> int:
    """Cost of seeing all headers by reads of `window` bytes. A header ends at its body."""
    seen, at, cost = 0, heads[0], 0
    while seen < len(heads):
        at += window
        cost += REQUEST_BYTES + window
        seen = bisect_right(bodies, at, lo=seen)
        if seen < len(heads):
            at = max(at, heads[seen])
    return cost


def _latest(tables: list[Rows]) -> Rows:
    count = 0
    for k in range(len(tables) - 1, -1, -1):
        count += len(tables[k].offset)
        if count >= _LEARN_FROM_MOST:
            break
    return Rows.concat(tables[k:])
