"""LitData: catalogues, tables and items follow the layout, or raise FormatError or ValueError."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from end_to_end import litdata
from full.fuzz.dice import Dice, assert_named, edited, starts
from one_object import OneObject

from headrace.errors import FormatError, OptionError
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.litdata.format import LITDATA
from headrace.formats.litdata.leaves import nested_value

LIMITS = Limits(member_bytes=4000, header_bytes=2000, unpacked_free_bytes=10_000, unpacked_ratio=20, window_bytes=2**20)
URL = "memory://fuzz/index.json"


def sample(n: int) -> dict[str, Any]:
    return {
        "a": np.arange(n, dtype=np.int16),
        "i": n,
        "l": [n % 2 == 0, (n / 2, None)],
        "m": torch.ones(2, n),
        "s": "ü" * n,
        "t": torch.arange(n),
    }


SAMPLES = [sample(n) for n in range(9)]
FOLDERS = [litdata.folder([SAMPLES], level) for level in (None, "chunk", "batch", "sample")]
NESTED = len(FOLDERS)


def seeds() -> Iterator[bytes]:
    yield from starts(len(FOLDERS), 3)
    for data in (
        b"\1\2\0\0\0\1\0\0\0a\0\0\0\0",
        b"\5\1\0\0\0\1\0\0\0k\x0b",
        b"\6\1\0\0\0\1\0\0\0\1\0\0\0a\x13" + bytes(8),
    ):
        yield bytes([NESTED]) + data


def check(data: bytes) -> None:
    dice = Dice(data)
    chosen = dice.number(255) % (NESTED + 1)
    if chosen == NESTED:
        _check_nested(dice.rest())
        return
    which = dice.number(255) % 3
    (_, shard), (_, said) = FOLDERS[chosen].items()
    if which == 0:
        shard, _ = edited(shard, dice, 1 + dice.number(3))
    elif which == 1:
        said, _ = edited(said, dice, 1 + dice.number(3))
    else:
        at = 4 * dice.number(30)
        number = dice.one_of((0, 1, 2**16, 2**31, 2**32 - 1, len(shard), dice.number(600)))
        shard = shard[:at] + struct.pack("<I", number) + shard[at + 4 :]
    try:
        entries = LITDATA.listed(URL, said, LIMITS)
    except (FormatError, OptionError) as error:
        assert_named(error, URL)
        return
    for entry in entries:
        _check_chunk(entry, shard)


def _check_chunk(entry: ShardEntry, shard: bytes) -> None:
    assert entry.url.startswith("memory://fuzz/")
    try:
        rows = asyncio.run(LITDATA.index(OneObject(shard, most_bytes=2**16), entry, LIMITS)).rows
    except FormatError as error:
        assert_named(error, entry.url)
        return
    assert len(rows) == entry.samples
    blocks = range(len(rows)) if rows.block is None else range(len(rows.starts) - 1)
    for k in blocks:
        part = slice(int(rows.offset[k]), int(rows.offset[k] + rows.size[k]))
        try:
            samples = LITDATA.open_block(Block("u", (rows.fields[int(rows.field[k])],), LIMITS), [shard[part]])
        except (ValueError, FormatError):
            continue
        if rows.block is not None:
            assert len(samples) == int((rows.block == k).sum())
        for row in range(len(samples)):
            try:
                one = samples[row]
            except ValueError:
                continue
            assert all(isinstance(name, str) for name in one)


def _check_nested(data: bytes) -> None:
    try:
        value = nested_value(data)
    except ValueError:
        return
    assert value is None or isinstance(value, bool | int | float | str | list | dict)
