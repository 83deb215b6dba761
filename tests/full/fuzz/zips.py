"""Zip archives: what is read of them is what Python's zipfile reads, or FormatError, or ValueError."""

from __future__ import annotations

import io
import zipfile
from functools import partial

from full.fuzz.dice import Dice, edited, starts
from full.fuzz.samples import samples_of, table_of

from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.zip import ZIP

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
seeds = partial(starts, len(ARCHIVES))


def check(data: bytes) -> None:
    dice = Dice(data)
    archive = edited(ARCHIVES[dice.number(255) % len(ARCHIVES)], dice, 1 + dice.number(3))
    rows = table_of(ZIP, archive, ShardEntry(URL), LIMITS)
    for sample in samples_of(ZIP, rows, archive, LIMITS) if rows is not None else ():
        assert set(sample.values()) <= set(FILES.values()), "each body has its checksum"
