"""Parquet 20 ms away: rows of data sets of several shapes, ours in order and shuffled, and those of `datasets`.

python -m benchmarks.parquet [SHAPE …] [--rounds 3] [--workers 2]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headrace as hr
from headrace.testing import FaultServer

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


SHAPES: dict[str, tuple[Callable[[np.random.Generator], dict[str, Any]], int, int]] = {
    "short text": (short, 60_000, 1000),
    "long text": (long, 6_000, 1000),
    "chat": (chat, 12_000, 1000),
    "images": (image, 4_000, 100),
    "wide": (wide, 10_000, 1000),
}
FILES = 4


def files(shape: str) -> Iterator[bytes]:
    make, count, group = SHAPES[shape]
    rng = np.random.default_rng(0)
    for _ in range(FILES):
        table = pa.Table.from_pylist([make(rng) for _ in range(count // FILES)])
        if shape == "images":
            said = {"info": {"features": {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
        out = io.BytesIO()
        pq.write_table(table, out, row_group_size=group)
        yield out.getvalue()


def rate(batches: Iterator[int], count: int) -> float:
    """Rows a second, from the first batch on."""
    first = next(batches)
    began = time.perf_counter()
    rest = sum(batches)
    assert first + rest == count
    return rest / (time.perf_counter() - began)


def of_headrace(urls: list[str], workers: int, count: int, *, is_shuffled: bool) -> float:
    data = hr.stream(urls)
    data = data.shuffle() if is_shuffled else data
    with hr.DataLoader(data, batch_size=256, collate_fn=len, num_workers=workers) as loader:
        return rate(iter(loader), count)


def of_datasets(urls: list[str], workers: int, count: int) -> float:
    import datasets
    import torch

    datasets.disable_progress_bars()
    data = datasets.load_dataset("parquet", data_files=urls, streaming=True, split="train")
    if "image" in data.column_names:
        data = data.cast_column("image", datasets.Image(decode=False))
    return rate(iter(torch.utils.data.DataLoader(data, batch_size=256, collate_fn=len, num_workers=workers)), count)


def asked(header: str, whole: int) -> int:
    """How many bytes a Range header asks for."""
    start, _, stop = header.removeprefix("bytes=").partition("-")
    return int(stop) + 1 - int(start) if start and stop else whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--without-datasets", action="store_true")
    options = parser.parse_args()
    print(f"{'shape':12} {'way':20} {'rows/s':>10} {'requests':>9} {'bytes read / there':>19}")
    for shape in options.shapes:
        with FaultServer(faults=["latency:ms=20"]) as server:
            bodies = list(files(shape))
            urls = [server.add(f"{k}.parquet", body) for k, body in enumerate(bodies)]
            ways = {
                "in order": lambda urls=urls, count=SHAPES[shape][1]: of_headrace(
                    urls, options.workers, count, is_shuffled=False
                ),
                "shuffled": lambda urls=urls, count=SHAPES[shape][1]: of_headrace(
                    urls, options.workers, count, is_shuffled=True
                ),
            }
            if not options.without_datasets:
                ways["datasets, in order"] = lambda urls=urls, count=SHAPES[shape][1]: of_datasets(
                    urls, options.workers, count
                )
            rates: dict[str, list[float]] = {name: [] for name in ways}
            cost: dict[str, tuple[int, float]] = {}
            for _ in range(options.rounds):
                for name, read in ways.items():
                    server.log.clear()
                    rates[name].append(read())
                    sent = sum(asked(request.headers.get("range", ""), len(bodies[0])) for request in server.log)
                    cost[name] = len(server.log), sent / sum(map(len, bodies))
            for name in ways:
                median = statistics.median(rates[name])
                print(f"{shape:12} {name:20} {median:10.0f} {cost[name][0]:9} {cost[name][1]:19.2f}", flush=True)


if __name__ == "__main__":
    main()
