"""The LitData format. Items that are compressed together share a block."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError
from headrace.formats.arrow_values import arrow_errors, library
from headrace.formats.compression import unpacked
from headrace.formats.folders import errors_named
from headrace.formats.format import Block, Catalogue, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.json_values import as_count
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.litdata import catalogue
from headrace.formats.litdata.catalogue import ItemChunk
from headrace.formats.litdata.trees import Tree, tree_of
from headrace.formats.mds.format import offsets_of, table_bytes
from headrace.formats.parquet.format import PARQUET, Parquet
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.rows_of_block import CutRows
from headrace.formats.sample_rows import keys_of, rows_of_members, rows_of_one_block
from headrace.types import Buffer, Ints

_AT_FIRST = 4 * 2**20
_MAGIC, _VERSION = b"LDFZ01\0\0", 1
_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("packed", "<u4"), ("unpacked", "<u4")])
_ARROW, _ARROW_END = b"LDARW01\0", 12


class LitData(Format):
    """A folder with LitData's `index.json`, for LitData's chunks or for Parquet files.

    Args:
        unpickle: Fields whose pickles are loaded. Loading a pickle executes code from the data.
        parquet: Format of the Parquet files that `index_parquet_dataset` has indexed.
    """

    name = "litdata"
    suffixes = ()
    catalogue = catalogue.NAME

    def __init__(self, unpickle: Sequence[str] = (), *, parquet: Parquet = PARQUET) -> None:
        self.unpickle = (unpickle,) if isinstance(unpickle, str) else tuple(unpickle)
        self.parquet = parquet

    def sniff(self, name: str, head: bytes) -> float:
        begins_so = name == catalogue.NAME and head.lstrip()[:1] == b"{"
        return 0.8 if begins_so and b'"chunk_bytes"' in head and b'"shards"' not in head else 0.0

    def listed(self, url: str, data: bytes, limits: Limits) -> Sequence[ShardEntry]:
        return catalogue.listed(url, data, self.unpickle, limits)

    def catalogued(self, url: str, data: bytes, limits: Limits, others: Callable[[str], bytes | None]) -> Catalogue:
        said = catalogue.said_by(url, data)
        if said.loader == catalogue.PARQUET_LOADER:
            return Catalogue(catalogue.tables(url, said), form=self.parquet)
        return super().catalogued(url, data, limits, others)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        said: ItemChunk | None = shard.about
        if said is None:
            raise FormatError.at(shard.url, ": only its index.json describes its content: give that")
        how = {"chunk": _index_of_whole, "batch": _index_of_frames}.get(said.packing, _index_of_items)
        with errors_named(shard.url):
            return await how(reads, shard.url, said, limits)

    def gives_tensors(self, entries: Sequence[ShardEntry]) -> bool:
        return bool(self.unpickle) or any("tensor" in entry.about.formats for entry in entries[:1])

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        how, formats, spec, samples, nbytes = _said(block.members[0])
        if how == "arrow":
            return _arrow_rows(bodies[0], samples)
        tree = tree_of(formats, spec, self.unpickle, block.limits)
        if how == "item":
            return [tree.sample(bodies[0])]
        if how == "sample":
            return [tree.sample(bytes(unpacked("zstd", bodies[0], block.url, block.limits)))]
        is_whole = how == "chunk"
        data = unpacked("zstd", bodies[0], block.url, block.limits, nbytes if is_whole else None)
        offsets = offsets_of(data, samples, len(data), block.limits) if is_whole else _offsets_in(data, tree, samples)
        return CutRows(data, offsets, tree.sample)


LITDATA = LitData()


def _field(how: str, said: ItemChunk, samples: int = 0, nbytes: int = 0) -> str:
    return json.dumps([how, said.formats, said.spec, samples, nbytes], separators=(",", ":"))


@lru_cache(maxsize=256)
def _said(field: str) -> tuple[str, str, str, int, int]:
    how, formats, spec, samples, nbytes = json.loads(field)
    return how, formats, spec, samples, nbytes


async def _index_of_items(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    """Return the index of separate items, or of the Arrow table that may follow them."""
    wanted = table_bytes(said.samples, limits)
    shard = PinnedObject(reads, url)
    head = await shard.head(min(wanted, _AT_FIRST))
    head = await shard.head(min(wanted, shard.size))
    if shard.size != said.nbytes and said.packing == "":
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {said.nbytes}")
    end = int.from_bytes(head[wanted - 4 : wanted], "little") if len(head) == wanted else shard.size
    offsets = offsets_of(head, said.samples, min(end, shard.size), limits)
    if end < shard.size:
        return await _index_of_arrow(shard, said, end, limits)
    field = _field(said.packing or "item", said)
    rows = rows_of_members(keys_of(np.arange(said.samples)), offsets[:-1], np.diff(offsets), field)
    return ShardIndex(rows, None, shard.size, shard.etag)


async def _index_of_arrow(shard: PinnedObject, said: ItemChunk, start: int, limits: Limits) -> ShardIndex:
    end = await shard.read(-_ARROW_END, _ARROW_END)
    length = int.from_bytes(end[:4], "little")
    if bytes(end[4:]) != _ARROW or start + length + _ARROW_END != shard.size:
        raise ValueError(f"{shard.size - start} bytes follow its items, and they are no table of Arrow")
    check_bytes("its table of Arrow", length, limits.member_bytes)
    return ShardIndex(_one_block(said, start, length, "arrow"), None, shard.size, shard.etag)


async def _index_of_whole(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    await shard.read(0, 1)
    limits.check_unpacked(shard.size, said.nbytes)
    check_bytes("it", max(said.nbytes, shard.size), limits.member_bytes)
    return ShardIndex(_one_block(said, 0, shard.size, "chunk"), None, shard.size, shard.etag)


def _one_block(said: ItemChunk, start: int, size: int, how: str) -> Rows:
    return rows_of_one_block(said.samples, start, size, _field(how, said, said.samples, said.nbytes))


async def _index_of_frames(reads: Reads, url: str, said: ItemChunk, limits: Limits) -> ShardIndex:
    shard = PinnedObject(reads, url)
    head = await shard.head(_HEAD.size)
    if len(head) < _HEAD.size:
        raise ValueError("it is cut off in its head")
    magic, version, flags, count, per_frame, frames = _HEAD.unpack(head)
    if (magic, version, flags) != (_MAGIC, _VERSION, 0) or as_count(count, said.samples) != said.samples:
        raise ValueError(f"it begins with {bytes(head[:12])!r} and has {count} items; {said.samples} were announced")
    if shard.size != said.nbytes:
        raise ValueError(f"it has {shard.size} bytes, and its catalogue lists {said.nbytes}")
    at = _HEAD.size + 4 * (count + 1)
    end = at + _FRAME.itemsize * frames
    if not count or not per_frame or frames != -(-count // per_frame) or end > shard.size:
        raise ValueError(f"it has {frames} frames of {per_frame} items for {count} in {shard.size} bytes")
    check_bytes("its head", end, limits.member_bytes)
    head = await shard.head(end)
    items = np.frombuffer(head, "<u4", count + 1, _HEAD.size).astype(np.int64)
    table = np.frombuffer(head, _FRAME, frames, at)
    rows = _rows_of_frames(said, per_frame, items, table, limits)
    ends = rows.offset + rows.size
    if int(rows.offset[0]) != end or int(ends[-1]) != shard.size or (ends[:-1] != rows.offset[1:]).any():
        raise ValueError("its frames do not follow one another, to its end")
    return ShardIndex(rows, None, shard.size, shard.etag)


def _rows_of_frames(said: ItemChunk, per_frame: int, items: Ints, table: NDArray[np.void], limits: Limits) -> Rows:
    count, frames = len(items) - 1, len(table)
    first = np.arange(frames) * per_frame
    stop = np.minimum(first + per_frame, count)
    sizes = table["unpacked"].astype(np.int64)
    if (table["first"] != first).any() or (table["items"] != stop - first).any() or (table["offset"] > 2**53).any():
        raise ValueError("its table of frames does not have its items")
    if items[0] or (np.diff(items) < 0).any() or (items[stop] - items[first] != sizes).any():
        raise ValueError("its items do not follow one another in its frames")
    check_bytes("an unpacked frame", int(sizes.max()), limits.member_bytes)
    fields = (_field("batch", said, per_frame), _field("batch", said, int(stop[-1] - first[-1])))
    field = np.zeros(frames, np.int32)
    field[-1] = fields[0] != fields[1]
    return Rows(
        keys_of(np.arange(count)),
        np.arange(frames + 1),
        field,
        table["offset"].astype(np.int64),
        table["packed"].astype(np.int64),
        fields[: 1 + int(field[-1])],
        block=np.arange(count) // per_frame,
        row=np.arange(count) % per_frame,
    )


def _offsets_in(data: Buffer, tree: Tree, samples: int) -> Ints:
    """Return the starts of a frame's items and the end of the last, from the sizes in each."""
    offsets = [0]
    for _ in range(samples):
        offsets.append(tree.end_at(data, offsets[-1]))
    if offsets[-1] != len(data):
        raise ValueError(f"the items of a frame end at byte {offsets[-1]} of {len(data)}")
    return np.array(offsets)


def _arrow_rows(data: bytes, samples: int) -> Sequence[dict[str, object]]:
    try:
        pa = library()
    except ImportError as error:
        raise FormatError(str(error)) from error
    with arrow_errors("its table of Arrow is damaged"):
        source = pa.py_buffer(data)
        reader = pa.ipc.open_file(source) if data[:6] == b"ARROW1" else pa.ipc.open_stream(source)
    with arrow_errors():
        table = reader.read_all()
        table.validate(full=True)
        rows: list[dict[str, object]] = table.to_pylist()
    if len(rows) != samples or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"its table of Arrow has {len(rows)} rows, and its catalogue lists {samples}")
    return rows
