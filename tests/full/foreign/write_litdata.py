"""Has LitData write folders into the one that is named, and beside each what it reads of it."""

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from litdata import StreamingDataset, index_parquet_dataset
from litdata.streaming.item_loader import ParquetLoader
from litdata.streaming.writer import BinaryWriter

COUNT = 20
MIXED = [{"i": n, "f": n / 2, "s": "ü" * n, "b": bytes(n), "t": n % 2 == 0, "a": np.ones((2, n))} for n in range(COUNT)]
TENSORS = [
    {
        "x": torch.ones(1, n, dtype=torch.int32),
        "v": torch.arange(n + 1),
        "h": torch.ones(2, 2).half(),
        "r": np.arange(n + 1.0),
    }
    for n in range(COUNT)
]
ROWS = [{"i": n, "s": None if n == 3 else "x", "l": ["a"] * n, "d": {"x": n, "y": [1.5] * n}} for n in range(COUNT)]
LEAVES = [{"t": torch.arange(4), "l": ["a"] * n, "r": [{"k": "ü", "n": n}] * n, "f": [0.5] * n} for n in range(COUNT)]
SETS = {
    "numbers": (list(range(COUNT)), {}),
    "tuples": ([(n, "x" * n, [n, n]) for n in range(COUNT)], {}),
    "mixed": (MIXED, {}),
    "tensors": (TENSORS, {}),
    "rows": (ROWS, {}),
    "packed_rows": (ROWS, {"compression": "zstd"}),
    "nested": (LEAVES, {}),
    **{
        f"in_{level}": (TENSORS, {"compression": "zstd", "compression_level": level})
        for level in ("chunk", "batch", "sample")
    },
    "in_frames": (TENSORS, {"compression": "zstd", "compression_batch_size": 3}),
}


def plain(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items()}
    return bytes(item) if isinstance(item, memoryview) else item


def main(folder: Path) -> None:
    for name, (samples, options) in SETS.items():
        writer = BinaryWriter(str(folder / name), chunk_size=7, **options)
        for number, sample in enumerate(samples):
            writer[number] = sample
        writer.done()
        writer.merge(1)
        copy = folder / "copies" / name  # it unpacks what it reads, and deletes what was packed
        shutil.copytree(folder / name, copy)
        data = StreamingDataset(str(copy))
        (folder / f"{name}.pickle").write_bytes(pickle.dumps([plain(data[k]) for k in range(len(data))]))


def main_of_tables(folder: Path) -> None:
    tables, place = [pa.Table.from_pylist(ROWS[:9]), pa.Table.from_pylist(ROWS[9:])], folder / "tables"
    place.mkdir()
    for k, table in enumerate(tables):
        pq.write_table(table.cast(tables[1].schema), place / f"{1 - k}.parquet", row_group_size=4)
    index_parquet_dataset(str(place))
    data = StreamingDataset(str(place), item_loader=ParquetLoader())
    (folder / "tables.pickle").write_bytes(pickle.dumps([data[k] for k in range(len(data))]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    main_of_tables(Path(sys.argv[1]))
