"""Parquet files, as pyarrow writes them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from builders import arrows, tfrecords

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
    return of_table(arrows.table(samples, schema), **options)


def of_table(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def pages_table(count: int) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "n": range(count),
            "text": [rng.bytes(100).hex() for _ in range(count)],
            "list": [list(range(k % 7)) for k in range(count)],
            "structs": [[{"a": f"{k}", "b": rng.bytes(30).hex()}] * (k % 3) for k in range(count)],
        }
    )


def varint(number: int) -> bytes:
    return tfrecords.varint(number << 1 ^ number >> 63)
