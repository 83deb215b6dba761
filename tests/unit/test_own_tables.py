"""What a format says of a shard is read as it lies, or refused: members out of their order would be cut elsewhere."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from end_to_end.parquet import of_table

import headrace as hr
from headrace._util.reads import Span
from headrace._util.sample_ranges import Rows
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS
from headrace.formats.parquet.format import PARQUET
from headrace.indexes.embedded import OwnTables


class Said(Format):
    name = "said"
    suffixes = (".said",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    async def index(self, *about: Any) -> ShardIndex:
        return ShardIndex(self.rows, None, 100, None)


def table(offset: list[int], size: list[int], starts: list[int], count: int, block: list[int] | None = None) -> Rows:
    shared = (None, None) if block is None else (np.array(block), np.arange(len(block)))
    keys, field = np.arange(count).astype("S3"), np.zeros(len(offset), np.int32)
    return Rows(keys, np.array(starts), field, np.array(offset, np.int64), np.array(size, np.int64), ("x",), *shared)


def opened(rows: Rows) -> int:
    tables = OwnTables(Said(rows), [ShardEntry("memory://said/0.said")], DEFAULTS)
    index = asyncio.run(tables.open(None, [], lambda ordinal, shard: None))  # type: ignore[arg-type]
    return int(index.counts.sum())


@pytest.mark.parametrize(
    "rows",
    [
        table([0, 10], [10, 90], [0, 1, 2], 2),
        table([0, 10], [10, 0], [0, 2], 1),
        table([0, 4], [5, 5], [0, 1, 2], 2),
        table([5], [5], [0, 1], 3, [0, 0, 0]),
        table([], [], [0], 0),
    ],
)
def test_table_that_can_be_is_taken(rows: Rows) -> None:
    assert opened(rows) == len(rows)


@pytest.mark.parametrize(
    "rows",
    [
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
    ],
)
def test_table_that_no_shard_has_is_refused_by_name(rows: Rows) -> None:
    with pytest.raises(hr.FormatError, match=r"'said' tells of memory://said/0.said what no shard can be"):
        opened(rows)


class Far:
    """Reads of one object at an address that is far, and how many there were."""

    def __init__(self, data: bytes, etag: str | None) -> None:
        self.data, self.etag, self.count = data, etag, 0

    async def read_into(self, url: str, start: int, target: memoryview, *, etag: str | None, **more: Any) -> Span:
        assert etag in (None, self.etag), "it is another object"
        self.count += 1
        start = max(0, len(self.data) + start) if start < 0 else start
        part = self.data[start : start + len(target)]
        target[: len(part)] = part
        return Span(start, start + len(part), len(self.data), self.etag)


def count_of(reads: Far, options: dict[str, object] | None = None) -> tuple[int, int]:
    reads.count = 0
    tables = OwnTables(PARQUET, [ShardEntry("s3://far/0.parquet")], DEFAULTS, options)
    index = asyncio.run(tables.open(reads, [], lambda ordinal, shard: None))  # type: ignore[arg-type]
    return int(index.counts.sum()), reads.count


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace" / "indexes"


def kept_in(cache: Path) -> Path:
    (found,) = (path for path in cache.glob("*.table") if path.name != "removed.table")
    return found


def test_footer_is_read_once_by_all_processes_of_a_machine(cache: Path) -> None:
    first, second = (of_table(pa.table({"n": range(count)})) for count in (5, 7))
    assert count_of(Far(first, '"a"')) == (5, 1)
    assert count_of(Far(first, '"a"')) == (5, 0)
    assert count_of(Far(second, '"b"'), {"endpoint": "https://other"}) == (7, 1), "it lies elsewhere"
    assert not [*cache.glob("*.part")]


def test_footer_is_read_again_when_what_is_kept_is_old_or_damaged(cache: Path) -> None:
    first, second = (of_table(pa.table({"n": range(count)})) for count in (5, 7))
    assert count_of(Far(first, '"a"')) == (5, 1)
    kept = kept_in(cache)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-40] + b"x" + whole[-39:])
    assert count_of(Far(first, '"a"')) == (5, 1)
    assert kept.read_bytes() == whole
    os.utime(kept, (time.time() - 700,) * 2)
    assert count_of(Far(second, '"b"')) == (7, 1)
    assert count_of(Far(second, '"b"')) == (7, 0)


def test_footer_of_an_object_without_a_version_is_not_kept(cache: Path) -> None:
    for etag in (None, 'W/"a"'):
        assert count_of(Far(of_table(pa.table({"n": range(3)})), etag)) == (3, 1)
        assert not [*cache.glob("*.table")]
