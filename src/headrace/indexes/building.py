"""Builds indexes of shards, several concurrently. Finished shards are stored in a journal."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

import anyio
import anyio.to_thread
import google_crc32c
import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.reads import Reads, lasting
from headrace._util.sample_ranges import Rows, Scanner
from headrace.errors import FormatError, OptionError, StageError, masked
from headrace.fetch.stores.addresses import split
from headrace.fetch.stores.writing import check_writable, part_beside, replace_file, write_object
from headrace.formats.compression import (
    FOOTER_BYTES,
    Decompressor,
    Frames,
    kind_of,
    path_of,
    seek_table,
    seek_table_bytes,
)
from headrace.formats.format import Format
from headrace.formats.index import (
    HEAD,
    TAR_BLOCK,
    Entry,
    ShardIndex,
    pack_directory,
    read_directory,
    read_head,
    wrong_check,
)
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.pinned_object import PinnedObject, for_each
from headrace.formats.tar.scanner import TAR, TarScanner
from headrace.indexes.cache_path import beside, cache_path
from headrace.types import Buffer


@dataclass(slots=True)
class BuildProgress:
    """Progress of a build, readable while the build runs.

    Attributes:
        kept: Number of shards that an interrupted earlier build had indexed.
        requests, nbytes: Reads and their bytes, without retries.
        seen_bytes: Bytes of the shards that this build indexed.
        index_bytes: Bytes of the written index files.
    """

    total: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    kept: int = 0
    failures: dict[str, StageError] = field(default_factory=dict)
    requests: int = 0
    nbytes: int = 0
    seen_bytes: int = 0
    index_bytes: int = 0

    def count(self, nbytes: int) -> None:
        self.requests += 1
        self.nbytes += nbytes


async def build_index(
    reader: Reads,
    urls: Sequence[str],
    output: str | Path | None,
    *,
    headers_only: bool = False,
    form: Format = TAR,
    limits: Limits = DEFAULTS,
    concurrency: int = 8,
    storage_options: Mapping[str, object] | None = None,
    progress: BuildProgress | None = None,
) -> BuildProgress:
    """Write one index file of all shards to `output`, atomically, or one beside each shard when it is indexed.

    Failed shards are in `BuildProgress.failures`, and then no file is written for all. Until it is, finished shards are
    kept in a journal. The same build resumes from there, after checking that each object has not changed.

    Args:
        output: A path, or an address in a store. None: beside each shard.
        headers_only: See `build_shard`.
        concurrency: Shards at once.
    """
    shards, progress = _named(urls), progress or BuildProgress()
    how = _How(headers_only, form, limits, concurrency)
    address = None if output is None else os.fspath(output)
    for target in map(beside, urls) if address is None else (address,):
        check_writable(target)
    is_local = False
    if address is None:
        place = cache_path(("beside", *urls))
    elif kind_of(address) or path_of(address).endswith((*TAR.suffixes, *form.suffixes)) or address in urls:
        raise OptionError.at(address, "is a shard by its name: an index would take its place")
    else:
        scheme, _, path = split(address)
        is_local = scheme == "file"
        place = Path(path) if is_local else cache_path((address, *urls))

    async def publish(url: str, entry: Entry, block: bytes) -> None:
        target, record = beside(url), index_of_one(entry, block)
        size = await _publish(cache_path((target,)), lambda file: file.write(record), target, storage_options)
        progress.index_bytes += size

    with closing(await open_spool(how.journal(place))) as spool:
        await _build(reader, shards, spool, progress, how, publish if address is None else None)
        if not progress.failures:
            if address is not None:
                write = partial(spool.write_index, names=list(shards))
                progress.index_bytes = await _publish(place, write, None if is_local else address, storage_options)
            spool.remove()
    return progress


async def build_file(
    reader: Reads, urls: Sequence[str], path: str | Path, *, form: Format = TAR, limits: Limits = DEFAULTS
) -> None:
    """Build the index of these shards at `path` if it is missing.

    If several processes need it, one builds it and the others wait.
    """
    place, shards, progress = Path(path), _named(urls), BuildProgress()
    how = _How(headers_only=True, form=form, limits=limits, concurrency=8)
    if await anyio.to_thread.run_sync(place.exists):
        return
    with closing(await open_spool(how.journal(place), waits=True)) as spool:
        if not await anyio.to_thread.run_sync(place.exists):  # else another process built it meanwhile
            await _build(reader, shards, spool, progress, how)
            for failure in progress.failures.values():
                raise failure
            await _publish(place, partial(spool.write_index, names=list(shards)))
        spool.remove()


@dataclass(frozen=True, slots=True)
class _How:
    headers_only: bool
    form: Format
    limits: Limits
    concurrency: int

    def __post_init__(self) -> None:
        check.whole("concurrency", self.concurrency, 1)

    def journal(self, place: Path) -> Path:
        ways = [self.form.name] * (self.form.name != TAR.name) + ["headers"] * self.headers_only
        return place.with_name(".".join([place.name, *ways, "journal"]))


async def _publish(
    place: Path,
    write: Callable[[BinaryIO], int],
    address: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> int:
    """Write a file at `place`, or at `address` by way of a temporary file beside `place`. Return its size."""
    part = part_beside(place)
    try:
        with part:
            size = await anyio.to_thread.run_sync(write, part)
        if address is not None:
            await write_object(address, Path(part.name), storage_options)
        else:
            await anyio.to_thread.run_sync(replace_file, Path(part.name), place)
    finally:
        Path(part.name).unlink(missing_ok=True)  # noqa: ASYNC240 (fast)
    return size


async def _build(
    reader: Reads,
    shards: Mapping[str, str],
    spool: Spool,
    progress: BuildProgress,
    how: _How,
    publish: Callable[[str, Entry, bytes], Awaitable[None]] | None = None,
) -> None:
    progress.total = len(shards)
    names = list(shards.items())

    async def index(name: str, url: str) -> None:
        known = spool.entries.get(name)
        if known is not None and await _is_same(reader, url, known, progress):
            progress.kept += 1
            progress.entries[name] = known
            return
        own = await how.form.own_index(PinnedObject(reader, url, progress.count), how.limits)
        if own is not None:
            entry, block = replace(own[0], name=name), own[1]
        else:
            found = await build_shard(
                reader, url, form=how.form, limits=how.limits, headers_only=how.headers_only, on_bytes=progress.count
            )
            block = await anyio.to_thread.run_sync(found.pack)
            entry = Entry.of(name, found, block)
        if publish is not None:
            await publish(url, entry, block)
        progress.entries[name] = await anyio.to_thread.run_sync(spool.add, entry, block)
        progress.seen_bytes += entry.size

    async def attempt(k: int) -> None:
        name, url = names[k]
        try:
            await index(name, url)
        except StageError as error:
            progress.failures[name] = error

    await for_each(len(names), attempt, how.concurrency)


async def _is_same(reader: Reads, url: str, known: Entry, progress: BuildProgress) -> bool:
    span = await reader.read_into(url, 0, memoryview(bytearray(1)))
    progress.count(span.stop - span.start)
    return (span.size, lasting(span.etag)) == (known.size, known.etag)


def _named(urls: Sequence[str]) -> dict[str, str]:
    """Map names without secrets, as in the index, to addresses."""
    shards = {masked(url): url for url in dict.fromkeys(urls)}
    if len(shards) < len(set(urls)):
        raise OptionError(
            "two addresses differ only in what looks like a secret; no index contains that, or could separate them"
        )
    return shards


_PAUSE_S, _PAUSE_MOST_S = 0.02, 1.0


async def open_spool(path: Path, *, waits: bool = False) -> Spool:
    """Open and lock the spool at `path`. With `waits`, wait for the lock."""
    pause_s = _PAUSE_S
    while True:
        with anyio.CancelScope(shield=True):  # else a cancellation would leave the spool open
            spool = await anyio.to_thread.run_sync(_opened, path)
        if spool is not None:
            return spool
        if not waits:
            text = "another process builds this index; wait for it, or write to another place"
            raise OptionError.at(str(path), f"is locked: {text}")
        await anyio.sleep(pause_s)  # a blocking call that waits for a lock could not be cancelled
        pause_s = min(2 * pause_s, _PAUSE_MOST_S)


class Spool:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self._lock = path, file, threading.Lock()
        entries, self._end = read_journal(file)
        self.entries = {entry.name: entry for entry in entries}
        file.truncate(self._end)  # an incomplete record of a killed process

    def add(self, entry: Entry, block: bytes) -> Entry:
        record = index_of_one(entry, block)
        with self._lock:  # several shards finish concurrently
            self._file.write(record)
            self._file.flush()
            self._end += len(record)
            placed = replace(entry, start=self._end - len(block), length=len(block))
            self.entries[entry.name] = placed
        return placed

    def write_index(self, file: IO[bytes], names: Sequence[str]) -> int:
        return write_index(file, [self.entries[name] for name in names], self._file)

    def remove(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        self._file.close()  # releases the lock


def _opened(path: Path) -> Spool | None:
    """Open, create and lock the file; None if another caller holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return Spool(path, file)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.close()  # its owner removed it after it was opened; open the new journal


