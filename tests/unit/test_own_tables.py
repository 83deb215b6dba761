"""A format's own table of a shard is checked: members out of order would be cut elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace._util.sample_ranges import Rows
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS
from headrace.indexes.index import OwnTables


class Own(Format):
    name = "own"
    suffixes = (".own",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    async def index(self, *about: Any) -> ShardIndex:
        return ShardIndex(self.rows, None, 100, None)


def table(offset: list[int], size: list[int], starts: list[int], count: int, block: list[int] | None = None) -> Rows:
    shared = (None, None) if block is None else (np.array(block), np.arange(len(block)))
    keys, field = np.arange(count).astype("S3"), np.zeros(len(offset), np.int32)
    return Rows(keys, np.array(starts), field, np.array(offset, np.int64), np.array(size, np.int64), ("x",), *shared)


def opened(rows: Rows) -> int:
    tables = OwnTables(Own(rows), [ShardEntry("memory://own/0.own")], DEFAULTS)
    index = asyncio.run(tables.open(None, [], lambda ordinal, shard: None))  # type: ignore[arg-type]
    return int(index.counts.sum())


@pytest.mark.parametrize("rows", [
    table([0, 10], [10, 90], [0, 1, 2], 2),
    table([0, 10], [10, 0], [0, 2], 1),
    table([0, 4], [5, 5], [0, 1, 2], 2),
    table([5], [5], [0, 1], 3, [0, 0, 0]),
    table([], [], [0], 0),
])  # fmt: skip
def test_valid_table_is_accepted(rows: Rows) -> None:
    assert opened(rows) == len(rows)


@pytest.mark.parametrize("rows", [
    table([10, 0], [5, 5], [0, 1, 2], 2),
    table([0, 4], [9, 4], [0, 1, 2], 2),
    table([-1], [5], [0, 1], 1),
    table([0], [-1], [0, 1], 1),
    table([0], [101], [0, 1], 1),
    table([0], [5], [0, 2], 1),
    table([0], [5], [1, 1], 1),
    table([0, 5], [5, 5], [0, 2, 0, 2], 3),
    table([0], [5], [0, 1], 2),
    table([0], [5], [0, 1], 2, [0, 1]),
    table([0], [5], [0, 1], 2, [0, -1]),
    table([0], [5], [0, 1], 3, [0, 0]),
])  # fmt: skip
def test_impossible_table_is_refused_by_name(rows: Rows) -> None:
    with pytest.raises(hr.errors.FormatError, match=r"'own' .* memory://own/0.own as no shard can be"):
        opened(rows)
