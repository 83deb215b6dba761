"""How even the ranks' work is with `balance=`, and what dealing a step takes.

Documents have lengths that are drawn from a lognormal distribution (median 600 tokens, sigma 1), and are packed into
sequences of 4,096 tokens ("concat"), or are batched as they are. Work is tokens squared, of each document. The largest
rank's work is shown over the mean of all, the mean of steps; "in turn" is without `balance=`.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median
from typing import Any

import numpy as np
import tables

from headrace.order.packing import ConcatPlan
from headrace.order.steps import dealt

SIZE, STEPS = 4096, 20


def works(kind: str, count: int) -> tuple[Any, float]:
    """([count] float64, CPU seconds for each)."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(np.log(600), 1.0, 8 * count).astype(np.int64))
    if kind == "documents":
        return lengths[:count].astype(np.float64) ** 2, 0.0
    plan = ConcatPlan(lengths, SIZE)
    began = time.process_time()
    pieces = [plan.pieces(number) for number in range(min(count, plan.count))]
    work = np.array([((one.stops - one.starts).astype(np.float64) ** 2).sum() for one in pieces])
    return work, (time.process_time() - began) / len(pieces)


def measured(kind: str, world: int, each: int) -> dict[str, Any]:
    """One run."""
    size = world * each
    work, found_s = works(kind, size * STEPS)
    row: dict[str, Any] = {"what": kind, "ranks": world, "samples each": each}
    even, turn, took = [], [], []
    for start in range(0, len(work) - size + 1, size):
        some = work[start : start + size]
        began = time.process_time()
        ranks = dealt(some, [each] * world)
        took.append(time.process_time() - began)
        loads, others = np.bincount(ranks, some, world), some.reshape(world, each).sum(axis=1)
        even.append(loads.max() / loads.mean())
        turn.append(others.max() / others.mean())
    row |= {"largest/mean": mean(even), "in turn": mean(turn), "step_ms": 1e3 * (median(took) + found_s * size)}
    return row


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    shapes = [(kind, world, each) for kind in ("packed", "documents") for world in (8, 64) for each in (4, 16, 64)]
    results = [measured(*shape) for shape in shapes]
    head = ["what", "ranks", "samples each", "largest/mean", "in turn", "ms a step"]
    rows = [
        [row["what"], str(row["ranks"]), str(row["samples each"])]
        + [f"{row[name]:.3f}" for name in ("largest/mean", "in turn")]
        + [f"{row['step_ms']:.1f}"]
        for row in results
    ]
    print(tables.markdown(head, rows))


if __name__ == "__main__":
    main()
