"""Files and streams of Arrow, as pyarrow writes them."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def table(samples: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None) -> pa.Table:
    plain = [{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in one.items()}
             for one in samples]  # fmt: skip
    return pa.Table.from_pylist(plain, schema=schema)


def written(samples: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, **options: Any) -> bytes:
    return of_table(table(samples, schema), **options)


def of_table(table: pa.Table, *, rows: int = 7, stream: bool = False, **options: Any) -> bytes:
    """The bytes of a table in batches of so many rows.

    Args:
        options: of `pyarrow.ipc.IpcWriteOptions`.
    """
    out, new = io.BytesIO(), pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(out, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()
