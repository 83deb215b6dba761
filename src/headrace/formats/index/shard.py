"""The index of one shard: sample locations, checksums, and the object's version.

`docs/reference/index_format.md` specifies the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import lasting
from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.compression import Frames
from headrace.formats.index.named_arrays import MOST, Arrays, damage, pack_arrays
from headrace.formats.json_values import as_list, as_number, as_text, as_texts
from headrace.types import Buffer, Ints

TAR_BLOCK = 512
"""Unit of the gaps between members of a tar archive, in bytes."""

GAP = {TAR_BLOCK: "gap", 1: "gap_bytes"}
"""Name of the array of gaps, by their unit in bytes."""

# Keys become a table as wide as the longest, so one long key among very many could take any amount of memory.
_KEY_TABLE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Sample locations of a shard.

    Attributes:
        rows: The samples, in the order of the archive. Offsets are in the unpacked archive.
        crc: CRC-32C of each member's bytes. None: unknown.
        size: Bytes of the object; -1 if unknown.
        etag: The object's version when it was indexed, if the store has versions.
        frames: Frames of a compressed archive. One that must be read from its start is one frame.
        opened_bytes: Approximate bytes of all samples after decoding their blocks, if more than the bytes read.
        has_names: True if keys and fields are the names of members, as in the shard's headers.
        kept: Additional data that the format caches with the index.
        columns: (name, kind) of each field, if all samples have the same. Shards of a data set must agree.
    """

    rows: Rows
    crc: NDArray[np.uint32] | None
    size: int
    etag: str | None
    frames: Frames | None = None
    opened_bytes: int = 0
    columns: tuple[tuple[str, str], ...] | None = None
    has_names: bool = False
    kept: dict[int, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Pack the index: 5 to 10 bytes a member, half of them its checksum."""
        rows = self.rows
        unit = 1 if (rows.offset % TAR_BLOCK).any() else TAR_BLOCK
        lengths = np.strings.str_len(rows.keys).astype(np.int64)
        check_keys("this index", int(lengths.max(initial=0)), len(lengths), int(lengths.sum()))
        arrays: dict[str, NDArray[np.generic]] = {
            "key_length": lengths,
            "key_text": text_of(rows.keys, lengths),
            "members": np.diff(rows.starts),
            "field": rows.field,
            "size": rows.size,
            GAP[unit]: gaps(rows.offset, rows.size, unit),
        }
        if rows.block is not None and rows.row is not None:
            arrays["block"], arrays["row"] = rows.block, rows.row
        if self.crc is not None:
            arrays["crc"] = self.crc
        if self.frames is not None:
            arrays["frame_packed"] = np.diff(self.frames.packed, prepend=0)
            arrays["frame_unpacked"] = np.diff(self.frames.unpacked, prepend=0)
        size = None if self.size < 0 else self.size
        return pack_arrays({"size": size, "etag": lasting(self.etag), "fields": list(rows.fields)}, arrays)

    @staticmethod
    def unpack(data: Buffer, what: str) -> ShardIndex:
        """Unpack the result of `pack`."""
        arrays = Arrays(data, what)
        size, etag = arrays.fact_if_any("size", as_number), arrays.fact_if_any("etag", as_text)
        if size is not None and not 0 <= size <= MOST:
            raise damage(what, f"the object would have {size} bytes")
        if etag is not None and not etag.isprintable():
            raise damage(what, "the object's version is no text")
        frames = _frames(arrays, size) if arrays.has("frame_packed") else None
        end = int(frames.unpacked[-1]) if frames is not None else MOST if size is None else size
        rows = _rows(arrays, end)
        crc = None
        if arrays.has("crc"):
            crc = arrays.ints("crc", len(rows.offset), most=2**32 - 1).astype(np.uint32)
        return ShardIndex(rows, crc, -1 if size is None else size, etag, frames, has_names=True)


def gaps(offset: Ints, size: Ints, unit: int) -> Ints:
    """Return the gap before each member, in units of `unit` bytes, after rounding members up."""
    before = np.zeros(len(offset), np.int64)
    before[1:] = offset[:-1] + size[:-1] + (unit - 1) & -unit
    gap = offset - before
    if len(gap) and (int(gap.min()) < 0 or (gap % unit).any()):
        raise ValueError(f"members of a shard follow one another, at multiples of {unit} bytes")
    return gap // unit


def text_of(keys: NDArray[np.bytes_], lengths: Ints) -> NDArray[np.uint8]:
    table = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), keys.dtype.itemsize)
    return table[np.arange(keys.dtype.itemsize) < lengths[:, None]]


def _rows(arrays: Arrays, end: int) -> Rows:
    what = arrays.what
    fields = as_texts(arrays.fact("fields", as_list))
    if fields is None or any(name.startswith("__") for name in fields) or len(set(fields)) < len(fields):
        raise damage(what, "the names of its fields are none")
    unit = 1 if arrays.has(GAP[1]) else TAR_BLOCK
    size = arrays.ints("size")
    gap = arrays.ints(GAP[unit], len(size), most=MOST // unit)
    blocks = gap.copy()
    blocks[1:] += (size[:-1] + (unit - 1)) // unit
    offset = np.cumsum(blocks) * unit if float(blocks.sum(dtype=np.float64)) <= MOST / unit else None
    if offset is None or (len(offset) and int(offset[-1] + size[-1]) > end):
        raise damage(what, f"a member is beyond the archive's end at {end}")
    keys = _keys(arrays)
    block = row = None
    if arrays.has("block"):
        block = arrays.ints("block", len(keys), most=max(len(arrays.ints("members")) - 1, 0))
        row = arrays.ints("row", len(keys), most=2**32)
    counts = arrays.ints("members", len(keys) if block is None else None)
    if block is not None and len(block) and not len(counts):
        raise damage(what, "its samples are rows of no blocks")
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] != len(size):
        raise damage(what, f"its samples have {starts[-1]} members, and it has {len(size)}")
    field = arrays.ints("field", len(size), most=max(len(fields) - 1, 0))
    if len(field) and not fields:
        raise damage(what, "its members have no fields")
    if _has_twice(field, counts):
        raise damage(what, "a sample has a field twice")
    return Rows(keys, starts, field.astype(np.int32), offset, size, tuple(fields), block, row)


def _keys(arrays: Arrays) -> NDArray[np.bytes_]:
    text, ends = arrays.texts("key_text", "key_length")
    lengths = np.diff(ends)
    width = check_keys(arrays.what, int(lengths.max(initial=0)), len(lengths), int(lengths.sum()))
    table = np.zeros((len(lengths), width), np.uint8)
    table[np.arange(width) < lengths[:, None]] = np.frombuffer(text, np.uint8)
    keys: NDArray[np.bytes_] = table.reshape(-1).view(f"S{width}")
    if (np.strings.str_len(keys) != lengths).any():
        raise damage(arrays.what, "a key ends with a zero byte")
    return keys


def check_keys(what: str, longest: int, count: int, nbytes: int) -> int:
    """Return the width of a table of `count` keys with `nbytes` in total."""
    width = max(longest, 1)
    if width * count > max(_KEY_TABLE_BYTES, 8 * nbytes):
        raise LimitError.at(what, f": {count} keys of up to {width} bytes are over the limit")
    return width


def _has_twice(field: Ints, counts: Ints) -> bool:
    sample = np.repeat(np.arange(len(counts)), counts)
    pair = (sample << 32) + field
    if (pair[1:] > pair[:-1]).all():
        return False  # the common case: each sample has its fields in the order of their numbers
    return len(np.unique(pair)) < len(pair)


def _frames(arrays: Arrays, size: int | None) -> Frames:
    packed = np.cumsum(arrays.ints("frame_packed"))
    unpacked = np.cumsum(arrays.ints("frame_unpacked", len(packed)))
    if not len(packed) or unpacked[0] != 0 or packed[-1] > (MOST if size is None else size) or unpacked[-1] > MOST:
        raise damage(arrays.what, "its frames are in no archive")
    return Frames(packed, unpacked)
