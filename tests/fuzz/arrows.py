"""Arrow: heads and bodies from elsewhere are what the layout says, or an error that names the file."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from end_to_end.arrows import of_table

from fuzz.dice import Dice, edited
from fuzz.parquet import TABLE, URL, One
from headrace.errors import FormatError
from headrace.formats.arrow.format import ARROW
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=20_000, fields=40, unpacked_free_bytes=200_000, unpacked_ratio=20)
WORDS = TABLE.append_column("words", pa.array(["a", "b", None, "a", "b"]).dictionary_encode())
FILES = [
    of_table(TABLE, rows=2),
    of_table(WORDS, rows=3, compression="zstd"),
    of_table(WORDS, rows=2, stream=True),
    of_table(TABLE, rows=3, compression="lz4", stream=True),
]


def seeds() -> Iterator[bytes]:
    for k in range(len(FILES)):
        for which in range(2):
            for more in (b"", b"\1\2\3\4\5\6\7\x08", b"\0\x80\xff\4\1\xf0\x20\2"):
                yield bytes([k, which]) + more


def check(data: bytes) -> None:
    dice = Dice(data)
    file, which = FILES[dice.number(255) % len(FILES)], dice.number(1)
    if which == 0:
        file, _ = edited(file, dice, 1 + dice.number(3))
    else:  # numbers where numbers are: lengths, offsets and counts
        changed = bytearray(file)
        for _ in range(1 + dice.number(3)):
            at = dice.number(0xFFFF) % (len(file) // 4) * 4
            number = dice.one_of((0, 1, -1, 7, 64, 2**31 - 1, -(2**31), len(file)))
            changed[at : at + 4] = struct.pack("<i", number)
        file = bytes(changed)
    try:
        rows = asyncio.run(ARROW.index(One(file, 2**16), ShardEntry(URL), LIMITS)).rows  # type: ignore[arg-type]
    except FormatError as error:
        if URL not in str(error):
            raise
        return
    assert rows.about is not None
    assert int((rows.offset + rows.size).max(initial=0)) <= len(file)
    assert (np.diff(rows.offset) >= 0).all(), "members lie one behind the other"
    for block, about in enumerate(rows.about):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        bodies = [file[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        try:
            samples = ARROW.open_block(Block("u", names, LIMITS, about), bodies)
            assert len(samples) == int((rows.block == block).sum())
        except (ValueError, FormatError, MemoryError):
            continue
        for row in range(len(samples)):
            try:
                assert isinstance(samples[row], dict)
            except ValueError:
                continue
