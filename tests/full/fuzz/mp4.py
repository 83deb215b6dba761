"""Tables of MP4 files name frames within the file, each with bytes, or raise FormatError."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
from builders import videos
from full.fuzz.dice import Dice, assert_named, edited, starts

from headrace.errors import FormatError
from headrace.formats.limits import Limits
from headrace.formats.mp4.format import MP4, read_tables, table_of, unpack_tables
from headrace.formats.mp4.frames import file_of, pieces_of
from headrace.formats.pinned_object import PinnedObject

LIMITS = Limits(pixels=64 * 48 * 4, member_bytes=2**20)
URL = "memory://fuzz/0.mp4"
PLAIN = ("h264-leading", "audio", "mpeg4")
FRAGMENTED = ("fragments-behind", "fragments-implicit", "fragments-dash")
FILES = [videos.named(name) for name in (*PLAIN, *FRAGMENTED)]
TABLES = (
    *(b"stts", b"ctts", b"stsc", b"stsz", b"stco", b"stss", b"elst", b"mdhd", b"mvhd", b"stsd", b"dref", b"hdlr"),
    *(b"trex", b"tfhd", b"tfdt", b"trun", b"tkhd", b"moof", b"sidx", b"mfhd"),
)
NUMBERS = (0, 1, 2, 50, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
seeds = partial(starts, len(FILES), 3)


class One(PinnedObject):
    """One object; a read may not ask for more memory than it has bytes."""

    def __init__(self, data: bytes) -> None:
        self.url, self.etag, self.data, self.size = URL, None, data, -1

    async def read(self, start: int, length: int) -> memoryview:
        self.size = len(self.data)
        assert start >= 0 <= length
        return memoryview(self.data)[start : start + length]


def tables_of(file: bytes) -> Any:
    return table_of(asyncio.run(read_tables(One(file), LIMITS)), URL, len(file), LIMITS)


def check(data: bytes) -> None:
    dice = Dice(data)
    file, which = FILES[dice.number(255) % len(FILES)], dice.number(255) % 3
    begin = file.index(b"moov") - 4
    if which == 0:  # anything in the boxes
        file = file[:begin] + edited(file[begin:], dice, 1 + dice.number(3))
    elif which == 1:  # a number of a table
        for _ in range(1 + dice.number(2)):
            some = dice.one_of([kind for kind in TABLES if file.find(kind, begin) >= 0])
            found = file.find(some, begin + dice.number(255) * (len(file) - begin) // 256)
            at = (found if found >= 0 else file.find(some, begin)) + 4 + 4 * dice.number(8)
            file = file[:at] + int(dice.one_of(NUMBERS)).to_bytes(4, "big") + file[at + 4 :]
    else:
        file = file[: dice.number(len(file))]
    try:
        table = tables_of(file)
    except FormatError as error:
        assert_named(error, URL)
        return
    assert 0 < len(table) <= len(table.offset)
    assert (table.size > 0).all()
    assert (table.offset >= 0).all()
    assert (table.offset + table.size <= len(file)).all()
    assert (np.diff(table.shown_ticks) > 0).all()
    entry, block = asyncio.run(MP4.own_index(One(file), LIMITS))
    assert entry.samples == len(table_of(unpack_tables(block, URL), URL, len(file), LIMITS))
    chosen = np.array([dice.number(len(table) - 1) for _ in range(3)])
    try:
        pieces, spans = pieces_of(table, chosen)
    except ValueError as error:
        assert_named(error, "frames")
        return
    bodies = [file[begin:end] for begin, end in spans]
    assert sorted(np.concatenate([piece.places for piece in pieces]).tolist()) == [0, 1, 2]
    for piece in pieces:
        small = file_of(piece, bodies)
        again = tables_of(small)
        same = [small[at : at + size] for at, size in zip(again.offset, again.size, strict=True)]
        places = [bodies[span][at : at + size] for span, at, size in zip(piece.span, piece.at, piece.size, strict=True)]
        assert same == places
        assert again.pts[again.shown][piece.wanted].tolist() == piece.ticks.tolist()
