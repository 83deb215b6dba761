"""LitData: catalogues, tables and items follow the layout, or raise FormatError or ValueError."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from builders import litdata
from full.fuzz.dice import Dice, assert_named, changed_folder, starts
from full.fuzz.samples import samples_of, table_of

from headrace.errors import FormatError, OptionError
from headrace.formats.limits import Limits
from headrace.formats.litdata.format import LITDATA, nested_value

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
    shard, catalogue = changed_folder(FOLDERS[chosen], dice, dice.number(255) % 3, 30)
    try:
        entries = LITDATA.catalogued(URL, catalogue, LIMITS, dict[str, bytes]().get).entries
    except (FormatError, OptionError) as error:
        assert_named(error, URL)
        return
    for entry in entries:
        assert entry.url.startswith("memory://fuzz/")
        rows = table_of(LITDATA, shard, entry, LIMITS)
        if rows is not None:
            assert len(rows) == entry.samples
            samples = samples_of(LITDATA, rows, shard, LIMITS, (ValueError, FormatError))
            assert all(isinstance(name, str) for one in samples for name in one)


def _check_nested(data: bytes) -> None:
    try:
        value = nested_value(data)
    except ValueError:
        return
    assert value is None or isinstance(value, bool | int | float | str | list | dict)
