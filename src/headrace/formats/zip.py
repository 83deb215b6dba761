"""Zip archives and the arrays of .npz and .npy files: parses the directory and members of archives.

Damage raises a ValueError, which becomes a FormatError with the archive.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, reason_of
from headrace.formats.decoders import NpyDecoder, decode_npz, npy_header
from headrace.formats.format import Block, Format, ShardEntry, errors_named, index_of_file
from headrace.formats.index import ShardIndex
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.stored_arrays import Array, Names, StoredArray, StoredPart, Table, chosen
from headrace.formats.tar.headers import shown
from headrace.formats.tar.samples import Grouper
from headrace.types import Buffer

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END_64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
HEAD = struct.Struct("<4s5H3I2H")
TAIL_BYTES = END.size + 0xFFFF + LOCATOR.size + END_64.size
"""Size of the archive's end that has everything but the directory itself."""

_ALL_16, _ALL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _UTF8 = 1, 1 << 11
_STRONG = 1 << 6
_LATER = 1 << 3  # flag: checksum and sizes follow the bytes
_LATER_MAGIC = b"PK\7\x08"
STORED, DEFLATED = 0, 8
EXTRA_MOST = 0xFFFF
BEHIND_MOST = 24  # maximum size of the data descriptor after a member's bytes


class Member(NamedTuple):
    """The directory's entry of a member. `offset` is that of its header."""

    name: bytes
    packed: int
    size: int
    offset: int


class ZipDirectory(NamedTuple):
    """The location of the directory, and its number of entries."""

    start: int
    stop: int
    entries: int


def find_directory(tail: bytes, size: int) -> ZipDirectory:
    first = size - len(tail)
    at = tail.rfind(b"PK\5\6")
    while at >= 0 and (at + END.size > len(tail) or at + END.size + END.unpack_from(tail, at)[7] != len(tail)):
        at = tail.rfind(b"PK\5\6", 0, at)
    if at < 0:
        raise ValueError("it does not end as a zip archive; it may be cut off")
    _, disk, first_disk, here, entries, length, start, _ = END.unpack_from(tail, at)
    stop = first + at
    is_wide = _ALL_16 in (disk, first_disk, here, entries) or _ALL_32 in (length, start)
    if is_wide and at >= LOCATOR.size and tail[at - LOCATOR.size :][:4] == b"PK\6\7":
        place = LOCATOR.unpack_from(tail, at - LOCATOR.size)[2]
        if not first <= place <= stop - LOCATOR.size - END_64.size:
            raise ValueError(f"its end refers to byte {place}, where it cannot continue")
        magic, _, _, _, disk, first_disk, here, entries, length, start = END_64.unpack_from(tail, place - first)
        if magic != b"PK\6\6":
            raise ValueError(f"there is nothing of it at byte {place}, to which its end refers")
        stop = place
    if disk or first_disk or here != entries:
        raise ValueError("it is one of several parts, which are not read")
    if start + length != stop:
        raise ValueError(f"its directory of {length} bytes at {start} is not before its end at {stop}")
    if entries * ENTRY.size > length:
        raise ValueError(f"its directory claims {entries} members in {length} bytes")
    return ZipDirectory(start, stop, entries)


def members_in(data: bytes, directory: ZipDirectory, limits: Limits) -> Iterator[Member]:
    """Iterate over the members that are files, in the order of the directory `data`."""
    at = 0
    for number in range(directory.entries):
        if at + ENTRY.size > len(data) or data[at : at + 4] != b"PK\1\2":
            raise ValueError(f"its directory is damaged at entry {number}, byte {directory.start + at}")
        _, _, _, flags, method, _, _, _, packed, size, name_length, extra_length, remark, _, _, _, offset = (
            ENTRY.unpack_from(data, at)
        )
        begin = at + ENTRY.size
        end = begin + name_length + extra_length
        name, extra, at = data[begin : begin + name_length], data[begin + name_length : end], end + remark
        if at > len(data):
            raise ValueError(f"its directory is cut off in entry {number}")
        packed, size, offset = _wide(extra, (size, packed, offset), name)
        if not name.endswith(b"/"):
            member = Member(_text(name, flags), packed, size, offset)
            _check(member, flags, method, directory.start, limits)
            yield member
    if at != len(data):
        raise ValueError(f"its directory has {len(data) - at} bytes more than its {directory.entries} entries")


