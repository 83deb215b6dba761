"""Files that are one sample each, or one block of samples."""

from __future__ import annotations

import numpy as np

from headrace.errors import LimitError, masked
from headrace.formats.compression.decompressor import path_of
from headrace.formats.format import ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.protocols import Reads, Span
from headrace.rows import Rows


async def index_of_file(reads: Reads, shard: ShardEntry, member: str, limits: Limits) -> ShardIndex:
    """An index of one sample, which is all of the file; its key is the file's name without what follows a dot.

    Args:
        member: what its bytes are called.

    Raises:
        LimitError: it is longer than may be.
    """
    span = await reads.read_into(shard.url, 0, memoryview(bytearray(1)))
    check_size(shard.url, span, limits)
    name = path_of(shard.url).rpartition("/")[2].partition(".")[0] or "0"
    ends = np.array([0, 1])
    sizes = np.array([span.size], np.int64)
    keys = np.array([name.encode("utf-8", "surrogateescape")])
    rows = Rows(keys, ends, np.zeros(1, np.int32), np.zeros(1, np.int64), sizes, (member,))
    return ShardIndex(rows, None, span.size, span.etag)


def check_size(url: str, span: Span, limits: Limits) -> None:
    """See that a file may be held in memory.

    Raises:
        LimitError: it is longer than may be.
    """
    if span.size > limits.member_bytes:
        raise LimitError(f"{masked(url)} has {span.size} bytes, over the limit of {limits.member_bytes}", url=url)
