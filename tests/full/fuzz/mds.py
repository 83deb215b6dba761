"""MDS: catalogues, tables and samples follow the layout, or raise FormatError or ValueError."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from end_to_end import mds
from full.fuzz.dice import Dice, assert_named, edited, starts
from one_object import OneObject

from headrace.errors import FormatError
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.mds.format import MDS

LIMITS = Limits(
    member_bytes=4000, header_bytes=2000, pixels=400, unpacked_free_bytes=10_000, unpacked_ratio=20, window_bytes=2**20
)
URL = "memory://fuzz/index.json"
COLUMNS = {
    "a": "ndarray",
    "b": "bytes",
    "d": "ndarray:int16",
    "f": "float32",
    "i": "int",
    "j": "json",
    "l": "list[png]",
    "p": "pil",
    "s": "str",
    "t": "str_decimal",
    "v": "ndarray:uint8:2,2",
    "x": "jpeg_array",
}


def sample(n: int) -> dict[str, Any]:
    return {
        "a": np.arange(n + 1),
        "b": bytes(n),
        "d": np.arange(n + 1, dtype=np.int16),
        "f": n,
        "i": -n,
        "j": [n],
        "l": [b"\x89PNG", b""],
        "p": mds.pictures()[0],
        "s": "ü" * n,
        "t": n,
        "v": np.eye(2, dtype=np.uint8),
        "x": [b"\xff\xd8"] * n,
    }


SMALL = {"i": "int", "s": "str"}


def folders() -> list[dict[str, bytes]]:
    small = [{"i": n, "s": "x" * n} for n in range(9)]
    made = [mds.folder(SMALL, [small], how) for how in (None, "zstd", "gz", "bz2")]
    return [*made, mds.folder(COLUMNS, [[sample(n) for n in range(3)]])]


FOLDERS = folders()


def seeds() -> Iterator[bytes]:
    yield from starts(len(FOLDERS), 3)


def check(data: bytes) -> None:
    dice = Dice(data)
    files, which = FOLDERS[dice.number(255) % len(FOLDERS)], dice.number(255) % 3
    (name, shard), (_, said) = files.items()
    if which == 0:
        shard, _ = edited(shard, dice, 1 + dice.number(3))
    elif which == 1:
        said, _ = edited(said, dice, 1 + dice.number(3))
    else:
        shard = _with_other_numbers(shard, dice)
    entries = [ShardEntry(URL)] if which == 2 and not name.endswith(("zstd", "gz", "bz2")) else []
    try:
        entries = entries or list(MDS.listed(URL, said, LIMITS))
    except FormatError as error:
        assert_named(error, URL)
        return
    for entry in entries:
        assert entry.url.startswith("memory://fuzz/")
        try:
            index = asyncio.run(MDS.index(OneObject(shard, most_bytes=2**16), entry, LIMITS))
        except FormatError as error:
            assert_named(error, entry.url)
            continue
        _open(index.rows, shard)


def _with_other_numbers(shard: bytes, dice: Dice) -> bytes:
    """Some of the first numbers being others: counts and offsets of any size."""
    for _ in range(1 + dice.number(2)):
        at = 4 * dice.number(11)
        number = dice.one_of((0, 1, 2**16, 2**31, 2**32 - 1, len(shard), len(shard) + 1, dice.number(600)))
        shard = shard[:at] + struct.pack("<I", number) + shard[at + 4 :]
    return shard


def _open(rows: Any, shard: bytes) -> None:
    assert int((rows.offset + rows.size).max(initial=0)) <= max(len(shard), 2**53)
    for k in range(len(rows) if rows.block is None else min(len(rows), 1)):
        part = slice(int(rows.offset[k]), int(rows.offset[k] + rows.size[k]))
        try:
            samples = MDS.open_block(Block("u", rows.fields, LIMITS), [shard[part]])
            opened = [samples[row] for row in range(len(samples))]
        except (ValueError, FormatError):
            continue
        assert all(isinstance(one, dict) for one in opened)
        assert json.dumps([list(one) for one in opened])
