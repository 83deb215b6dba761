"""The file `.tar.idx` beside a shard: a u64 for each sample, where its first header begins, and one where they end."""

from __future__ import annotations

import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.folders import at_least
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK
from headrace.protocols import Reads, Span
from headrace.types import Ints

_FIRST_BYTES = 64 * 1024
_BYTES_MOST = 2**53


def index_of(url: str) -> str:
    """The address of the index beside the shard at `url`; what follows its path holds for that, too."""
    end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
    return url[:end] + ".idx" + url[end:]


async def offsets_in(reads: Reads, shard: ShardEntry, limits: Limits) -> tuple[Ints, Span]:
    """Where the samples of a shard begin, and where they end; and what is known of the shard then.

    The first sample has all that lies before the second: members that are of no sample may precede it.

    Raises:
        FormatError: the index is damaged, or of another archive; it is named.
        LimitError: a sample, or the index, is longer than may be.
        StorageError: it could not be read.
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
    head = memoryview(bytearray(_FIRST_BYTES))
    span = await reads.read_into(place, 0, head)
    if span.size > limits.member_bytes:
        raise LimitError(f"{masked(place)} has {span.size} bytes, over the limit of {limits.member_bytes}", url=place)
    if span.size % 8 or not span.size:
        raise ValueError(f"it has {span.size} bytes, which is no multiple of 8")
    data = await at_least(reads, place, head[: span.stop - span.start], span.size, span.etag)
    said = np.frombuffer(data, "<u8")
    if int(said.max()) > _BYTES_MOST:
        raise ValueError(f"entry {int(said.argmax())} is {int(said.max())}")
    offsets = said.astype(np.int64)
    if (offsets % BLOCK).any():
        raise ValueError(f"entry {int((offsets % BLOCK != 0).argmax())} is no multiple of {BLOCK}")
    if (np.diff(offsets) <= 0).any():
        raise ValueError(f"entry {int((np.diff(offsets) <= 0).argmax()) + 1} does not lie behind the one before it")
    return offsets
