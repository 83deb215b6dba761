"""Energon's folders as a format: a sample is all that lies between two offsets, and the header behind it.

The offsets are in the file `.tar.idx` beside a shard: a u64 for each sample, where its first header begins, and one for
where they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.energon import catalogue
from headrace.formats.folders import at_least, read_head, split_path
from headrace.formats.format import Block, Catalogue, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.sample_rows import keys_of
from headrace.formats.tar.headers import BLOCK, key_of, read_header
from headrace.formats.tar.scanner import TarScanner
from headrace.protocols import Reads, Span
from headrace.rows import Rows
from headrace.types import Ints

_END_MARK = bytes(2 * BLOCK)
_REGULAR = (b"0", b"\0", b"7")


class Energon(Format):
    """A folder with `.nv-meta`, or single shards with their `.tar.idx` beside them.

    Args:
        split: which of the folder's.
    """

    name = "energon"
    suffixes = ()
    catalogue: ClassVar[str | None] = catalogue.NAME

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def sniff(self, name: str, head: bytes) -> float:
        return 0.9 if name == catalogue.NAME and b"split_parts" in head else 0.0

    def catalogued(
        self,
        url: str,
        data: bytes,
        limits: Limits,  # noqa: ARG002
        others: Callable[[str], bytes | None],
    ) -> Catalogue:
        return catalogue.catalogued(url, data, self.split, others)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        offsets, span = await offsets_in(reads, shard, limits)
        count = len(offsets) - 1
        rows = Rows(
            keys_of(np.arange(count)),
            np.arange(count + 1) * 2,
            np.tile(np.arange(2, dtype=np.int32), count),
            np.repeat(offsets, 2)[1:-1],
            np.stack([np.diff(offsets), np.full(count, BLOCK)], 1).reshape(-1),
            ("members", "behind"),
        )
        return ShardIndex(rows, None, span.size, span.etag)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        data, behind = bodies
        scanner = TarScanner(block.url, block.limits)
        begun = scanner.feed(memoryview(data), 0, last=False)
        is_one = not len(begun) and scanner.next_header == len(data)
        rows = scanner.feed(_END_MARK, len(data), last=True) if is_one and not scanner.done else begun
        index = index_of(block.url).rpartition("/")[2]
        if scanner.error is not None:
            why = str(scanner.error.args[0]).rpartition(" (")[0]
            raise ValueError(f"of the bytes that {index} says at {scanner.error.offset}: {why}")
        if not is_one or len(rows) != 1 or _goes_on(rows.keys[0].item(), behind):
            raise ValueError(
                f"its bytes by {index} are not one sample, all of it: that is the index of another archive"
            )
        places = zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        return [{rows.fields[field]: data[at : at + size] for field, at, size in places}]


def _goes_on(key: bytes, behind: bytes) -> bool:
    """Whether the header behind a sample is none, or that of another of its members.

    So no epoch over offsets that do not fit ends without an error: where one sample has been cut off its first members,
    another has them at its end.
    """
    if not any(behind):
        return False  # the end mark
    try:
        header = read_header(behind, BLOCK)
    except FormatError:
        return True
    return header.kind in _REGULAR and key_of(header.name) == key.decode("utf-8", "surrogateescape")


ENERGON = Energon()


_FIRST_BYTES = 64 * 1024
_BYTES_MOST = 2**53


def index_of(url: str) -> str:
    """The address of the index beside the shard at `url`; what follows its path holds for that, too."""
    path, rest = split_path(url)
    return path + ".idx" + rest


async def offsets_in(reads: Reads, shard: ShardEntry, limits: Limits) -> tuple[Ints, Span]:
    """Where the samples of a shard begin, and where they end; and what is known of the shard then.

    The first sample has all that lies before the second: members that are of no sample may precede it. A FormatError
    names
    the index if it is damaged, or of another archive.
    """
    place = index_of(shard.url)
    try:
        offsets = await _read(reads, place, limits)
        if shard.samples is not None and len(offsets) - 1 != shard.samples:
            raise ValueError(f"it has {len(offsets) - 1} samples, and {shard.samples} are counted in .nv-meta")
        span = await reads.read_into(shard.url, 0, memoryview(bytearray(1)))
        end = int(offsets[-1])
        if end + BLOCK > span.size:
            raise ValueError(f"its samples end at byte {end} of {span.size} of {masked(shard.url)}")
        mark = memoryview(bytearray(BLOCK))
        await reads.read_into(shard.url, end, mark, etag=span.etag)
        if any(mark):
            raise ValueError(f"at byte {end}, where its samples end, there is no end mark in {masked(shard.url)}")
    except ValueError as error:
        raise FormatError(
            f"the index {masked(place)} is damaged, or of another archive: {error}; `energon prepare` makes it anew",
            url=place,
        ) from None
    offsets[0] = 0
    longest = int(np.diff(offsets).max(initial=0))
    if longest > limits.member_bytes:
        raise LimitError(
            f"{masked(shard.url)}: a sample has {longest} bytes, over the limit of {limits.member_bytes}", url=shard.url
        )
    return offsets, span


async def _read(reads: Reads, place: str, limits: Limits) -> Ints:
    head, span = await read_head(reads, place, _FIRST_BYTES)
    if span.size > limits.member_bytes:
        raise LimitError(f"{masked(place)} has {span.size} bytes, over the limit of {limits.member_bytes}", url=place)
    if span.size % 8 or not span.size:
        raise ValueError(f"it has {span.size} bytes, which is no multiple of 8")
    data = await at_least(reads, place, head, span.size, span.etag)
    said = np.frombuffer(data, "<u8")
    if int(said.max()) > _BYTES_MOST:
        raise ValueError(f"entry {int(said.argmax())} is {int(said.max())}")
    offsets = said.astype(np.int64)
    if (offsets % BLOCK).any():
        raise ValueError(f"entry {int((offsets % BLOCK != 0).argmax())} is no multiple of {BLOCK}")
    if (np.diff(offsets) <= 0).any():
        raise ValueError(f"entry {int((np.diff(offsets) <= 0).argmax()) + 1} does not lie behind the one before it")
    return offsets
