"""Parquet files in memory, and their rows by way of the format alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import pyarrow as pa
from end_to_end.parquet import of_table
from one_object import OneObject

from headrace.fetch.stores import memory
from headrace.formats.format import Block, ShardEntry
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.parquet.format import Parquet
from headrace.testing import FaultServer

URL = "memory://parquet/0.parquet"
_numbers = itertools.count()


def put(data: bytes | pa.Table, name: str = "0.parquet", **options: Any) -> str:
    """Store a file, or a table as a file; return its address, which is new."""
    url = f"memory://parquet/{next(_numbers)}/{name}"
    memory.put(url, of_table(data, **options) if isinstance(data, pa.Table) else data)
    return url


def indexed(form: Parquet, data: bytes, limits: Limits = DEFAULTS) -> Any:
    return anyio.run(form.index, OneObject(data), ShardEntry(URL), limits)


def rows_of(form: Parquet, data: bytes, rows: Any = None) -> list[Any]:
    """The rows that the format keeps."""
    rows, blocks = indexed(form, data).rows if rows is None else rows, []
    for block, about in enumerate(rows.about):
        members = range(int(rows.starts[block]), int(rows.starts[block + 1]))
        bodies = [data[int(rows.offset[k]) : int(rows.offset[k] + rows.size[k])] for k in members]
        names = tuple(rows.fields[int(rows.field[k])] for k in members)
        blocks.append(form.open_block(Block("u", names, DEFAULTS, about), bodies))
    every = (blocks[block][row] for block, row in zip(rows.block.tolist(), rows.row.tolist(), strict=True))
    return [one for one in every if one is not None]


def ranges(server: FaultServer) -> Sequence[tuple[int, int]]:
    """The (start, stop) that requests asked for. Requests for the end of an object do not count."""
    asked = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.log]
    return [(int(start), int(stop) + 1) for start, stop in asked if start]
