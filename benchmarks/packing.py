"""What `.pack` plans: time, memory, and how much of the sequences is padding.

Documents have lengths that are drawn from a lognormal distribution (median 600 tokens, sigma 1), and sequences 4,096
tokens. "concat" and "best_fit" are an epoch's plan of the documents in its order; what goes together is found once for
all epochs ("bins"). Memory is numpy's, as tracemalloc counts it, in a run of its own.

A second table is of documents that must be read first: they are packed in lanes, one for each row of the global batch.
Nothing is read there: lengths come in the order in which the lanes ask for documents, 64 at a time. "waiting" are the
tokens that are held at the most, and "in order" what would be, should documents be read in the order of the epoch.

A third table is of lanes that draw on sources by tokens, of which each has lengths of its own median: the greatest
difference of a source's share from what was asked for. These figures do not depend on the machine, and are made once.

A fourth one is of the same sources whose lengths are known, and which are not packed: what comes is planned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tables

from headrace.order.combined import ConstantShares, TokenMixing, TokenOrder
from headrace.order.orders import ENDLESS, Passes, ShardOrder
from headrace.order.packed_rows import PackedRows
from headrace.order.packing import BestFitPlan, Bins, ConcatPlan, Packing

SIZE, LOOKUPS = 4096, 2000
SOURCES = {2: ([5, 3], [600, 200]), 4: ([50, 30, 15, 5], [600, 200, 3000, 1000])}  # shares, and medians of lengths


def lengths_of(documents: int, middle: int = 600, seed: int = 0) -> Any:
    """[documents] int64, in an order of an epoch."""
    return np.maximum(1, np.random.default_rng(seed).lognormal(np.log(middle), 1.0, documents).astype(np.int64))


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


def in_lanes(method: str, lanes: int, steps: int) -> dict[str, Any]:
    """One run of a single rank that has all lanes."""
    lengths = lengths_of(2**20).tolist()
    run = PackedRows(Packing(SIZE, method), range(lanes), lanes, ENDLESS)
    asked = given = used = waiting = most = 0
    took = [0] * lanes  # of each lane's documents
    began = time.process_time()
    while given < steps * lanes:
        for name, position in enumerate(run.positions(asked, asked + 64).tolist(), asked):
            run.arrive(name, [lengths[position % len(lengths)]], [False])
            waiting += lengths[position % len(lengths)]
        asked += 64
        most = max(most, waiting)
        while (sequence := run.take()) is not None:
            given += 1
            pieces = sequence.pieces
            tokens = sum(piece.stop - piece.start for piece in pieces)
            waiting, used = waiting - tokens, used + tokens
            took[sequence.position % lanes] += sum(piece.is_last for piece in pieces)
        progress = run.after(given)
    seconds = time.process_time() - began
    # Read in order, each lane has as many documents as the one that has used up most of them.
    in_order = sum((max(took) - count) * used / sum(took) for count in took)
    row = {"method": method, "lanes": lanes, "steps": steps, "padding": 1 - used / (given * SIZE)}
    row |= {"us": seconds / given * 1e6, "state": len(json.dumps(progress.to_json()))}
    return row | {"waiting": most / lanes, "in_order": in_order / lanes}


def by_tokens(method: str, lanes: int, sources: int, tokens: int) -> dict[str, Any]:
    """One run of a single rank that has all lanes, which draw on sources."""
    shares, middles = SOURCES[sources]
    lengths = [lengths_of(2**18, middle, seed).tolist() for seed, middle in enumerate(middles)]
    names = tuple(f"{middle} tokens" for middle in middles)
    packing = Packing(SIZE, method, TokenMixing(names, ConstantShares(shares, 2**20)))
    run = PackedRows(packing, range(lanes), lanes, ENDLESS)
    asked = given = 0
    while given * SIZE < tokens:
        for name, position in enumerate(run.positions(asked, asked + 64).tolist(), asked):
            turn, source = divmod(position, sources)
            run.arrive(name, [lengths[source][turn % 2**18]], [False])
        asked += 64
        while run.take() is not None:
            given += 1
    progress = run.after(given)
    there = [some / sum(progress.tokens) for some in progress.tokens]
    error = max(abs(part - share / sum(shares)) for part, share in zip(there, shares, strict=True))
    row = {"by_tokens": method, "lanes": lanes, "sources": sources, "tokens": tokens}
    return row | {"error": error, "state": len(json.dumps(progress.to_json()))}


def by_known_tokens(sources: int, tokens: int) -> dict[str, Any]:
    """One run over documents whose lengths are known, in the order in which they come."""
    shares, middles = SOURCES[sources]
    lengths = [lengths_of(2**18, middle, seed) for seed, middle in enumerate(middles)]

    def planned() -> TokenOrder:
        inputs = [
            Passes(lambda turn, k=k: ShardOrder(np.array([2**18]), "within", (k, turn)), None)  # type: ignore[misc]
            for k in range(sources)
        ]
        of = [lambda places, some=some: some[places.rows] for some in lengths]
        names = [f"{middle} tokens" for middle in middles]
        return TokenOrder(inputs, [2**18] * sources, of, ConstantShares(shares, 2**20), names, None, 16384)

    order, there, at, began = planned(), np.zeros(sources), 0, time.process_time()
    while there.sum() < tokens:
        positions = np.arange(at, at + 4096)
        inputs, rows = order.turns(positions)[0], order.locate(positions).rows
        at += len(positions)
        there += [lengths[k][rows[inputs == k]].sum() for k in range(sources)]
    seconds = time.process_time() - began
    error = max(abs(part / there.sum() - share / sum(shares)) for part, share in zip(there, shares, strict=True))
    kept = held(planned)[0] / (sources * 2**18) * 1e6 / 2**20
    return {"by_known_tokens": sources, "tokens": tokens, "error": error, "us": seconds / at * 1e6, "kept": kept}


def print_by_known_tokens(results: list[dict[str, Any]]) -> None:
    """The fourth table."""
    rows = [
        [
            str(row["by_known_tokens"]),
            f"{row['tokens']:,}",
            f"{row['error']:.4%}",
            f"{row['us']:.1f}",
            f"{row['kept']:.1f}",
        ]
        for row in results
    ]
    names = ["sources", "tokens", "greatest error of a share", "us a document", "MB kept for each million documents"]
    print(tables.markdown(names, rows))


def print_by_tokens(results: list[dict[str, Any]]) -> None:
    """The third table."""
    found = {tuple(row[of] for of in ("by_tokens", "lanes", "sources", "tokens")): row for row in results}
    rows = [
        [method, f"{lanes:,}", str(sources), f"{tokens:,}", f"{row['error']:.3%}", f"{row['state']:,}"]
        for (method, lanes, sources, tokens), row in found.items()
    ]
    print(tables.markdown(["", "lanes", "sources", "tokens", "greatest error of a share", "state, bytes"], rows))


def print_lanes(results: list[dict[str, Any]]) -> None:
    """The second table."""
    rows = []
    for method, lanes, steps in dict.fromkeys((row["method"], row["lanes"], row["steps"]) for row in results):
        own = [row for row in results if (row["method"], row["lanes"], row["steps"]) == (method, lanes, steps)]
        middle = {name: median(row[name] for row in own) for name in ("padding", "us", "state", "waiting", "in_order")}
        rows.append(
            [method, f"{lanes:,}", f"{steps:,}", f"{middle['padding']:.2%}", f"{middle['us']:.0f}",
             f"{middle['state']:,.0f}", f"{middle['waiting']:,.0f}", f"{middle['in_order']:,.0f}"]
        )  # fmt: skip
    head = ["", "lanes", "steps", "padding", "a sequence, µs", "state, bytes"]
    print(tables.markdown([*head, "tokens waiting, each lane", "in order"], rows))


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[2_000, 20_000, 1_000_000])
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 64, 1024], help="64,000 sequences are made of each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000_000, 60_000_000], help="drawn from sources")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep every run as a line of this file")
    parser.add_argument("--report", type=Path, help="make the table from such a file, and measure nothing")
    given = parser.parse_args()
    results = tables.read(given.report) if given.report else []
    for _ in range(0 if given.report else given.runs):
        for documents in given.documents:
            results.append(measured(documents))
            tables.append(given.json, results[-1])
        for method, lanes in itertools.product(("concat", "best_fit"), given.lanes):
            results.append(in_lanes(method, lanes, 64_000 // lanes))
            tables.append(given.json, results[-1])
    sizes = itertools.product(given.lanes, SOURCES, given.tokens, ("concat", "best_fit"))
    for lanes, sources, tokens, method in () if given.report else sizes:
        results.append(by_tokens(method, lanes, sources, tokens))
        tables.append(given.json, results[-1])
    for sources, tokens in () if given.report else itertools.product(SOURCES, given.tokens):
        results.append(by_known_tokens(sources, tokens))
        tables.append(given.json, results[-1])
    print_by_known_tokens([row for row in results if "by_known_tokens" in row])
    print_by_tokens([row for row in results if "by_tokens" in row])
    print_lanes([row for row in results if "method" in row])
    results = [row for row in results if "documents" in row]
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
