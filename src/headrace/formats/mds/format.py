"""MDS as a format: samples are known from a table; of a compressed shard they share one block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.compression.whole import unpacked_to
from headrace.formats.folders import at_least
from headrace.formats.format import Block, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.mds import catalogue
from headrace.formats.mds.catalogue import File, Shard
from headrace.formats.mds.encodings import MdsColumn, columns_of, sample_of
from headrace.formats.mds.table import columns_said, count_of, offsets_of, table_bytes
from headrace.formats.rows_of_block import RowsOfBlock
from headrace.protocols import Reads
from headrace.rows import Rows
from headrace.types import Ints

_FIRST_BYTES = 64 * 1024
_AT_FIRST = 4 * 2**20


class Mds(Format):
    """A folder with an `index.json`, or single shards that are not compressed."""

    name = "mds"
    suffixes = (".mds",)
    catalogue = catalogue.NAME

    def sniff(self, name: str, head: bytes) -> float:
        begins_so = name == catalogue.NAME and head.lstrip()[:1] == b"{" and b'"shards"' in head
        return 0.9 if begins_so and b'"mds"' in head else 0.0

    def listed(self, url: str, data: bytes, limits: Limits) -> Sequence[ShardEntry]:
        return catalogue.listed(url, data, limits)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        said: Shard | None = shard.about
        try:
            if said is not None and said.packed is not None:
                return await _index_of_packed(reads, shard.url, said, said.packed, limits)
            return await _index(reads, shard.url, said, limits)
        except LimitError as error:
            raise LimitError(f"{masked(shard.url)}: {error.args[0]}", url=shard.url) from None
        except ValueError as error:
            raise FormatError(f"{masked(shard.url)} is damaged: {error}", url=shard.url) from None

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        (how,), (data,) = block.members, bodies
        if how.startswith("["):
            return [sample_of(columns_of(how, block.limits), data)]
        return _Unpacked(_said(how), data, block)


MDS = Mds()


async def _index(reads: Reads, url: str, said: Shard | None, limits: Limits) -> ShardIndex:
    """The samples of a shard that lies there as it is."""
    wanted = _FIRST_BYTES if said is None else table_bytes(said.samples, limits)
    head = memoryview(bytearray(min(wanted, _AT_FIRST)))  # what follows is not asked for before it is known to be there
    span = await reads.read_into(url, 0, head)
    head = head[: span.stop - span.start]
    count = count_of(head) if said is None else said.samples
    if said is not None and said.raw.nbytes != span.size:
        raise ValueError(f"it has {span.size} bytes, and its catalogue says {said.raw.nbytes}")
    if said is not None:
        columns = said.columns
        head = await at_least(reads, url, head, min(wanted, span.size), span.etag)
    else:
        end = min(table_bytes(count, limits), span.size)
        head = await at_least(reads, url, head, end, span.etag)
        start = int(offsets_of(head, count, span.size, limits)[0])
        if start - end > limits.header_bytes:
            raise LimitError(f"its settings have {start - end} bytes, over the limit of {limits.header_bytes}")
        head = await at_least(reads, url, head, start, span.etag)
        columns = columns_said(head[end:start])
    offsets = offsets_of(head, count, span.size, limits)
    rows = Rows(
        np.arange(count).astype(f"S{len(str(max(count - 1, 0)))}"),
        np.arange(count + 1),
        np.zeros(count, np.int32),
        offsets[:-1],
        np.diff(offsets),
        (columns,),
    )
    return ShardIndex(rows, None, span.size, span.etag)


async def _index_of_packed(reads: Reads, url: str, said: Shard, packed: File, limits: Limits) -> ShardIndex:
    """The samples of a compressed shard: rows of one block, which is all of it."""
    if max(said.raw.nbytes, packed.nbytes) > limits.member_bytes:
        raise LimitError(f"it has {said.raw.nbytes} bytes unpacked, over the limit of {limits.member_bytes}")
    span = await reads.read_into(url, 0, memoryview(bytearray(1)))
    if span.size != packed.nbytes:
        raise ValueError(f"it has {span.size} bytes, and its catalogue says {packed.nbytes}")
    hashes = [dict(file.hashes) for file in (said.raw, packed)]
    how = {"columns": said.columns, "samples": said.samples, "bytes": said.raw.nbytes, "kind": said.kind}
    count = said.samples
    rows = Rows(
        np.arange(count).astype(f"S{len(str(max(count - 1, 0)))}"),
        np.array([0, 1] if count else [0]),
        np.zeros(min(count, 1), np.int32),
        np.zeros(min(count, 1), np.int64),
        np.full(min(count, 1), packed.nbytes, np.int64),
        (json.dumps({**how, "hashes": hashes}, separators=(",", ":")),),
        block=np.zeros(count, np.int64),
        row=np.arange(count),
    )
    return ShardIndex(rows, None, span.size, span.etag)


@lru_cache(maxsize=64)
def _said(how: str) -> dict[str, object]:
    said: dict[str, object] = json.loads(how)
    return said


class _Unpacked(RowsOfBlock):
    """The samples of a compressed shard."""

    def __init__(self, said: dict[str, Any], data: bytes, block: Block) -> None:
        raw_hashes, packed_hashes = said["hashes"]
        _check(data, packed_hashes, "its compressed bytes")
        self._data = unpacked_to(said["bytes"], said["kind"], data, block.url, block.limits)
        _check(self._data, raw_hashes, "the bytes that it unpacks to")
        self._columns: tuple[MdsColumn, ...] = columns_of(said["columns"], block.limits)
        self._offsets: Ints = offsets_of(self._data, said["samples"], len(self._data), block.limits)
        self.nbytes = len(self._data)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, number: int) -> dict[str, object]:
        start, stop = self._offsets[number : number + 2].tolist()
        return sample_of(self._columns, bytes(self._data[start:stop]))


def _check(data: bytes | bytearray, hashes: dict[str, str], what: str) -> None:
    """Compare bytes with those of their hashes that are known here."""
    for name, digits in hashes.items():
        known = hashlib.new(name) if name in hashlib.algorithms_available and "shake" not in name else _xxhash(name)
        if known is not None:
            known.update(data)
            if known.hexdigest() != digits.lower():
                raise ValueError(f"{what} have the {name} {known.hexdigest()}, and its catalogue says {digits[:128]}")


def _xxhash(name: str) -> Any:
    try:
        import xxhash
    except ImportError:
        return None
    return getattr(xxhash, name)() if name in xxhash.algorithms_available else None
