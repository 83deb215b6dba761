"""What padding costs: CPU time per sample of batches that are padded, or of buckets, and how much of them is padding.

    batch, padded_batch, bucket    the arrays of W4's tar shards, from local files, two workers, batches of 512: all are
                                   as long, so what differs is the way through the loader; buckets go by the label
    padded texts, bucketed texts   token ids of lengths drawn from a lognormal distribution (median 600, at most 4,096),
                                   made in the workers, batches of 64: also the share of padding

    packed texts                   the same, packed into sequences of 4,096 in lanes, batches of 8

Each runs in a process of its own, all in turns; the clock starts with the first batch, so that no start is in it.
`--waits` tells instead how long a trainer waits for each batch whose steps take so long that it needs 0.8 of what the
loader gave it before, when it took all that came.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import data
import numpy as np
import tables
import torch
from cpu import cpu_s

import headrace as hr

SHARDS = 8
TEXTS = 40_000
EDGES = [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072]


def label(sample: tuple[Any, int]) -> int:
    """What W4's samples are sorted by."""
    return sample[1] % 8


def document(number: int) -> dict[str, torch.Tensor]:
    """One that has such tokens."""
    return {"input_ids": text(number)}


def text(number: int) -> torch.Tensor:
    """[tokens] int64 of a length of its own."""
    length = np.random.default_rng(number).lognormal(np.log(600), 0.9)
    return torch.full((max(1, min(4096, int(length))),), 1 + number)


def arrays() -> hr.Stream:
    """W4's samples."""
    paths = [str(data.DATA / f"small/{k:05d}.tar") for k in range(SHARDS)]
    return hr.stream(paths, index=None).decode().to_tuple("npy", "cls")


def texts() -> hr.Stream:
    """Token ids that differ in length."""
    return hr.from_map(range(TEXTS)).map(text, random=False)


WAYS: dict[str, Callable[[], hr.Stream]] = {
    "batch": lambda: arrays().batch(512),
    "padded_batch": lambda: arrays().padded_batch(512),
    "bucket": lambda: arrays().bucket(label, range(7), batch_size=512),
    "padded texts": lambda: texts().padded_batch(64),
    "bucketed texts": lambda: texts().bucket(len, EDGES, batch_size=64),
}
WAITING: dict[str, Callable[[], hr.Stream]] = {
    **WAYS, "packed texts": lambda: hr.from_map(range(TEXTS)).map(document, random=False).pack(4096).batch(8)
}  # fmt: skip
FREE, WAITS_MOST, SHARE = 24, 400, 0.8  # batches by which the rate is measured, and then waited for; the rate's share


def measured(stream: hr.Stream) -> dict[str, float]:
    """Samples per second, CPU time of all processes per sample, and the share of padding."""
    with hr.DataLoader(stream, num_workers=2) as loader:
        batches: Iterator[Any] = iter(loader)
        next(batches)
        began, cpu, count, padding, room = time.perf_counter(), cpu_s(), 0, 0, 0
        known = dict.fromkeys(("samples_per_s", "cpu_us", "padding"), 0.0)
        for number, batch in enumerate(batches):
            is_text = isinstance(batch, torch.Tensor)
            count += len(batch if is_text else batch["input_ids"] if isinstance(batch, dict) else batch[0])
            if is_text:
                padding, room = padding + int((batch == 0).sum()), room + batch.numel()
            if number % 20 == 0:  # workers end with the epoch, and their time with them
                spent, wall = cpu_s() - cpu, time.perf_counter() - began
                known = {
                    "samples_per_s": count / wall,
                    "cpu_us": spent / count * 1e6,
                    "padding": padding / max(1, room),
                }
    return known


def waits(stream: hr.Stream) -> dict[str, float]:
    """Quantiles of the seconds that a trainer waits for a batch, and how long its steps are."""
    with hr.DataLoader(stream, num_workers=2) as loader:
        batches: Iterator[Any] = iter(loader)
        for _ in range(FREE):  # workers have started
            next(batches)
        began = time.perf_counter()
        for _ in range(FREE):
            next(batches)
        step_s, waited = (time.perf_counter() - began) / FREE / SHARE, list[float]()
        while len(waited) < WAITS_MOST:
            time.sleep(step_s)
            began = time.perf_counter()
            if next(batches, None) is None:
                break
            waited.append(time.perf_counter() - began)
    p50, p99 = np.quantile(waited, [0.5, 0.99])
    return {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "step_ms": step_s * 1e3, "batches": len(waited)}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep every run as a line of this file")
    parser.add_argument("--report", type=Path, help="make the table from such a file, and measure nothing")
    parser.add_argument("--waits", action="store_true", help="measure how long a trainer waits")
    parser.add_argument("--only", nargs="+", choices=WAITING, default=[*WAITING])
    parser.add_argument("--one", choices=WAITING, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps((waits if given.waits else measured)(WAITING[given.one]())))
        return
    results = tables.read(given.report) if given.report else []
    if not given.report:
        data.ensure("small")
    for _ in range(0 if given.report else given.runs):
        for name in given.only:
            command = [sys.executable, __file__, "--one", name, *(["--waits"] if given.waits else [])]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.append({"name": name} | json.loads(said.splitlines()[-1]))
            tables.append(given.json, results[-1])
    rows = []
    for name in given.only:
        own = [row for row in results if row["name"] == name]
        if own and given.waits:
            rows.append([name, *(tables.spread([row[of] for row in own], 2) for of in ("p50_ms", "p99_ms", "step_ms"))])
        elif own:
            share = f"{median(row['padding'] for row in own):.1%}" if "texts" in name else ""
            speeds, cpu = ([row[of] for row in own] for of in ("samples_per_s", "cpu_us"))
            rows.append([name, tables.spread(speeds), tables.spread(cpu, 1), share])
    head = ["samples/s", "CPU µs a sample, all processes", "padding"]
    print(tables.markdown(["", *(["p50, ms", "p99, ms", "a step, ms"] if given.waits else head)], rows))


if __name__ == "__main__":
    main()