_PIECE = 2**20


def index_of_one(entry: Entry, block: Buffer = b"") -> bytes:
    """Return the index file of one shard, which is also the record of a journal."""
    return pack_directory([replace(entry, length=len(block), check=zlib.crc32(block))]) + block


def read_journal(file: IO[bytes]) -> tuple[list[Entry], int]:
    """Return the entries of a journal, up to the first incomplete or damaged record, and the end of the last one.

    Entries have `start` and `length` of their block in the journal. Of several entries of one object the last one is
    valid. Truncate the journal at the end before appending to it.
    """
    entries, end, size = list[Entry](), 0, file.seek(0, io.SEEK_END)
    while (entry := _record(file, end, size)) is not None:
        entries.append(entry)
        end = entry.start + entry.length
    return entries, end


def _record(file: IO[bytes], at: int, size: int) -> Entry | None:
    file.seek(at)
    head = file.read(HEAD.size)
    try:
        start = at + read_head(head)
        if start > size:
            return None
        directory = read_directory(head + file.read(start - at - HEAD.size))
        if len(directory) != 1:
            return None
        entry = replace(directory[0], start=start)
        for _ in _pieces(file, entry):
            pass
    except FormatError:
        return None
    return entry


def write_index(file: IO[bytes], entries: Sequence[Entry], journal: IO[bytes]) -> int:
    """Write an index file of `entries`, whose blocks are in `journal`. Return its size."""
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two entries of one index have the same address")
    written = file.write(pack_directory(entries))
    for entry in entries:
        for piece in _pieces(journal, entry):
            written += file.write(piece)
    return written


