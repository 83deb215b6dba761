"""Parquet files, as pyarrow writes them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "text": pa.string(),
        "list": pa.list_(pa.float32()),
        "struct": pa.struct({"a": pa.int32(), "b": pa.list_(pa.string())}),
        "body": pa.binary(),
    }
)


def written(samples: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, **options: Any) -> bytes:
    """The bytes of a file of these samples."""
    plain = [{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in one.items()}
             for one in samples]  # fmt: skip
    return of_table(pa.Table.from_pylist(plain, schema=schema), **options)


def of_table(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()
