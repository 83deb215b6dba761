"""Megatron's `.idx` follows the layout, or raises FormatError; documents are those of a slow reader."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

import numpy as np
from builders.token_files import ids, megatron
from full.fuzz.dice import Dice, edited
from one_object import OneObject

from headrace.errors import FormatError
from headrace.formats.limits import Limits
from headrace.sources.tokens import TokenFiles, TokenSettings

LIMITS = Limits(member_bytes=4000)
BIN, IDX = "memory://fuzz/x.bin", "memory://fuzz/x.idx"
SIZES = ([[3]], [[2, 1], [4], [0], [1, 0, 5]], [[9]] * 20, [[1] * 7], [])
TYPES = ("uint16", "int32", "uint8", "int64")
FILES = [
    megatron([[ids(n, dtype) for n in one] for one in sizes], dtype, modes=modes)
    for sizes in SIZES
    for dtype in TYPES[:2]
    for modes in (False, True)
]


def seeds() -> Iterator[bytes]:
    for k in range(len(FILES)):
        for how in range(3):
            for more in (b"", b"\0\1\2\3\4\5\6\7\x08", b"\1\0\x80\xff\4\1\xf0\x20\2", b"\2\5\1\6\4"):
                yield bytes([k, how]) + more


def check(data: bytes) -> None:
    dice = Dice(data)
    body, index = FILES[dice.number(255) % len(FILES)]
    documents = ("ids", "samples", None)[dice.number(255) % 3]
    way = dice.number(2)
    if way == 0:
        index = edited(index, dice, 1 + dice.number(3))
    elif way == 1:
        index = _with_other_numbers(index, dice)
    else:
        body = body[: dice.number(255)] + bytes(dice.number(9))
    settings = TokenSettings(window=None if documents == "samples" else 2, has_short=True, documents=documents)  # type: ignore[arg-type]
    files, wanted = TokenFiles(settings, LIMITS), _slowly(body, index)
    try:
        opened = asyncio.run(files.open(OneObject({BIN: body, IDX: index}, most_bytes=2**16), [BIN], lambda *_: None))
    except FormatError as error:
        _assert_right(error, is_right=documents is not None and wanted is not None and bool(body))
        return
    (table,) = files.tables
    if documents is None:
        return
    assert wanted is not None, "a wrong index is believed"
    assert table.documents is not None
    if documents == "samples":
        assert table.documents.tolist() == wanted
        assert opened.counts.tolist() == [len(wanted) - 1]
    else:
        assert table.documents.tolist() == sorted(set(wanted[:-1]))


def _assert_right(error: FormatError, *, is_right: bool) -> None:
    assert "memory://fuzz/x." in str(error)
    assert not is_right, "a right index is refused"


def _with_other_numbers(index: bytes, dice: Dice) -> bytes:
    """Some of its numbers being others: counts, lengths and places of any size."""
    for _ in range(1 + dice.number(2)):
        size = dice.one_of((4, 8))
        at = dice.one_of((18, 26, 34 + 4 * dice.number(40), 34 + dice.number(400)))
        number = dice.one_of((0, 1, 2**16, 2**31 - 1, -1, len(index), len(index) + 1, dice.number(600)))
        if at + size <= len(index):
            index = index[:at] + number.to_bytes(size, "little", signed=True) + index[at + size :]
    return index


def _slowly(body: bytes, index: bytes) -> list[int] | None:
    try:
        magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
        rest = len(index) - 34 - 12 * sequences - 8 * entries
        size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}[code]
        if magic != b"MMIDIDX\0\0" or version != 1 or rest not in (0, sequences) or entries < 2:
            return None
        lengths = struct.unpack_from(f"<{sequences}i", index, 34)
        places = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
        firsts = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    except (struct.error, KeyError):
        return None
    ends = np.cumsum([0, *(length * size for length in lengths)]).tolist()
    if min(lengths, default=0) < 0 or list(places) != ends[:-1] or ends[-1] != len(body):
        return None
    if firsts[0] != 0 or firsts[-1] != sequences or list(firsts) != sorted(firsts):
        return None
    return [ends[first] // size for first in firsts]
