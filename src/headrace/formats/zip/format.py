"""Zip archives, and .npz files, as formats."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.format import Block, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.numpy_files import decode_npz
from headrace.formats.tar.headers import shown
from headrace.formats.tar.samples import Grouper
from headrace.formats.whole_files import index_of_file
from headrace.formats.zip.directory import TAIL_BYTES, Member, ZipDirectory, find_directory, members_in
from headrace.formats.zip.members import EXTRA_MOST, HEAD, body_of
from headrace.protocols import Reads
from headrace.rows import Rows

_BEHIND_MOST = 24  # bytes that may follow a member's own


class Zip(Format):
    """Members whose names agree up to the first dot behind the last slash are a sample, as in a tar."""

    name = "zip"
    suffixes = (".zip",)

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.7 if head.startswith((b"PK\3\4", b"PK\5\6")) else 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:  # noqa: ARG002
        at = tail.rfind(b"PK\5\6")  # the end record, and a comment of as many bytes as it says
        return 0.7 if at >= 0 and len(tail) - at - 22 == int.from_bytes(tail[at + 20 : at + 22], "little") else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        found = await directory_of(reads, shard.url, limits)
        try:
            return ShardIndex(_rows(found.members, found.place, limits), None, found.size, found.etag)
        except LimitError as error:
            raise LimitError(f"{masked(shard.url)}: {error.args[0]}", url=shard.url) from None
        except (FormatError, ValueError) as error:
            raise FormatError(f"{masked(shard.url)} cannot be read: {error.args[0]}", url=shard.url) from None

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        sample: dict[str, object] = {}
        for field, data in zip(block.members, bodies, strict=True):
            try:
                sample[field] = body_of(data, field, block.limits)
            except ValueError as error:
                raise ValueError(f"field {field[:80]!r}: {error}") from None
        return [sample]


class Npz(Format):
    """NumPy's archives of arrays: each file is a sample, with an array for each field."""

    name = "npz"
    suffixes = (".npz",)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        return await index_of_file(reads, shard, "npz", limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        try:
            return [dict(decode_npz(bodies[0], block.limits))]
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error)[:300] or type(error).__name__) from error


ZIP, NPZ = Zip(), Npz()


class FoundDirectory(NamedTuple):
    """The members of an archive, and what is known of it: where its directory lies, its bytes, its version."""

    members: list[Member]
    place: ZipDirectory
    size: int
    etag: str | None


async def directory_of(reads: Reads, url: str, limits: Limits) -> FoundDirectory:
    """The members of the archive at `url`.

    Raises:
        FormatError: it is damaged, or cannot be read here.
        LimitError: it asks for more than may be.
        StorageError: it could not be read.
    """
    try:
        return await _directory(reads, url, limits)
    except LimitError as error:
        raise LimitError(f"{masked(url)}: {error.args[0]}", url=url) from None
    except (FormatError, ValueError) as error:
        raise FormatError(f"{masked(url)} cannot be read: {error.args[0]}", url=url) from None


async def _directory(reads: Reads, url: str, limits: Limits) -> FoundDirectory:
    span = await reads.read_into(url, 0, memoryview(bytearray(4)))
    size, etag = span.size, span.etag
    tail = memoryview(bytearray(min(TAIL_BYTES, size)))
    await reads.read_into(url, size - len(tail), tail, etag=etag)
    place = find_directory(bytes(tail), size)
    if place.stop - place.start > limits.member_bytes:
        length = place.stop - place.start
        raise LimitError(f"its directory has {length} bytes, over the limit of {limits.member_bytes}")
    first = size - len(tail)
    if place.start >= first:
        data = bytes(tail[place.start - first : place.stop - first])
    else:
        whole = memoryview(bytearray(place.stop - place.start))
        await reads.read_into(url, place.start, whole, etag=etag)
        data = bytes(whole)
    return FoundDirectory(list(members_in(data, place, limits)), place, size, etag)


def _rows(members: list[Member], place: ZipDirectory, limits: Limits) -> Rows:
    """The samples of an archive, in the order in which they lie."""
    members.sort(key=lambda member: member.offset)
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        twice = next(name for k, name in enumerate(sorted(names)) if name == sorted(names)[k - 1])
        raise FormatError(f"it has two members called {shown(twice)}")
    offsets = np.array([member.offset for member in members], np.int64)
    packed = np.array([member.packed for member in members], np.int64)
    lengths = np.array(list(map(len, names)), np.int64)
    sizes = np.diff(offsets, append=place.start)
    needed = HEAD.size + packed
    if (sizes < needed).any():
        raise FormatError(f"its member {shown(names[int((sizes < needed).argmax())])} lies over what follows it")
    sizes = np.minimum(sizes, needed + 3 * lengths + EXTRA_MOST + _BEHIND_MOST)
    grouper = Grouper(limits)
    grouper.add(names, offsets.tolist(), sizes.tolist())
    rows = grouper.take(ended=True)
    keys, counts = np.unique(rows.keys, return_counts=True)
    if (counts > 1).any():
        key = keys[int(counts.argmax())]
        raise FormatError(f"the members of the sample {shown(key)} do not lie together: pack them one behind the other")
    return rows
