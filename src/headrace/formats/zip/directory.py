"""The directory at the end of a zip archive: which members it has, and where each begins."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from headrace.errors import FormatError, LimitError
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import shown

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END_64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
TAIL_BYTES = END.size + 0xFFFF + LOCATOR.size + END_64.size
"""So many bytes at the end have all but the directory itself."""

_ALL_16, _ALL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _UTF8 = 1, 1 << 11
_STRONG = 1 << 6
STORED, DEFLATED = 0, 8


class Member(NamedTuple):
    """What the directory says of a member; `offset` is where its header begins."""

    name: bytes
    packed: int
    size: int
    offset: int


class ZipDirectory(NamedTuple):
    """Where the directory lies, and how many entries it has."""

    start: int
    stop: int
    entries: int


def find_directory(tail: bytes, size: int) -> ZipDirectory:
    """Where the directory of an archive of `size` bytes lies, whose last bytes are `tail`.

    Raises:
        ValueError: it has none, or it lies where none can be.
    """
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
            raise ValueError(f"its end says that it goes on at byte {place}, where it cannot")
        magic, _, _, _, disk, first_disk, here, entries, length, start = END_64.unpack_from(tail, place - first)
        if magic != b"PK\6\6":
            raise ValueError(f"there is nothing of it at byte {place}, where its end says that it goes on")
        stop = place
    if disk or first_disk or here != entries:
        raise ValueError("it is one of several parts, which are not read")
    if start + length != stop:
        raise ValueError(f"its directory of {length} bytes at {start} does not lie before its end at {stop}")
    if entries * ENTRY.size > length:
        raise ValueError(f"its directory says {entries} members in {length} bytes")
    return ZipDirectory(start, stop, entries)


def members_in(data: bytes, directory: ZipDirectory, limits: Limits) -> Iterator[Member]:
    """The members that are files, in the order of the directory, whose bytes are `data`.

    Raises:
        FormatError: one cannot be read here; it is named.
        LimitError: one asks for too much.
        ValueError: the directory is damaged.
    """
    at = 0
    for number in range(directory.entries):
        if at + ENTRY.size > len(data) or data[at : at + 4] != b"PK\1\2":
            raise ValueError(f"its directory is damaged at entry {number}, byte {directory.start + at}")
        _, _, _, flags, method, _, _, _, packed, size, name_length, extra_length, remark, _, _, _, offset = (
            ENTRY.unpack_from(data, at)
        )
        begin = at + ENTRY.size
        name, extra = data[begin : begin + name_length], data[begin + name_length :][:extra_length]
        at = begin + name_length + extra_length + remark
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
    """(packed size, size, offset), of which those that are too large for 32 bits are in `extra`."""
    values, at = list(said), 0
    if _ALL_32 in values:
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                wide = extra[at + 4 : at + 4 + length]
                missing = [k for k, value in enumerate(values) if value == _ALL_32]
                if len(wide) < 8 * len(missing):
                    break
                for k, value in zip(missing, struct.unpack_from(f"<{len(missing)}Q", wide), strict=True):
                    values[k] = value
                return values[1], values[0], values[2]
            at += 4 + length
        raise ValueError(f"its directory does not say where {shown(name)} lies")
    return values[1], values[0], values[2]


def _text(name: bytes, flags: int) -> bytes:
    """A name in UTF-8: where it is not said to be, it is that all the same, or of the first IBM PCs."""
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
        raise FormatError(f"its member {shown(name)} lies outside of it")
    most = min(limits.member_bytes, max(limits.unpacked_free_bytes, limits.unpacked_ratio * member.packed))
    if member.size > most:
        text = f"its member {shown(name)} of {member.packed} bytes unpacks to {member.size}, over the limit of {most}"
        raise LimitError(text)
    if member.offset + member.packed > end:
        raise ValueError(f"its member {shown(name)} would end behind its directory's begin at {end}")
