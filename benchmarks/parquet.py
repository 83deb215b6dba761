"""Rows of Parquet 20 ms away, of data sets of several shapes: rows a second, and what each costs in processor time.

    headrace      rows as dicts, in order
    shuffled      the same, `.shuffle()`
    datasets      Hugging Face's datasets, streaming, under torch's DataLoader
    litdata       LitData over the same files, by its ParquetLoader: it copies each to this machine
    litdata-own   LitData over what it has made of the same rows, its own chunks

LitData's are left out where it, or Polars, is not installed: `pip install litdata polars zstd`.

All with two workers and batches of 256 that are counted and dropped, each in a process of its own, by turns, over the
nginx of `server.py`, with nothing copied to this machine before. CPU is of the process and its workers, from the first
batch on; the server's is not counted. "epoch rows/s" are those of all of it, with what is copied before the first batch
comes; workers start in that time.

python benchmarks/parquet.py [SHAPE …] [--rounds 5] [--workers 2] [--delay d20]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import s3_peers
from cpu import cpu_s

FILES, BATCH = 4, 256
WORDS = [f"word{k}" for k in range(5000)]


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[k] for k in rng.integers(0, len(WORDS), words))


def short(rng: np.random.Generator) -> dict[str, Any]:
    return {"text": text(rng, 20), "label": int(rng.integers(2))}


def long(rng: np.random.Generator) -> dict[str, Any]:
    return {"text": text(rng, 800), "id": f"doc-{rng.integers(1 << 40)}"}


def chat(rng: np.random.Generator) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text(rng, 60)} for role in ("user", "assistant") * 2]}


def image(rng: np.random.Generator) -> dict[str, Any]:
    return {"image": {"bytes": rng.bytes(12_000), "path": "a.jpg"}, "label": int(rng.integers(100))}


def wide(rng: np.random.Generator) -> dict[str, Any]:
    values = rng.normal(size=100)
    return {f"c{k}": float(value) for k, value in enumerate(values)}


# What makes a row, how many there are, and how many are a group.
SHAPES: dict[str, tuple[Callable[[np.random.Generator], dict[str, Any]], int, int]] = {
    "short": (short, 240_000, 1000),
    "long": (long, 24_000, 1000),
    "chat": (chat, 48_000, 1000),
    "images": (image, 16_000, 100),
    "wide": (wide, 40_000, 1000),
}


def write(shape: str, folder: Path, rows: int) -> int:
    """The files of a shape, of so many rows; gives their bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    make, _, group = SHAPES[shape]
    rng = np.random.default_rng(0)
    nbytes = 0
    folder.mkdir()
    for k in range(FILES):
        table = pa.Table.from_pylist([make(rng) for _ in range(rows // FILES)])
        if shape == "images":
            said = {"info": {"features": {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
        path = folder / f"{k}.parquet"
        pq.write_table(table, path, row_group_size=group)
        nbytes += path.stat().st_size
    return nbytes


def headrace(urls: list[str], workers: int, *, is_shuffled: bool = False) -> Iterable[int]:
    import headrace as hr

    data = hr.stream(urls)
    data = data.shuffle() if is_shuffled else data
    return hr.DataLoader(data, batch_size=BATCH, collate_fn=len, num_workers=workers)


def datasets(urls: list[str], workers: int) -> Iterable[int]:
    import datasets
    import torch

    datasets.disable_progress_bars()
    data = datasets.load_dataset("parquet", data_files=urls, streaming=True, split="train")
    if "image" in data.column_names:
        data = data.cast_column("image", datasets.Image(decode=False))
    return torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=len, num_workers=workers)  # type: ignore[arg-type]


def rows_in(folder: Path) -> Iterable[dict[str, Any]]:
    """What `write` has written, as LitData's writer takes it."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("*.parquet")):
        yield from pq.read_table(path).to_pylist()


def litdata(urls: list[str], workers: int, *, is_own: bool = False) -> Iterable[int]:
    endpoint, _, bucket = urls[0].rpartition("/")[0].rpartition("/")
    if is_own:
        return s3_peers.litdata(endpoint, f"{bucket}-own", workers, BATCH)
    return s3_peers.litdata_of_tables(endpoint, bucket, workers, BATCH)


WAYS: dict[str, Callable[[list[str], int], Iterable[int]]] = {
    "headrace": headrace,
    "shuffled": lambda urls, workers: headrace(urls, workers, is_shuffled=True),
    "datasets": datasets,
    "litdata": litdata,
    "litdata-own": lambda urls, workers: litdata(urls, workers, is_own=True),
}


def measured(batches: Iterable[int], count: int) -> dict[str, float]:
    """One epoch of so many rows; CPU time up to the last batch but some: workers end with it, and theirs with them."""
    seen, first, known = 0, 0, 0
    cpu = spent = began = 0.0
    every, started, used = max(1, count // BATCH // 16), time.perf_counter(), cpu_s()
    whole = 0.0
    for batch, rows in enumerate(batches):
        seen += rows
        if not first:
            cpu, began, first = cpu_s(), time.perf_counter(), seen
        elif batch % every == 0:
            now = cpu_s()
            spent, known, whole = now - cpu, seen - first, (now - used) / seen
    assert seen == count, f"{seen} rows came, of {count}"
    end = time.perf_counter()
    return {
        "rate": (seen - first) / (end - began),
        "cost_us": spent / known * 1e6,
        "epoch_rate": seen / (end - started),
        "epoch_cost_us": whole * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of each shape; by default as many as take some seconds")
    parser.add_argument("--delay", default="d20", help="before each answer, as server.lua has it")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        urls = [f"{args.url}/{args.shapes[0]}/{k}.parquet" for k in range(FILES)]
        print(json.dumps(measured(WAYS[args.contestant](urls, args.workers), args.rows)))
        return
    from server import Server

    names = [name for name in args.only if not s3_peers.missing(name)]
    for name in set(args.only) - set(names):
        print(f"{name}: left out, {s3_peers.missing(name)} is not installed", flush=True)
    print(
        f"{'shape':8} {'':12} {'rows/s':>9} {'CPU µs a row':>13} {'epoch rows/s':>13} {'requests':>9} "
        f"{'bytes asked for / there are':>28}"
    )
    with tempfile.TemporaryDirectory(prefix="parquet-") as place, Server(Path(place)) as server:
        folder = Path(place)
        folder.chmod(0o755)
        for shape in args.shapes:
            rows = args.rows or SHAPES[shape][1]
            nbytes = write(shape, folder / shape, rows)
            if "litdata" in names:
                s3_peers.index_tables(folder / shape)
            if "litdata-own" in names:
                s3_peers.write_litdata(rows_in(folder / shape), folder / f"{shape}-own")
            results: dict[str, list[tuple[float, float, float, int, float]]] = {name: [] for name in names}
            for _ in range(args.rounds):
                for name in names:
                    server.reset()
                    told = [sys.executable, __file__, shape, "--contestant", name, "--rows", str(rows)]
                    told += ["--url", f"{server.url}/{args.delay}", "--workers", str(args.workers)]
                    out = subprocess.run(
                        told, stdout=subprocess.PIPE, text=True, check=True,
                        env={**os.environ, "HF_DATASETS_CACHE": f"{place}/hf", "HF_HUB_OFFLINE": "1",
                             "BENCH_SCRATCH": tempfile.mkdtemp(dir=place)},
                    )  # fmt: skip
                    said, asked = json.loads(out.stdout.splitlines()[-1]), server.stats()
                    results[name].append(
                        (
                            said["rate"],
                            said["cost_us"],
                            said["epoch_rate"],
                            asked["requests"],
                            asked["asked_bytes"] / nbytes,
                        )
                    )
            for name, runs in results.items():
                rate, cost, epoch, requests, share = map(median, zip(*runs, strict=True))
                print(
                    f"{shape:8} {name:12} {rate:9.0f} {cost:13.1f} {epoch:13.0f} {requests:9.0f} {share:28.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
