"""MDS: catalogues, tables and samples follow the layout, or raise FormatError or ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from builders import mds
from full.fuzz.dice import Dice, assert_named, changed_folder, starts
from full.fuzz.samples import samples_of, table_of

from headrace.errors import FormatError
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.mds import MDS

LIMITS = Limits(
    member_bytes=4000, header_bytes=2000, pixels=400, unpacked_free_bytes=10_000, unpacked_ratio=20, window_bytes=2**20
)
URL = "memory://fuzz/index.json"
COLUMNS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "a": ("ndarray", lambda n: np.arange(n + 1)),
    "b": ("bytes", bytes),
    "d": ("ndarray:int16", lambda n: np.arange(n + 1, dtype=np.int16)),
    "f": ("float32", int),
    "i": ("int", lambda n: -n),
    "j": ("json", lambda n: [n]),
    "l": ("list[png]", lambda _: [b"\x89PNG", b""]),
    "p": ("pil", lambda _: mds.pictures()[0]),
    "s": ("str", lambda n: "ü" * n),
    "t": ("str_decimal", int),
    "v": ("ndarray:uint8:2,2", lambda _: np.eye(2, dtype=np.uint8)),
    "x": ("jpeg_array", lambda n: [b"\xff\xd8"] * n),
}


def folders() -> list[dict[str, bytes]]:
    small = [{"i": n, "s": "x" * n} for n in range(9)]
    large = [{name: make(n) for name, (_, make) in COLUMNS.items()} for n in range(3)]
    made = [mds.folder({"i": "int", "s": "str"}, [small], how) for how in (None, "zstd", "gz", "bz2")]
    return [*made, mds.folder({name: kind for name, (kind, _) in COLUMNS.items()}, [large])]


FOLDERS = folders()
seeds = partial(starts, len(FOLDERS), 3)


def check(data: bytes) -> None:
    dice = Dice(data)
    files, which = FOLDERS[dice.number(255) % len(FOLDERS)], dice.number(255) % 3
    shard, catalogue = changed_folder(files, dice, which, 11)
    entries = [ShardEntry(URL)] if which == 2 and not next(iter(files)).endswith(("zstd", "gz", "bz2")) else []
    try:
        entries = entries or list(MDS.catalogued(URL, catalogue, LIMITS, dict[str, bytes]().get).entries)
    except FormatError as error:
        assert_named(error, URL)
        return
    for entry in entries:
        assert entry.url.startswith("memory://fuzz/")
        rows = table_of(MDS, shard, entry, LIMITS)
        if rows is not None:
            assert int((rows.offset + rows.size).max(initial=0)) <= max(len(shard), 2**53)
            samples = samples_of(MDS, rows, shard, LIMITS, (ValueError, FormatError))
            assert all(isinstance(one, dict) and json.dumps(list(one)) for one in samples)
