"""MP4 as a kind of shard: what `headrace index` keeps of it, and reads again."""

from __future__ import annotations

import zlib

import numpy as np

from headrace.errors import FormatError, LimitError, OptionError, StageError, masked
from headrace.formats.compression.decompressor import path_of
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.file import Entry
from headrace.formats.index.named_arrays import Arrays, damage, pack_arrays
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.mp4.boxes import HEADER_BYTES, Box, box, header_of, shown
from headrace.formats.mp4.table import VideoTable, read_table
from headrace.protocols import ObjectReads, Reads
from headrace.types import Buffer

_HEAD_BYTES = 64 * 1024  # read at first; in a file that is made to be streamed the tables of minutes are in it
_BOXES_MOST = 1000  # before its tables


class Mp4(Format):
    """Videos, of which clips are read: their frames lie where the tables of each file say."""

    name = "mp4"
    suffixes = (".mp4", ".m4v", ".mov")

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        """How sure it is of an object: most begin with a box of the kind `ftyp`."""
        return 0.9 if head[4:8] == b"ftyp" else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:  # noqa: ARG002
        raise OptionError(f"{masked(shard.url)} is a video: hr.video() gives clips of its frames, hr.files() its bytes")

    async def own_index(self, shard: ObjectReads, limits: Limits) -> tuple[Entry, bytes]:
        """What an index file has of a video: its tables, as they are."""
        moov = await read_moov(shard, limits)
        table = table_of(moov, shard.url, shard.size, limits)
        block = pack_arrays({"size": shard.size, "etag": shard.etag}, {"moov": np.frombuffer(moov, np.uint8)})
        return Entry(
            name=shard.url,
            samples=len(table),
            members=len(table.offset),
            nbytes=int(table.size.sum()),
            size=shard.size,
            etag=shard.etag,
            length=len(block),
            check=zlib.crc32(block),
        ), block


MP4 = Mp4()


def is_video(url: str) -> bool:
    """Whether an address is that of a video, by its name."""
    return path_of(url).lower().endswith(MP4.suffixes)


def unpack_moov(block: Buffer, what: str) -> bytes:
    """The tables of a video, as `Mp4.own_index` has packed them.

    Raises:
        FormatError: the bytes are damaged, or no such index; it names `what`.
    """
    moov = Arrays(block, what).arrays.get("moov")
    if moov is None or moov.dtype != np.uint8:
        raise damage(what, "it has no tables of a video; was it made of other shards?")
    return moov.tobytes()


def table_of(moov: bytes, url: str, size: int, limits: Limits) -> VideoTable:
    """The frames of the video at `url`, which has `size` bytes, by its tables.

    Raises:
        FormatError: they are damaged, or of a kind that is not read.
    """
    try:
        return read_table(memoryview(moov), size, limits)
    except (ValueError, OverflowError, IndexError) as error:
        raise FormatError(f"the video {masked(url)} cannot be read by its tables: {error}", url=url) from None


async def read_moov(shard: ObjectReads, limits: Limits) -> bytes:
    """The body of the box with the tables of a video, without those of its other tracks, in two or three reads.

    Raises:
        FormatError, LimitError: there is none, or it is too large.
        StorageError: it could not be read.
    """
    try:
        moov = await _found(shard, limits)
        kept = [part for part in Box(b"moov", moov) if part.kind != b"udta" and not _is_other_track(part)]
        return b"".join(box(part.kind, bytes(part.body)) for part in kept)
    except StageError:
        raise
    except ValueError as error:
        raise FormatError(f"{masked(shard.url)} is no MP4 that can be read: {error}", url=shard.url) from None


def _is_other_track(part: Box) -> bool:
    return part.kind == b"trak" and bytes(part.need(b"mdia", b"hdlr").body[8:12]) != b"vide"


async def _found(shard: ObjectReads, limits: Limits) -> memoryview:
    head, begin, at = await shard.read(0, _HEAD_BYTES), 0, 0
    for _ in range(_BOXES_MOST):
        if at >= shard.size:
            break
        if at + HEADER_BYTES > begin + len(head) and begin + len(head) < shard.size:
            head, begin = await shard.read(at, _HEAD_BYTES), at
        kind, header, size = header_of(head[at - begin :][:HEADER_BYTES], shard.size - at)
        if at + size > shard.size:
            raise ValueError(
                f"its box {shown(kind)} at {at} would end at byte {at + size}, and it has {shard.size}: it is cut off"
            )
        if kind == b"moov":
            if size > limits.member_bytes:
                raise LimitError(
                    f"{masked(shard.url)}: its tables have {size} bytes, over the limit of {limits.member_bytes}",
                    url=shard.url,
                )
            have = head[at - begin + header :][: size - header]
            more = await shard.read(at + header + len(have), size - header - len(have))
            return memoryview(b"".join([have, more])) if len(more) else have
        if kind == b"moof":
            raise ValueError("it begins with a fragment, and its tables do not come before")
        at += size
    raise ValueError(f"it has no box 'moov' with tables within its {shard.size} bytes: it is cut off, or no MP4")
