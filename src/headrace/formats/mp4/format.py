"""The MP4 format: indexes the tables of videos, and reads them."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads, lasting
from headrace.errors import FormatError, OptionError, StageError, masked
from headrace.formats.compression import path_of
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.file import Entry
from headrace.formats.index.named_arrays import Arrays, damage, pack_arrays
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.mp4.finding import HEAD_BYTES, Tables, find_tables
from headrace.formats.mp4.table import VideoTable, read_table
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Buffer


class Mp4(Format):
    """MP4 videos, read as clips. The tables of each file locate its frames."""

    name = "mp4"
    suffixes = (".mp4", ".m4v", ".mov")

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.9 if head[4:8] == b"ftyp" else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:  # noqa: ARG002
        raise OptionError(f"{masked(shard.url)} is a video: hr.video() gives clips of its frames, hr.files() its bytes")

    async def own_index(self, shard: PinnedObject, limits: Limits) -> tuple[Entry, bytes]:
        tables = await read_tables(shard, limits)
        table = table_of(tables, shard.url, shard.size, limits)
        block = pack_arrays({"size": shard.size, "etag": lasting(shard.etag)}, _arrays(tables))
        return Entry(
            name=shard.url,
            samples=len(table),
            members=len(table.offset),
            nbytes=int(table.size.sum()),
            size=shard.size,
            etag=lasting(shard.etag),
            length=len(block),
            check=zlib.crc32(block),
        ), block


MP4 = Mp4()


def is_video(url: str) -> bool:
    return path_of(url).lower().endswith(MP4.suffixes)


def _arrays(tables: Tables) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {"moov": np.frombuffer(tables.moov, np.uint8)}
    if tables.fragments:
        places, bodies = zip(*tables.fragments, strict=True)
        arrays["moof"] = np.frombuffer(b"".join(bodies), np.uint8)
        arrays["moof_at"] = np.array(places, np.int64)
        arrays["moof_ends"] = np.cumsum([len(body) for body in bodies])
    return arrays


def unpack_tables(block: Buffer, what: str) -> Tables:
    """Parse tables from `Mp4.own_index`. A FormatError names `what`."""
    arrays = Arrays(block, what).arrays
    moov = arrays.get("moov")
    if moov is None or moov.dtype != np.uint8:
        raise damage(what, "it has no tables of a video; was it made of other shards?")
    moof = arrays.get("moof", np.zeros(0, np.uint8))
    places, ends = (arrays.get(name, moof[:0]).astype(np.int64) for name in ("moof_at", "moof_ends"))
    begins = np.concatenate([[0], ends])
    if moof.dtype != np.uint8 or len(places) != len(ends) or begins[-1] != len(moof) or (np.diff(begins) < 0).any():
        raise damage(what, "its fragments are not where its table has them")
    bodies = [moof[begin:end].tobytes() for begin, end in pairwise(begins.tolist())]
    return Tables(moov.tobytes(), tuple(zip(places.tolist(), bodies, strict=True)))


def table_of(tables: Tables, url: str, size: int, limits: Limits) -> VideoTable:
    """Return the frames of the video at `url`. A FormatError names the video."""
    try:
        return read_table(tables, size, limits)
    except (ValueError, OverflowError, IndexError) as error:
        raise FormatError(f"the video {masked(url)} cannot be read by its tables: {error}", url=url) from None


async def read_tables(shard: PinnedObject, limits: Limits) -> Tables:
    """Read the tables of a video, without other tracks. Plain files need two or three reads."""
    head = await shard.read(0, HEAD_BYTES)
    walk = find_tables(head, shard.size, shard.url, limits)
    try:
        ranges = next(walk)
        while True:
            ranges = walk.send(await shard.read_each(ranges))
    except StopIteration as end:
        found: Tables = end.value
        return found
    except StageError:
        raise
    except ValueError as error:
        raise FormatError(f"{masked(shard.url)} is no MP4 that can be read: {error}", url=shard.url) from None
