"""Row tables that several formats share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.formats.compression import path_of
from headrace.formats.format import ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Ints


def keys_of(numbers: Ints) -> NDArray[np.bytes_]:
    return np.asarray(numbers).astype(f"S{len(str(int(numbers.max(initial=0))))}")


def rows_of_members(keys: NDArray[np.bytes_], offsets: Ints, sizes: Ints, member: str) -> Rows:
    """Return a table of samples with one member each, all named `member`."""
    count = len(keys)
    return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offsets, sizes, (member,))


def rows_of_one_block(count: int, offset: int, size: int, member: str) -> Rows:
    """Return a table of `count` samples that are the rows of one block with one member."""
    some = min(count, 1)
    return Rows(
        keys_of(np.arange(count)),
        np.arange(some + 1),
        np.zeros(some, np.int32),
        np.full(some, offset, np.int64),
        np.full(some, size, np.int64),
        (member,),
        block=np.zeros(count, np.int64),
        row=np.arange(count),
    )


async def index_of_file(reads: Reads, shard: ShardEntry, member: str, limits: Limits) -> ShardIndex:
    """Return an index with the file as one sample. Its key is the name up to the first dot."""
    whole = PinnedObject(reads, shard.url)
    await whole.read(0, 1)
    check_bytes("all of it", whole.size, limits.member_bytes, url=shard.url)
    name = path_of(shard.url).rpartition("/")[2].partition(".")[0] or "0"
    keys = np.array([name.encode("utf-8", "surrogateescape")])
    rows = rows_of_members(keys, np.zeros(1, np.int64), np.array([whole.size], np.int64), member)
    return ShardIndex(rows, None, whole.size, whole.etag)