def _wide(extra: bytes, said: tuple[int, int, int], name: bytes) -> tuple[int, int, int]:
    """Return (packed size, size, offset). Values beyond 32 bits are read from `extra`."""
    values = list(said)
    missing = [k for k, value in enumerate(values) if value == _ALL_32]
    if missing:
        wide = _zip64(extra)
        if len(wide) < 8 * len(missing):
            raise ValueError(f"its directory lacks the place of {shown(name)}")
        for k, value in zip(missing, struct.unpack_from(f"<{len(missing)}Q", wide), strict=True):
            values[k] = value
    return values[1], values[0], values[2]


def _zip64(extra: bytes) -> bytes:
    """Return the zip64 field of `extra`, or b""."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def _text(name: bytes, flags: int) -> bytes:
    """Return a name in UTF-8. Names without the UTF-8 flag are UTF-8 or cp437."""
    if not flags & _UTF8:
        try:
            name.decode()
        except ValueError:
            return name.decode("cp437").encode()
    return name


def _check(member: Member, flags: int, method: int, end: int, limits: Limits) -> None:
    name = member.name
    if flags & (_ENCRYPTED | _STRONG):
        raise FormatError(f"its member {shown(name)} is encrypted, and that is not read")
    if method not in (STORED, DEFLATED):
        raise FormatError(f"its member {shown(name)} is packed by method {method}; stored and deflated ones are read")
    if method == STORED and member.packed != member.size:
        raise FormatError(f"its member {shown(name)} is stored as {member.packed} bytes, and has {member.size}")
    if name.startswith(b"/") or b"\\" in name or b"\0" in name or b".." in name.split(b"/"):
        raise FormatError(f"its member {shown(name)} is outside of it")
    most = min(limits.member_bytes, limits.unpacked(member.packed))
    if member.size > most:
        text = f"its member {shown(name)} of {member.packed} bytes unpacks to {member.size}, over the limit of {most}"
        raise LimitError(text)
    if member.offset + member.packed > end:
        raise ValueError(f"its member {shown(name)} would end after its directory's begin at {end}")


def body_of(data: bytes, field: str, limits: Limits) -> bytes:
    """Return the verified content of a member. Damage, or another name, raises a ValueError.

    Args:
        data: The bytes from the header on; more may follow.
        field: End of the member's name.
    """
    if len(data) < HEAD.size or data[:4] != b"PK\3\4":
        raise ValueError("there is no member where the directory has one")
    _, _, flags, method, _, _, crc, packed, size, name_length, extra_length = HEAD.unpack_from(data)
    begin = HEAD.size + name_length + extra_length
    name, extra = data[HEAD.size : HEAD.size + name_length], data[begin - extra_length : begin]
    if not name.decode("utf-8", "surrogateescape").lower().endswith(field) and name.isascii():
        raise ValueError(f"the member there is called {name[:80]!r}")
    if begin > len(data) or method not in (STORED, DEFLATED) or flags & 1:
        raise ValueError("its header is damaged")
    if _ALL_32 in (packed, size) and not flags & _LATER and len(wide := _zip64(extra)) >= 16:
        size, packed = struct.unpack_from("<2Q", wide)
    rest = data[begin:]
    if method == DEFLATED:
        body, used = _inflated(rest, limits)
    elif flags & _LATER:
        return _stored_before(rest)
    else:
        body, used = rest[:packed], packed
    checks = [_checks(rest[used:], wide) for wide in (False, True)] if flags & _LATER else [(crc, packed, size)]
    if (zlib.crc32(body), used, len(body)) not in checks:
        raise ValueError("its bytes do not match its checksum and its sizes")
    return body


def _inflated(data: bytes, limits: Limits) -> tuple[bytes, int]:
    most = min(limits.member_bytes, limits.unpacked(len(data)))
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        body = unpack.decompress(data, most)
    except zlib.error as error:
        raise ValueError(f"it does not unpack ({error})") from None
    if not unpack.eof and len(body) == most:
        raise ValueError(f"it unpacks to more than {most} bytes, the limit")
    if not unpack.eof:
        raise ValueError("it is cut off")
    return body, len(data) - len(unpack.unused_data)


def _checks(data: bytes, wide: bool) -> tuple[int, int, int] | None:
    """Parse the (checksum, packed size, size) that follow a member's bytes. None: too short."""
    at = 4 if data.startswith(_LATER_MAGIC) else 0
    layout = struct.Struct("<I2Q" if wide else "<3I")
    if at + layout.size > len(data):
        return None
    crc, packed, size = layout.unpack_from(data, at)
    return crc, packed, size


