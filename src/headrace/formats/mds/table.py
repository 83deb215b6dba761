"""The head of an MDS shard: how many samples it has, where each lies, and what its columns are.

u32 the number of samples, n
u32 n + 1 offsets: sample i is [offsets[i], offsets[i + 1])
JSON, to offsets[0]: the shard's settings
"""

from __future__ import annotations

import json
import struct

import numpy as np

from headrace.errors import LimitError
from headrace.formats.limits import Limits
from headrace.formats.mds.encodings import described
from headrace.types import Buffer, Ints

_COUNT = struct.Struct("<I")


def count_of(head: Buffer) -> int:
    """The number of samples."""
    if len(head) < _COUNT.size:
        raise ValueError("it is cut off in its table")
    (count,) = _COUNT.unpack_from(head)
    return int(count)


def table_bytes(count: int, limits: Limits) -> int:
    """Bytes of the number and the offsets; a LimitError if they are more than may be held."""
    nbytes = 4 * (count + 2)
    if nbytes > limits.member_bytes:
        raise LimitError(f"the table of {count} samples has {nbytes} bytes, over the limit of {limits.member_bytes}")
    return nbytes


def offsets_of(head: Buffer, count: int, size: int, limits: Limits) -> Ints:
    """Where the samples begin, and where the last one ends, in a shard of `size` bytes."""
    said, end = count_of(head), table_bytes(count, limits)
    if said != count:
        raise ValueError(f"it says {said} samples, and {count} were announced")
    if len(head) < end:
        raise ValueError("it is cut off in its table")
    offsets = np.frombuffer(head, "<u4", count + 1, 4).astype(np.int64)
    if int(offsets[0]) < end or int(offsets[-1]) != size:
        raise ValueError(f"its samples lie from byte {offsets[0]} to {offsets[-1]} of {size}")
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"sample {int(lengths.argmin())} ends before it begins")
    if len(lengths) and int(lengths.max()) > limits.member_bytes:
        k = int(lengths.argmax())
        raise LimitError(f"sample {k} has {int(lengths[k])} bytes, over the limit of {limits.member_bytes}")
    return offsets


def columns_said(settings: Buffer) -> str:
    """The columns that a shard itself tells, as `described` has them."""
    try:
        said = json.loads(bytes(settings))
        lists = [said[f"column_{what}"] for what in ("names", "encodings", "sizes")]
        is_mds = said.get("format") == "mds"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError("it does not say its columns") from None
    if not is_mds:
        raise ValueError(f"it says that its format is {str(said.get('format'))[:40]!r}")
    return described(*lists)
