"""Arrow: heads and bodies follow the layout, or an error names the file."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pyarrow as pa
from builders.arrows import of_table
from full.fuzz.dice import Dice, edited, starts
from full.fuzz.parquet import LIMITS, TABLE, URL, check_rows
from full.fuzz.samples import table_of

from headrace.formats.arrow import ARROW
from headrace.formats.format import ShardEntry

WORDS = TABLE.append_column("words", pa.array(["a", "b", None, "a", "b"]).dictionary_encode())
FILES = [
    of_table(TABLE, rows=2),
    of_table(WORDS, rows=3, compression="zstd"),
    of_table(WORDS, rows=2, stream=True),
    of_table(TABLE, rows=3, compression="lz4", stream=True),
]
seeds = partial(starts, len(FILES), 2)


def check(data: bytes) -> None:
    dice = Dice(data)
    file, which = FILES[dice.number(255) % len(FILES)], dice.number(1)
    if which == 0:
        file = edited(file, dice, 1 + dice.number(3))
    else:  # numbers where numbers are: lengths, offsets and counts
        changed = bytearray(file)
        for _ in range(1 + dice.number(3)):
            at = dice.number(0xFFFF) % (len(file) // 4) * 4
            number = dice.one_of((0, 1, -1, 7, 64, 2**31 - 1, -(2**31), len(file)))
            changed[at : at + 4] = struct.pack("<i", number)
        file = bytes(changed)
    rows = table_of(ARROW, file, ShardEntry(URL), LIMITS, max(2**16, len(file)))
    if rows is not None:
        assert (np.diff(rows.offset) >= 0).all(), "members are in order"
        check_rows(ARROW, rows, file)