def _stored_before(data: bytes) -> bytes:
    """Return the stored bytes at the start of `data`. Their length follows them, at the end."""
    for behind in (16, 24, 12, 20):
        count = len(data) - behind
        if count >= 0 and _checks(data[count:], behind in (24, 20)) == (zlib.crc32(data[:count]), count, count):
            return data[:count]
    raise ValueError("its bytes do not match the checksum and the sizes after them")


class Zip(Format):
    """Zip archives: members with equal names up to the first dot are a sample, as in tar."""

    name = "zip"
    suffixes = (".zip",)

    def sniff(self, name: str, head: bytes) -> float:
        return 0.7 if head.startswith((b"PK\3\4", b"PK\5\6")) else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        whole = PinnedObject(reads, shard.url)
        members, place = await directory_of(whole, limits)
        with errors_named(shard.url, "cannot be read"):
            return ShardIndex(_rows(members, place, limits), None, whole.size, whole.etag)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        sample: dict[str, object] = {}
        for field, data in zip(block.members, bodies, strict=True):
            try:
                sample[field] = body_of(data, field, block.limits)
            except ValueError as error:
                raise ValueError(f"field {field[:80]!r}: {error}") from None
        return [sample]


class Npz(Format):
    """NumPy .npz files: each file is a sample, each array a field."""

    name = "npz"
    suffixes = (".npz",)

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        return await index_of_file(reads, shard, "npz", limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        try:
            return [dict(decode_npz(bodies[0], block.limits))]
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            raise ValueError(reason_of(error)) from error


ZIP, NPZ = Zip(), Npz()


async def directory_of(shard: PinnedObject, limits: Limits) -> tuple[list[Member], ZipDirectory]:
    """Read the directory of an archive. Errors name the archive."""
    with errors_named(shard.url, "cannot be read"):
        tail = await shard.read(-TAIL_BYTES, TAIL_BYTES)
        place = find_directory(bytes(tail), shard.size)
        length = place.stop - place.start
        check_bytes("its directory", length, limits.member_bytes)
        first = shard.size - len(tail)
        data = tail[place.start - first :][:length] if place.start >= first else await shard.read(place.start, length)
        return list(members_in(bytes(data), place, limits)), place


def _rows(members: list[Member], place: ZipDirectory, limits: Limits) -> Rows:
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
        raise FormatError(f"its member {shown(names[int((sizes < needed).argmax())])} overlaps what follows it")
    sizes = np.minimum(sizes, needed + 3 * lengths + EXTRA_MOST + BEHIND_MOST)
    grouper = Grouper(limits)
    grouper.add(names, offsets.tolist(), sizes.tolist())
    rows = grouper.take(ended=True)
    keys, counts = np.unique(rows.keys, return_counts=True)
    if (counts > 1).any():
        key = keys[int(counts.argmax())]
        raise FormatError(
            f"the members of the sample {shown(key)} are not stored together: pack them one after the other"
        )
    return rows


_HEADER_MOST = 16 * 1024  # of an .npy header; NumPy reads at most 10,000 bytes
_ANY_BYTES = 2**53
_ALONE = "value"


class WholeArray(StoredArray):
    """A compressed or column-major array. All rows are read together, as the member's `part`."""

    def __init__(
        self,
        name: str,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        part: tuple[int, int],
        url: str,
        limits: Limits,
    ) -> None:
        super().__init__(name, dtype, shape, 0)
        self.rows = max(1, self.count)
        self._part, self._url, self._limits = part, url, limits

    def parts(self, number: int) -> Sequence[StoredPart]:
        return (StoredPart((0,) * len(self.shape), *self._part),)

    def assembled(self, number: int, bodies: Sequence[Buffer]) -> Array:
        try:
            whole = NpyDecoder()(body_of(bytes(bodies[0]), f"{self.name}.npy".lower(), self._limits))
        except ValueError as error:
            raise FormatError.at(self._url, f": the array {self.name!r} is damaged: {error}") from None
        if whole.shape != self.shape or whole.dtype != self.dtype:
            raise FormatError.at(self._url, f": the array {self.name!r} has another shape or type than in its header")
        return np.ascontiguousarray(whole, self.dtype.newbyteorder("="))


async def npy_table(reads: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    """Return the rows of the array in an .npy file. Its field is "value"."""
    shard = PinnedObject(reads, url)
    head = await shard.read(0, _HEADER_MOST)
    with errors_named(url):
        begin, shape, dtype, by_column = npy_header(head)
        if by_column and len(shape) > 1:
            raise ValueError("it is stored by columns, so its rows are not stored together")
        found = StoredArray(_ALONE, dtype, _with_rows(shape), len(begin))
        if len(begin) + found.count * found.row_bytes != shard.size:
            raise ValueError(
                f"its header describes {found.count * found.row_bytes} bytes, {shard.size - len(begin)} follow"
            )
    fields = chosen(names, [_ALONE], url)
    return Table.of(dict.fromkeys(fields, found), shard.size, url, limits), Version(shard.size, shard.etag)


async def npz_table(reads: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    # members may have any size: the table checks the size of each read
    shard = PinnedObject(reads, url)
    found, _ = await directory_of(shard, replace(limits, member_bytes=_ANY_BYTES))
    names_there = (one for one in found if one.name.endswith(b".npy") and one.name.isascii())
    members = {one.name.decode().removesuffix(".npy"): one for one in names_there}
    arrays = {}
    for field, name in chosen(names, [*members], url).items():
        try:
            arrays[field] = await _array(shard, name, members[name], limits)
        except LimitError as error:
            raise LimitError.at(url, f": the array {name!r}: {error.args[0]}") from None
        except ValueError as error:
            raise FormatError.at(url, f": the array {name!r} cannot be read: {error}") from None
    if not arrays:
        raise FormatError.at(url, "has no arrays")
    return Table.of(arrays, shard.size, url, limits), Version(shard.size, shard.etag)


async def _array(shard: PinnedObject, name: str, member: Member, limits: Limits) -> StoredArray:
    head = bytes(await shard.read(member.offset, HEAD.size + 2 * len(member.name) + _HEADER_MOST))
    if len(head) < HEAD.size or head[:4] != b"PK\3\4":
        raise ValueError("there is no member where the directory has one")
    _, _, _, method, *_, name_length, extra_length = HEAD.unpack_from(head)
    begin = HEAD.size + name_length + extra_length
    inner = head[begin:]
    if method == DEFLATED:
        try:
            inner = zlib.decompressobj(-zlib.MAX_WBITS).decompress(inner, _HEADER_MOST)
        except zlib.error as error:
            raise ValueError(f"it does not unpack ({error})") from None
    said, shape, dtype, by_column = npy_header(inner)
    nbytes = len(said) + math.prod(_with_rows(shape)) * dtype.itemsize
    if nbytes != member.size:
        raise ValueError(f"its header describes {nbytes} bytes, and it has {member.size}")
    if method == DEFLATED or (by_column and len(shape) > 1):
        stop = min(member.offset + begin + member.packed + BEHIND_MOST, shard.size)
        return WholeArray(name, dtype, shape, (member.offset, stop - member.offset), shard.url, limits)
    return StoredArray(name, dtype, shape, member.offset + begin + len(said))


def _with_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        raise ValueError("it is a single number, and has no rows")
    return shape
