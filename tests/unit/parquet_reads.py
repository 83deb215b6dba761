"""Parquet files in memory, and their rows by way of the format alone."""

from __future__ import annotations

from typing import Any

import anyio
import pyarrow as pa
from builders import stored
from builders.parquet import of_table
from one_object import OneObject

from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.parquet.format import Parquet

URL = "memory://parquet/0.parquet"


def put(data: bytes | pa.Table, name: str = "0.parquet", **options: Any) -> str:
    """Store a file, or a table as a file, at a new address. Return the address."""
    return stored.put(of_table(data, **options) if isinstance(data, pa.Table) else data, name)


def indexed(form: Parquet, data: bytes, limits: Limits = DEFAULTS) -> Any:
    return anyio.run(form.index, OneObject(data), ShardEntry(URL), limits)


def blocks_of(form: Parquet, data: bytes, rows: Any) -> list[Any]:
    """The samples of each block of rows."""
    blocks = []
    for block, about in enumerate(rows.about):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        bodies = [data[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        blocks.append(form.open_block(Block("u", names, DEFAULTS, about), bodies))
    return blocks


def rows_of(form: Parquet, data: bytes, rows: Any = None) -> list[Any]:
    """The rows that the format keeps."""
    rows = indexed(form, data).rows if rows is None else rows
    blocks = blocks_of(form, data, rows)
    every = (blocks[block][row] for block, row in zip(rows.block.tolist(), rows.row.tolist(), strict=True))
    return [one for one in every if one is not None]