def _pieces(journal: IO[bytes], entry: Entry) -> Iterator[bytes]:
    """Iterate over the bytes of a block. Raises a FormatError at its end if they do not match their checksum."""
    journal.seek(entry.start)
    left, check = entry.length, 0
    while left:
        piece = journal.read(min(left, _PIECE))
        if not piece:
            raise FormatError(f"the journal ends inside the index of {masked(entry.name)}", url=entry.name)
        left, check = left - len(piece), zlib.crc32(piece, check)
        yield piece
    if check != entry.check:
        raise wrong_check(entry.name)


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

_WINDOW_BYTES = 3 * TAR_BLOCK  # a header, a short member, and the next header
_WINDOW_MOST = 64 * 1024
_LONGEST = 256 * 1024  # of a read that continues the last one
_LEARN_FROM = 8  # members


async def hop(archive: PinnedObject, scanner: TarScanner) -> Rows | None:
    """Find all samples by reading headers; None if reading the whole archive costs less.

    A read that does not reach the next long body makes later reads longer by a block.
    """
    tables: list[Rows] = []
    at, window, length, cost, members = 0, _WINDOW_BYTES, _WINDOW_BYTES, 0, 0
    while not scanner.done:
        data = await archive.read(at, length)
        end = at + len(data)
        cost += REQUEST_BYTES + len(data)
        rows = scanner.feed(data, at, end == archive.size)
        if scanner.error is not None:
            raise scanner.error
        if len(rows):
            tables.append(rows)
            members += len(rows.offset)
        if members >= _LEARN_FROM and cost * (archive.size - end) > archive.size * end:
            return None
        at, length = end, window
        target = min(scanner.next_header, archive.size)
        if target > end:
            with suppress(ValueError):  # it is the body of an extended header
                scanner.skip(target)
                at = target
        else:
            window = min(window + TAR_BLOCK, _WINDOW_MOST)
            length = min(2 * len(data), _LONGEST)  # the end's padding, or a long row of small members
    return Rows.concat(tables) if tables else Rows.empty()
