"""Rows of Parquet 20 ms away, of data sets of several shapes: rows a second, and what each costs in processor time.

    headrace      rows as dicts, in order
    shuffled      the same, `.shuffle()`
    datasets      Hugging Face's datasets, streaming, under torch's DataLoader

All with two workers and batches of 256 that are counted and dropped, each in a process of its own, by turns, over the
nginx of `server.py`. CPU is of the process and its workers, from the first batch on; the server's is not counted.

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


def write(shape: str, folder: Path) -> int:
    """The files of a shape; gives their bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    make, count, group = SHAPES[shape]
    rng = np.random.default_rng(0)
    nbytes = 0
    for k in range(FILES):
        table = pa.Table.from_pylist([make(rng) for _ in range(count // FILES)])
        if shape == "images":
            said = {"info": {"features": {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
        path = folder / f"{shape}-{k}.parquet"
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


WAYS: dict[str, Callable[[list[str], int], Iterable[int]]] = {
    "headrace": headrace,
    "shuffled": lambda urls, workers: headrace(urls, workers, is_shuffled=True),
    "datasets": datasets,
}


def contestant(name: str, urls: list[str], workers: int, count: int) -> dict[str, float]:
    """One epoch; CPU time up to the last batch but some, as workers end with the epoch, and theirs with them."""
    seen, first, known = 0, 0, 0
    cpu = spent = began = 0.0
    every = max(1, count // BATCH // 16)
    for batch, rows in enumerate(WAYS[name](urls, workers)):
        seen += rows
        if not first:
            cpu, began, first = cpu_s(), time.perf_counter(), seen
        elif batch % every == 0:
            spent, known = cpu_s() - cpu, seen - first
    assert seen == count, f"{name} gave {seen} rows of {count}"
    return {"rate": (seen - first) / (time.perf_counter() - began), "cost_us": spent / known * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--delay", default="d20", help="before each answer, as server.lua has it")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        (shape,) = args.shapes
        urls = [f"{args.url}/{shape}-{k}.parquet" for k in range(FILES)]
        print(json.dumps(contestant(args.contestant, urls, args.workers, SHAPES[shape][1])))
        return
    from server import Server

    print(f"{'shape':8} {'':9} {'rows/s':>9} {'CPU µs a row':>13} {'requests':>9} {'bytes asked for / there are':>28}")
    with tempfile.TemporaryDirectory(prefix="parquet-") as place, Server(Path(place)) as server:
        folder = Path(place)
        folder.chmod(0o755)
        for shape in args.shapes:
            nbytes = write(shape, folder)
            results: dict[str, list[tuple[float, float, int, float]]] = {name: [] for name in args.only}
            for _ in range(args.rounds):
                for name in args.only:
                    server.reset()
                    told = [
                        sys.executable,
                        __file__,
                        shape,
                        "--contestant",
                        name,
                        "--url",
                        f"{server.url}/{args.delay}",
                    ]
                    out = subprocess.run(
                        [*told, "--workers", str(args.workers)], stdout=subprocess.PIPE, text=True, check=True,
                        env={**os.environ, "HF_DATASETS_CACHE": f"{place}/hf", "HF_HUB_OFFLINE": "1"},
                    )  # fmt: skip
                    said, asked = json.loads(out.stdout.splitlines()[-1]), server.stats()
                    results[name].append(
                        (said["rate"], said["cost_us"], asked["requests"], asked["asked_bytes"] / nbytes)
                    )
            for name, runs in results.items():
                rate, cost, requests, share = map(median, zip(*runs, strict=True))
                print(f"{shape:8} {name:9} {rate:9.0f} {cost:13.1f} {requests:9.0f} {share:28.2f}", flush=True)


if __name__ == "__main__":
    main()
