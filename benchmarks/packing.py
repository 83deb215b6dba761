"""What `.pack` plans: time, memory, and how much of the sequences is padding.

Documents have lengths that are drawn from a lognormal distribution (median 600 tokens, sigma 1), and sequences 4,096
tokens. "concat" and "best_fit" are an epoch's plan of the documents in its order; what goes together is found once for
all epochs ("bins"). Memory is numpy's, as tracemalloc counts it, in a run of its own.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tables

from headrace.plan.packs import BestFitPlan, Bins, ConcatPlan

SIZE, LOOKUPS = 4096, 2000


def lengths_of(documents: int) -> Any:
    """[documents] int64, in an order of an epoch."""
    return np.maximum(1, np.random.default_rng(0).lognormal(np.log(600), 1.0, documents).astype(np.int64))


def timed(make: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU seconds, what was made)."""
    began = time.process_time()
    made = make()
    return time.process_time() - began, made


def held(make: Callable[[], Any]) -> tuple[int, int]:
    """(bytes that are kept, bytes at the most)."""
    tracemalloc.start()
    made = make()
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return kept, most


def measured(documents: int) -> dict[str, float]:
    """One run."""
    lengths = lengths_of(documents)
    bins_s, bins = timed(lambda: Bins(lengths, SIZE))
    row: dict[str, float] = {"documents": documents, "bins_ms": bins_s * 1e3}
    plans: dict[str, Callable[[], Any]] = {
        "concat": lambda: ConcatPlan(lengths, SIZE),
        "best_fit": lambda: BestFitPlan(lengths, SIZE, bins, 1),
    }
    for name, make in plans.items():
        plan_s, plan = timed(make)
        numbers = np.random.default_rng(1).integers(0, plan.count, LOOKUPS).tolist()
        found_s, _ = timed(lambda plan=plan, numbers=numbers: [plan.pieces(number) for number in numbers])  # type: ignore[misc]
        kept, most = held(make)
        row |= {f"{name}_ms": plan_s * 1e3, f"{name}_us": found_s / LOOKUPS * 1e6, f"{name}_kept": kept / 2**20}
        row |= {f"{name}_peak": most / 2**20, f"{name}_padding": 1 - int(lengths.sum()) / (plan.count * SIZE)}
    return row


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[2_000, 20_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep every run as a line of this file")
    parser.add_argument("--report", type=Path, help="make the table from such a file, and measure nothing")
    given = parser.parse_args()
    results = tables.read(given.report) if given.report else []
    for _ in range(0 if given.report else given.runs):
        for documents in given.documents:
            results.append(measured(documents))
            tables.append(given.json, results[-1])
    rows = []
    for documents in dict.fromkeys(row["documents"] for row in results):
        own = [row for row in results if row["documents"] == documents]
        for name in ("concat", "best_fit"):
            middle = {of: median(row[f"{name}_{of}"] for row in own) for of in ("ms", "us", "kept", "peak", "padding")}
            bins = f"{median(row['bins_ms'] for row in own):.0f}" if name == "best_fit" else ""
            rows.append(
                [f"{documents:,}", name, f"{middle['padding']:.3%}", bins, f"{middle['ms']:.1f}", f"{middle['us']:.1f}",
                 f"{middle['kept']:.1f}", f"{middle['peak']:.1f}"]
            )  # fmt: skip
    head = [
        "documents",
        "",
        "padding",
        "bins, ms",
        "an epoch's plan, ms",
        "a sequence, µs",
        "MiB kept",
        "MiB at the most",
    ]
    print(tables.markdown(head, rows))


if __name__ == "__main__":
    main()
