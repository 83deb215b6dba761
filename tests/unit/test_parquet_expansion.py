"""Parquet: text that is written as what it repeats is bounded by what it takes, and read where that is allowed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from end_to_end.parquet import of_table
from one_object import OneObject
from unit.parquet_reads import put

import headrace as hr
from headrace.errors import LimitError
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.parquet.format import PARQUET
from headrace.formats.parquet.page_headers import delta_numbers

TEXTS = [f"https://example.org/{k // 7}/{k * k}" for k in range(600)]
COLUMNS = {
    "flat": pa.array(TEXTS),
    "gaps": pa.array([None if k % 5 == 0 else text for k, text in enumerate(TEXTS)]),
    "lists": pa.array([[text, None] if k % 3 else None for k, text in enumerate(TEXTS)]),
    "structs": pa.array([{"a": [text]} for text in TEXTS]),
    "bytes": pa.array([text.encode() for text in TEXTS]),
}
LEAF = {"lists": "lists.list.element", "structs": "structs.a.list.element"}


def beginnings(table: pa.Table, **options: Any) -> str:
    encodings = {LEAF.get(name, name): "DELTA_BYTE_ARRAY" for name in table.column_names}
    return put(table, use_dictionary=False, column_encoding=encodings, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "version"),
    [("none", "1.0"), ("none", "2.0"), ("snappy", "2.0"), ("gzip", "1.0"), ("brotli", "2.0"), ("zstd", "1.0")],
)
def test_what_values_begin_with_is_counted(codec: str, version: str) -> None:
    table = pa.table(COLUMNS)
    low = Limits(
        unpacked_free_bytes=500_000, unpacked_ratio=1
    )  # what pages and values could make is more, what they do is less
    url = beginnings(table, compression=codec, data_page_version=version)
    got = list(hr.stream(url, limits=low))
    assert [{name: one[name] for name in COLUMNS} for one in got] == table.to_pylist()


def test_few_bytes_that_stand_for_very_many_are_a_limit_error() -> None:
    table = pa.table({"text": ["x" * 100_000 + f"{k:04}" for k in range(1500)]})
    url = beginnings(table, data_page_size=2**30, compression="none")
    with pytest.raises(LimitError, match=r"column 'text': its values take .* bytes or more once they are decoded"):
        list(hr.stream(url))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_long_values_that_are_repeated_are_held_once_where_others_are_not(codec: str) -> None:
    """A dictionary for the first pages, and plain ones after these."""
    texts = ["x" * 60_000] * 1200 + [f"another text {k}" for k in range(1500)]
    table = pa.table({"text": texts})
    body = of_table(table, dictionary_pagesize_limit=62_000, compression=codec, data_page_size=4096)
    rows = asyncio.run(
        PARQUET.index(OneObject(body, most_bytes=max(16, len(body))), ShardEntry("memory://expansion"), DEFAULTS)
    ).rows
    place = slice(int(rows.offset[0]), int(rows.offset[0] + rows.size[0]))
    samples: Any = PARQUET.open_block(Block("u", ("text",), DEFAULTS, (rows.about or ())[0]), [body[place]])
    assert samples.nbytes < 10_000_000, "72 MB, were each held by itself"
    for row in (0, 1199, 1200, 2699):
        assert samples[row]["text"] == texts[row]


def test_differences_of_any_width_are_read() -> None:
    import pyarrow.parquet as pq

    dice = np.random.default_rng(0)
    for bits in (1, 7, 20, 62):
        numbers = dice.integers(0, 2**bits, 1000)
        table = pa.table({"n": numbers})
        body = of_table(
            table, use_dictionary=False, column_encoding={"n": "DELTA_BINARY_PACKED"}, compression="none",
            store_schema=False, data_page_version="2.0", write_statistics=False,
        )  # fmt: skip
        chunk = pq.ParquetFile(pa.BufferReader(body)).metadata.row_group(0).column(0)
        page = body[chunk.data_page_offset :][: chunk.total_compressed_size]
        found = next(
            got
            for at in range(len(page) - 900 * bits // 8)
            if (got := _tried(page[at:])) is not None and (got == numbers).all()
        )
        assert len(found) == 1000


def _tried(data: bytes) -> Any:
    try:
        found = delta_numbers(memoryview(data), 1000)
    except ValueError:
        return None
    return found if len(found) == 1000 else None
