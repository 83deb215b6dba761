"""The order of an epoch: how long it takes to make one, what a step and a position cost, and how often shards are read.

    permutation  ns of CPU time per index of a whole pass over `--count` numbers, in pieces, and the memory that it adds
    build        an order of 10**9 samples in 10**6 uneven shards, mixed by windows: until it is ready, and its peak
    rank         a step of 65,536 samples, as one of 8,000 ranks sees it: its positions, and where the samples lie
    position     the same for a single rank that asks for 4,096 positions at once, for batches of several sizes
    reads        how many nodes of 8 ranks read a shard, where a node keeps what it has read until it needs it no more

torch.randperm stands beside the permutation. `order_picture.py` draws the orders.
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

from headrace.order.cursor import Cursor
from headrace.order.orders import Order, ShardOrder, ShuffledOrder, Windows, lane_turns
from headrace.order.permutation import permutation
from headrace.order.steps import Steps

PIECE = 2**20
WINDOWS = Windows.of(131_072, 512)
NODE = 8


def main() -> None:
    """Measure, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--count", type=int, default=10**8, help="numbers that are permuted")
    parser.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for run in range(options.runs):
        rows.append({"run": run} | permuting(options.count) | building() | stepping())
        tables.append(options.json, rows[-1])
    names = [name for name in rows[0] if name != "run"]
    print(tables.markdown(["what", "median (range)"], [[n, tables.spread((row[n] for row in rows), 1)] for n in names]))
    print(tables.markdown(["data", "ranks", "samples of a step", "reads per shard"], reading()))


def permuting(count: int) -> dict[str, float]:
    """A whole pass: ours in pieces, torch's at once."""
    import torch

    def ours() -> None:
        for start in range(0, count, PIECE):
            permutation(np.arange(start, min(start + PIECE, count)), count, 5)

    row = {"permutation, ns/index": cpu_s(ours) / count * 1e9, "permutation, peak MB": peak_mb(ours_once(count))}
    torch.set_num_threads(1)
    row["torch.randperm, ns/index"] = cpu_s(lambda: torch.randperm(count)) / count * 1e9
    row["torch.randperm, MB"] = count * 8 / 1e6
    return row


def ours_once(count: int) -> Callable[[], object]:
    """One piece of the pass: the others take the same memory."""
    return lambda: permutation(np.arange(min(PIECE, count)), count, 5)


def building() -> dict[str, float]:
    """An order of a billion samples."""
    sizes = np.random.default_rng(0).integers(0, 2001, 10**6)
    make = lambda: ShardOrder(sizes, "windows", (17, 3), WINDOWS)
    return {"build, ms": 1e3 * wall_s(make), "build, peak MB": peak_mb(make)}


def stepping() -> dict[str, float]:
    """What is asked for over and over, in microseconds per step and nanoseconds per position."""
    sizes = np.random.default_rng(0).integers(0, 2001, 10**6)
    order = ShardOrder(sizes, "windows", (17, 3), WINDOWS)
    row = {}
    for steps_at_once in (1, 64):
        rank = Steps(Cursor.at(), order.count, 65_536, rank=4321, world=8000, lanes=order.lanes)
        seconds = stretches(order, rank, steps_at_once * rank.batch, 20)
        row[f"rank of 8,000, {steps_at_once} steps at once, us/step"] = seconds / 20 / steps_at_once * 1e6
    for batch in (4, 64, 100, 1024):
        alone = Steps(Cursor.at(), order.count, batch, lanes=order.lanes)
        row[f"batches of {batch}, ns/position"] = stretches(order, alone, 4096, 64) / 64 / 4096 * 1e9
    alone = Steps(Cursor.at(), order.count, 64, lanes=order.lanes)
    row["batches of 64, one at a time, ns/position"] = stretches(order, alone, 64, 400) / 400 / 64 * 1e9
    small = ShardOrder(sizes[:1000], "windows", (17, 3), Windows(32, 5))
    alone = Steps(Cursor.at(), small.count, 32, lanes=small.lanes)
    row["windows of 32 x 5, one at a time, ns/position"] = stretches(small, alone, 160, 400) / 400 / 160 * 1e9
    everywhere = ShuffledOrder(ShardOrder(sizes, "none", ()), (17, 3))
    alone = Steps(Cursor.at(), everywhere.count, 64)
    row["global, ns/position"] = stretches(everywhere, alone, 4096, 64) / 64 / 4096 * 1e9
    within = ShardOrder(sizes, "within", (17, 3))
    row["within, ns/position"] = stretches(within, alone, 4096, 64) / 64 / 4096 * 1e9
    return row


def stretches(order: Order, steps: Steps, size: int, count: int) -> float:
    """Seconds of CPU time for so many stretches of a rank's samples: their positions, and where they lie."""

    def look() -> None:
        for number in range(count):
            order.locate(steps.positions(number * size, (number + 1) * size))

    look()
    return cpu_s(look)


def reading() -> list[list[str]]:
    """Simulated ranks: on how many nodes the samples of a shard are used."""
    random = np.random.default_rng(0)
    data = {"4,000 shards of 150 to 250": random.integers(150, 251, 4000), "2,000 of 1,000": np.full(2000, 1000)}
    lines = []
    for name, sizes in data.items():
        order = ShardOrder(sizes, "windows", (17, 3), WINDOWS)
        pieces = [np.arange(start, min(start + PIECE, order.count)) for start in range(0, order.count, PIECE)]
        shards = np.concatenate([order.locate(piece).shards for piece in pieces])
        for ranks in (96, 100, 512, 1024):
            for batch in (32, 25):
                nodes = nodes_of(order, ranks * batch, ranks)
                pairs = np.unique(shards * ranks + nodes)
                lines.append([name, str(ranks), str(ranks * batch), f"{len(pairs) / np.count_nonzero(sizes):.2f}"])
    return lines


def nodes_of(order: Order, size: int, ranks: int) -> np.ndarray:
    """The node that each position of an epoch is used on."""
    turns = lane_turns(order.lanes)
    nodes = np.empty(order.count, np.int64)
    for start in range(0, order.count, size):
        step = np.arange(start, min(start + size, order.count))
        step = step[np.argsort(turns[step % order.lanes], kind="stable")]
        ends = np.arange(ranks + 1) * len(step) // ranks
        nodes[step] = np.repeat(np.arange(ranks) // NODE, np.diff(ends))
    return nodes


def cpu_s(work: Callable[[], object]) -> float:
    """Seconds of CPU time, the median of three."""
    found = []
    for _ in range(3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return median(found)


def wall_s(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_mb(work: Callable[[], object]) -> float:
    """The most memory that it takes, in 10**6 bytes, its result with it."""
    tracemalloc.start()
    kept = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak / 1e6


if __name__ == "__main__":
    main()
