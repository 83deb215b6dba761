"""LitData's and MosaicML's own loaders over S3 addresses, whose endpoint is the nginx of `server.py`.

A folder below the server's is a bucket. Each epoch begins with an empty folder for what they copy to this machine.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NEEDS = {"litdata": ("litdata", "polars"), "litdata-own": ("litdata",), "mosaic": ("streaming",)}
_KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}


def missing(name: str) -> str:
    """The library that a contestant needs and that is not installed; empty: none."""
    return next((one for one in NEEDS.get(name, ()) if importlib.util.find_spec(one) is None), "")


def litdata(endpoint: str, bucket: str, workers: int, batch: int, loader: Any = None) -> Iterable[int]:
    """Batches of LitData's own loader, counted.

    Args:
        loader: of its items; its default where there is none.
    """
    import litdata as ld

    _allow_http()
    data = ld.StreamingDataset(
        f"s3://{bucket}/",
        item_loader=loader,
        cache_dir=tempfile.mkdtemp(prefix="litdata-", dir=os.environ.get("BENCH_SCRATCH")),
        storage_options={**_KEYS, "endpoint_url": endpoint},
        shuffle=False,
    )
    how = {"multiprocessing_context": "spawn"} if loader is not None and workers else {}  # it refuses to fork then
    return ld.StreamingDataLoader(
        data, batch_size=batch, collate_fn=len, num_workers=workers, worker_init_fn=_allow_http, **how
    )


def _allow_http(_: int = 0) -> None:
    """Have LitData read without encryption, in this process; there is no option for it."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def litdata_of_tables(endpoint: str, bucket: str, workers: int, batch: int) -> Iterable[int]:
    """The same of Parquet files with its index."""
    from litdata.streaming.item_loader import ParquetLoader

    return litdata(endpoint, bucket, workers, batch, ParquetLoader())


def mosaic(endpoint: str, bucket: str, workers: int, batch: int) -> Iterable[int]:
    """Batches of MosaicML's own data set under torch's loader, counted."""
    import torch
    from streaming import StreamingDataset

    os.environ |= {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    local = tempfile.mkdtemp(prefix="mosaic-", dir=os.environ.get("BENCH_SCRATCH"))
    data = StreamingDataset(remote=f"s3://{bucket}", local=local, shuffle=False, batch_size=batch)
    return torch.utils.data.DataLoader(data, batch_size=batch, collate_fn=len, num_workers=workers)


def index_tables(folder: Path) -> None:
    """Have LitData's index beside the Parquet files of a folder."""
    from litdata import index_parquet_dataset

    index_parquet_dataset(str(folder))


def write_litdata(rows: Iterable[dict[str, Any]], folder: Path) -> None:
    """LitData's chunks of 64 MB, its default."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge(1)


def write_mosaic(rows: Iterable[dict[str, Any]], kinds: dict[str, str], folder: Path) -> None:
    """MosaicML's shards of 64 MiB, its default; `kinds`: its encodings by columns."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=kinds) as out:
        for row in rows:
            out.write(row)
