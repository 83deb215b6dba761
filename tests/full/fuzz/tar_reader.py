"""The tar reader: any bytes, and archives built of right and odd parts with a few edits.

However it is read (whole, in pieces by several processes, without its bodies, member by member), the samples and the
error are the same; and they are those of `plain_members`, a reader that knows no fast way, no pieces and no limits.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from corpus import CASES
from corpus.parts import BLOCK, END, GNU, USTAR, V7, checksummed, header, long_name, member, padded, pax, record
from full.fuzz.dice import Dice, edited_at
from unit.tar_scans import Found, OneByOne, scan

from headrace.formats.limits import Limits
from headrace.formats.tar import samples as tar_samples

LIMITS = Limits(member_bytes=2**20, header_bytes=4096, name_bytes=300, extension_chain=4, fields=6)
SEED_BYTES_MOST = 16 * 1024
PIECES = (512, 1024, 2560, 5120)

NAMES = (
    b"a.jpg", b"a.cls", b"a.JPG", b"b.jpg", b"d/a.jpg", b"d/a.seg.png", b"./a.jpg", b"/a.jpg", b"../a.jpg", b"a", b".a",
    b"d.x/a", b"__a__", b"__a__.b", b"a.__key__", b"a.", b"a..b", b"d/", b"d/.b", b"", b"\xff.\xfe", b"a b.jpg",
    "ü.ï".encode(), b"n" * 96 + b".jpg", b"n" * 90 + b"/" + b"m" * 20 + b".jpg", b"k" * 300 + b".jpg",
)  # fmt: skip
KINDS = (b"0", b"\0", b"7", b"1", b"2", b"5", b"6", b"V", b"D", b"S", b"M", b"A", b"x", b"g", b"L", b"K")
SIZES = (
    b"00000000000\0", b"00000000001 ", b"0000000001\0\0", b"          1\0", b"00000001000\0", b"000000007777",
    b"77777777777\0", b"-0000000001\0", b"+0000000001\0", b"0x000000001\0", b"0_000000001\0", b"            ",
    bytes(12), b"\x80" + bytes(10) + b"\x07", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"00000000009\0", b"1\0 2       \0",
)  # fmt: skip
KEYS = (b"path", b"size", b"comment", b"GNU.sparse.name", b"GNU.sparse.map", b"hdrcharset", b"mtime")
VALUES = (
    b"a.jpg", b"c.png", b"", b"700", b"1", b"-1", b"0", b"9" * 30, b"p" * 310 + b".x", b"a\0.jpg", b"1 \n", b"\xff",
)  # fmt: skip

_NOTE = re.compile(rb"__[^/]*__(/|\Z)")

Member = tuple[bytes, int, int]
"""Name, offset and size."""


Seen = tuple[Found, tuple[str, str, object, int] | None]


def seeds() -> Iterator[bytes]:
    yield from (b"\0\0" + case.data for case in CASES if len(case.data) <= SEED_BYTES_MOST)
    sparse = pax(record(b"GNU.sparse.map", b"0,1")) + pax(record(b"path", b"a.jpg")) + member("b.jpg", b"body")
    yield b"\0\0" + sparse + END
    yield from (bytes([1, k]) + bytes(range(k, 256)) for k in range(0, 250, 5))


def check(data: bytes) -> None:
    dice = Dice(data)
    is_built, piece = dice.number(1), dice.one_of(PIECES)
    archive = built(dice) if is_built else dice.rest()
    piece *= 1 + len(archive) // 2**14
    # the fast way in archives that are small enough for thousands of them in a second
    with patch.object(tar_samples, "_FEWEST_NAMES", 4), patch.object(tar_samples, "_FEWEST_HEADERS", 2):
        found, error = scanned(archive, max(len(archive), 1))
        assert scanned(archive, piece, carry=True) == (found, error), "in pieces"
        assert scanned(archive, piece, kind=OneByOne) == (found, error), "one by one"
        assert scanned(archive, piece, hop=True) == (found, error), "without bodies"
    _compare(archive, found, error)


def scanned(data: bytes, piece: int, **how: Any) -> Seen:
    found, error = scan(data, piece, LIMITS, **how)
    if error is None:
        return found, None
    assert error.offset is not None
    assert 0 <= error.offset <= len(data)
    assert type(pickle.loads(pickle.dumps(error))) is type(error)
    return found, (type(error).__name__, str(error), error.key, error.offset)


def _compare(archive: bytes, found: Found, error: tuple[str, str, object, int] | None) -> None:
    end = 0
    for _, members in found:
        for _, offset, size in members:
            assert offset % BLOCK == 0
            assert end + BLOCK <= offset
            assert size >= 0
            end = offset + size
    assert end <= len(archive)
    members, stop = plain_members(archive)
    if error is None or "follow the end mark" in error[1]:
        assert found == grouped(members)
        has_end = archive[stop : stop + len(END)] == END
        assert has_end or (error is None and archive[stop:] == bytes(BLOCK)), "what marks the end"
    else:
        # a member that only breaks a limit ends the sample in front of it, where it would begin another
        stop = error[3] + (error[0] == "LimitError")
        before = [one for one in members if one[1] - BLOCK < stop]
        assert found == grouped(before)[:-1], "all samples before the damage, but the one that may continue"


def grouped(members: list[Member]) -> Found:
    found: Found = []
    for name, offset, size in members:
        folder, slash, base = name.rpartition(b"/")
        stem, dot, extension = base.partition(b".")
        if not stem or not dot or _NOTE.match(name):
            continue
        key, field = folder + slash + stem, extension.decode("utf-8", "surrogateescape").lower()
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append((field, offset, size))
    return found


def plain_members(data: bytes) -> tuple[list[Member], int]:
    members = list[Member]()
    at, names, sizes = 0, set[bytes](), set[int]()
    while at + BLOCK <= len(data):
        block = data[at : at + BLOCK]
        kind, said = block[156:157], _number(block[124:136])
        if not any(block) or not _is_sealed(block):
            break
        at += BLOCK
        if kind in b"xXgLK" and kind:
            if said is None or at + said > len(data):
                break
            body, at = data[at : at + said], at + said + (-said % BLOCK)
            if kind == b"L":
                names.add(body.split(b"\0")[0])
            elif kind in b"xX":
                records = _records(body)
                if records is None or any(b"sparse" in name or b"holes" in name for name in records):
                    break
                names |= {records[b"path"]} if records.get(b"path") else set()
                sizes |= {int(records[b"size"])} if records.get(b"size", b"").isdigit() else set()
            continue
        name = names.pop() if names else _name(block)
        is_label = kind == b"V" and not block[124:136].strip(b" \0")
        if kind in b"123456" or (kind == b"\0" and name.endswith(b"/")) or is_label:
            said = 0
        elif sizes:
            said = sizes.pop()
        if said is None or kind not in b"0\x007123456VD":
            break
        if kind in b"0\x007":
            members.append((name, at, said))
        at, names, sizes = at + said + (-said % BLOCK), set(), set()
    return members, at


def _is_sealed(block: bytes) -> bool:
    said = block[148:156].strip(b" \0")
    if not said or any(digit not in b"01234567" for digit in said):
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    return int(said, 8) in (sum(rest), sum(byte - 256 if byte > 127 else byte for byte in rest))


def _number(field: bytes) -> int | None:
    if field[0] & 0x80:
        number = int.from_bytes(field, "big", signed=True) if field[0] & 0x40 else int.from_bytes(field, "big") - 2**95
    else:
        digits = field.lstrip(b" ").rstrip(b" \0")
        if not digits or any(digit not in b"01234567" for digit in digits):
            return None
        number = int(digits, 8)
    return number if number >= 0 else None


def _name(block: bytes) -> bytes:
    name, prefix = block[:100].split(b"\0")[0], block[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _records(body: bytes) -> dict[bytes, bytes] | None:
    """The records of a pax header; None where one is damaged."""
    records: dict[bytes, bytes] = {}
    while body.strip(b"\0"):
        length, blank, _ = body.partition(b" ")
        if not blank or not length.isdigit() or len(length) > 20 or not len(length) + 1 < int(length) <= len(body):
            return None
        text, body = body[len(length) + 1 : int(length)], body[int(length) :]
        name, equals, value = text.partition(b"=")
        if not name or not equals or not value.endswith(b"\n"):
            return None
        records[name] = value[:-1]
    return records


def built(dice: Dice) -> bytes:
    """An archive of parts, and a few edits of it, after which some headers have right checksums again."""
    edits = dice.number(3)
    changes = Dice(dice.some(4 * edits + 1))
    parts = list[bytes]()
    while dice.more and len(parts) < 15:
        parts.append(_part(dice))
    archive = b"".join(parts) + dice.one_of((END, bytes(BLOCK), bytes(20 * BLOCK), b""))
    resealed = changes.number(1)
    archive, places = edited_at(archive, changes, edits, BLOCK)
    for at in places if resealed else ():
        start = at // BLOCK * BLOCK
        if len(block := archive[start : start + BLOCK]) == BLOCK and any(block):
            archive = archive[:start] + checksummed(block) + archive[start + BLOCK :]
    return archive


def _part(dice: Dice) -> bytes:
    what = dice.number(9)
    if what <= 1:
        first, count, fields = dice.number(255), dice.number(9), dice.one_of((b"jpg cls", b"npy", b"a b c d e f g"))
        names = (b"%03d.%s" % (k, field) for k in range(first, first + count) for field in fields.split())
        return b"".join(member(name, bytes([k % 256]) * (k * 97 % 700)) for k, name in enumerate(names))
    if what <= 4:
        name, body = dice.one_of(NAMES), bytes(dice.number(1100))
        kind, magic = dice.one_of(KINDS) if what == 4 else b"0", dice.one_of((USTAR, GNU, V7))
        return header(name[:100], len(body), kind, magic=magic, prefix=b"p/q" if what == 3 else b"") + padded(body)
    if what == 5:
        return header(dice.one_of(NAMES)[:100], dice.one_of(SIZES), dice.one_of(KINDS)) + bytes(BLOCK * dice.number(3))
    if what == 6:
        records = [record(dice.one_of(KEYS), dice.one_of(VALUES)) for _ in range(dice.number(3) + 1)]
        return pax(*records, kind=dice.one_of((b"x", b"X", b"g")))
    if what == 7:
        return long_name(dice.one_of(NAMES), dice.one_of((b"L", b"K")))
    if what == 8:
        return bytes(BLOCK * dice.number(2))
    text = dice.some(dice.number(60))
    return pax(text) if dice.number(1) else padded(text)
