"""Zip archives: what is read of them is what Python's zipfile reads, or FormatError, or ValueError."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Iterator

from full.fuzz.dice import Dice, assert_named, edited, starts
from one_object import OneObject

from headrace.errors import FormatError
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.zip.format import ZIP

LIMITS = Limits(member_bytes=4000, header_bytes=2000, unpacked_free_bytes=4000, unpacked_ratio=20)
URL = "memory://fuzz/0.zip"
FILES = {"a.x": b"some bytes" * 5, "a.y": b"", "b/c.x": bytes(300), "b/d": b"no sample"}


def packed(method: int, *, wide: bool = False) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w", method) as archive:
        for name, data in FILES.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=wide) as file:
                file.write(data)
    return out.getvalue()


ARCHIVES = [packed(zipfile.ZIP_STORED), packed(zipfile.ZIP_DEFLATED), packed(zipfile.ZIP_DEFLATED, wide=True)]


def seeds() -> Iterator[bytes]:
    yield from starts(len(ARCHIVES))


def check(data: bytes) -> None:
    dice = Dice(data)
    archive, _ = edited(ARCHIVES[dice.number(255) % len(ARCHIVES)], dice, 1 + dice.number(3))
    try:
        rows = asyncio.run(ZIP.index(OneObject(archive, most_bytes=2**16), ShardEntry(URL), LIMITS)).rows
    except FormatError as error:
        assert_named(error, URL)
        return
    for k in range(len(rows)):
        part = slice(int(rows.starts[k]), int(rows.starts[k + 1]))
        names = tuple(rows.fields[number] for number in rows.field[part].tolist())
        places = zip(rows.offset[part].tolist(), rows.size[part].tolist(), strict=True)
        bodies = [archive[at : at + size] for at, size in places]
        try:
            (sample,) = ZIP.open_block(Block("u", names, LIMITS), bodies)
        except ValueError:
            continue
        assert set(sample.values()) <= set(FILES.values()), "each body has its checksum"
