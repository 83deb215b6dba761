"""Rows of Parquet in other orders than that of their files: rows a second, and seconds to the first batch.

    shuffled  `.shuffle()`, by windows
    global    `.shuffle("global")`
    sample    `.sample()` of half of the rows
    zip       two data sets side by side
    mix       a mixture with a list
    packed    a mixture of two data sets by tokens, `.pack(1024)`: documents a second

Two data sets of two local files each, in groups of 5,000 rows.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tables

import headrace as hr

ROWS, GROUP, LENGTH, MEAN_TOKENS = 40_000, 5_000, 1024, 109.5
SHARES = {"a": 1, "b": 2}


def write(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for name, part in itertools.product(SHARES, range(2)):
        documents = [list(range(int(count))) for count in rng.integers(20, 200, ROWS // 2)]
        table = pa.table({"input_ids": documents, "n": range(ROWS // 2)})
        pq.write_table(table, folder / f"{name}{part}.parquet", row_group_size=GROUP)


def shapes(folder: Path) -> dict[str, Callable[[], hr.Stream]]:
    def rows(name: str) -> hr.Stream:
        return hr.stream(f"{folder}/{name}*.parquet")

    some = np.random.default_rng(0).permutation(ROWS)[: ROWS // 2]
    others = hr.from_map([{"input_ids": [1] * 50, "n": n} for n in range(ROWS)])
    by_tokens: dict[str, Any] = {"weights": SHARES, "by": "tokens"}
    return {
        "shuffled": lambda: rows("a").shuffle(),
        "global": lambda: rows("a").shuffle("global"),
        "sample": lambda: rows("a").sample(some),
        "zip": lambda: rows("a").zip(rows("b")),
        "mix": lambda: hr.mix({"a": rows("a").shuffle(), "b": others}, SHARES),
        "packed": lambda: hr.mix({name: rows(name).shuffle() for name in SHARES}, **by_tokens).pack(LENGTH).take(9999),
    }


def measure(make: Callable[[], hr.Stream], documents: float, workers: int, limit_s: float) -> tuple[float, float]:
    """Return (documents a second after the first batch, seconds to it). A sample has so many documents."""
    began = time.perf_counter()
    with hr.DataLoader(make(), batch_size=32, num_workers=workers, collate_fn=list, seed=1) as loader:
        batches = iter(loader)
        next(batches)
        first_s, samples = time.perf_counter() - began, 0
        began = time.perf_counter()
        for batch in batches:
            samples += len(batch)
            if time.perf_counter() > began + limit_s:
                break
        return samples * documents / (time.perf_counter() - began), first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run, at most")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for (name, make), workers in itertools.product(shapes(Path(folder)).items(), (0, 2)):
            documents = LENGTH / MEAN_TOKENS if name == "packed" else 1
            runs = [measure(make, documents, workers, args.seconds) for _ in range(args.runs)]
            rates, first_s = zip(*runs, strict=True)
            rows.append((name, str(workers), tables.spread(rates), tables.spread(first_s, 2)))
    print(tables.markdown(("stream", "workers", "rows/s", "first batch, s"), rows))


if __name__ == "__main__":
    main()
