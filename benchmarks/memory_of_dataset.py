"""Memory of a data set that all workers have: an array of 1 GB, a tensor of 1 GB, a list of 1,000,000 strings.

Measured when the first batch is in hand and after an epoch in which every part was looked at and each worker has
touched strings all over the list: where workers share Python objects by fork, each look writes a reference count, and
the page is copied. "packed" has the strings in headrace.packed. `--scale 0.1` is for a quick look.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import drop_ins
import numpy as np
import pictures
import rounds
import tables
import torch
from fresh import Row
from process_memory import memory
from torch.utils.data import Dataset

import headrace as hr

LOADERS = ("torch", "headrace", "packed")
STRINGS = 1_000_000
BYTES = 10**9
SAMPLES, BATCH = 20_000, 20
MOMENTS = {"start": "first batch", "end": "after an epoch"}


def main() -> None:
    """Measure, then print the table and draw the picture."""
    parser = drop_ins.parser(__doc__, LOADERS)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of all three parts of the data set")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = drop_ins.parse(parser, one_epoch)
    jobs = [{"loader": name, "workers": options.workers, "scale": options.scale} for name in options.loader]
    rows = drop_ins.rows_of(__file__, jobs, options, limit_s=600)
    print("\n" + report(rows))
    if options.plot:
        draw(rows, options.plot)


class Large(Dataset[int]):
    """A sample looks at its part of the array and of the tensor, and at strings all over the list."""

    def __init__(self, scale: float, strings: Sequence[str]) -> None:
        self.array = np.full(int(scale * BYTES) // 4, 1, np.float32)
        self.tensor = torch.full((int(scale * BYTES) // 4,), 1, dtype=torch.float32)
        self.strings = strings

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        part = slice(index * len(self.array) // SAMPLES, (index + 1) * len(self.array) // SAMPLES)
        found = int(self.array[part].sum()) + int(self.tensor[part].sum())
        return found + sum(len(self.strings[place]) for place in range(index, len(self.strings), SAMPLES))


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: the epoch, with the tree's memory at its start and at its end."""
    strings: Sequence[str] = [f"images/{number:012d}.jpg" for number in range(int(job["scale"] * STRINGS))]
    if job["loader"] == "packed":
        if not hasattr(hr, "packed"):
            raise drop_ins.RefusedError("there is no headrace.packed")
        strings = hr.packed(strings)
    dataset = Large(job["scale"], strings)
    del strings
    gc.collect()
    row: Row = {f"before_{name}": size for name, size in memory(os.getpid()).items()}
    kind = "torch" if job["loader"] == "torch" else "headrace"
    loader = drop_ins.make(kind, dataset, batch_size=BATCH, num_workers=job["workers"], shuffle=True)
    yield {}
    start = time.perf_counter()
    for number, _ in enumerate(loader, 1):
        if number == 1:
            row["first_batch_s"] = time.perf_counter() - start
        if number in {1, len(loader)}:
            row |= {f"{'start' if number == 1 else 'end'}_{name}": size for name, size in memory(os.getpid()).items()}
    yield row | {"seconds": time.perf_counter() - start}


def report(rows: list[Row]) -> str:
    """A line for each loader."""
    lines = []
    for (loader,), mine in rounds.group(rows, "loader").items():
        good = [row for row in mine if "end_pss" in row]
        names = ("before_pss", "start_pss", "end_pss", "start_all", "end_all")
        sizes = [tables.spread(row[name] / 2**20 for row in good) for name in names]
        growth = tables.spread((row["end_pss"] / row["start_pss"] for row in good), 2)
        seconds = tables.spread((row["first_batch_s"] for row in good), 2)
        lines.append([loader, rounds.counted(mine), *sizes[:3], growth, *sizes[3:], seconds])
    columns = ["loader", "runs", "PSS without workers, MiB", "PSS at the first batch", "PSS after an epoch", "growth"]
    columns += ["private and shared at the first batch", "after an epoch", "first batch, s"]
    return tables.markdown(columns, lines)


def draw(rows: list[Row], file: Path) -> None:
    """PSS of each loader's process tree at both moments."""
    good = [row for row in rows if "end_pss" in row]
    groups = {
        loader: {about: median(row[f"{name}_pss"] for row in mine) / 2**30 for name, about in MOMENTS.items()}
        for (loader,), mine in rounds.group(good, "loader").items()
    }
    pictures.bars(file, groups, "PSS of the process tree, GiB")


if __name__ == "__main__":
    main()
