"""Time to the first batch where a sample takes long: 32 workers, 100 ms per sample, batches of 32.

The clock runs from `iter` to the first batch in hand. "warm" has headrace's fork server ready, as in a trainer whose
second loader starts; "cold" has its start in the time, with an import of torch. torch has no such process.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from typing import Any

import drop_ins
import rounds
import tables
from fresh import Row
from torch.utils.data import Dataset


def main() -> None:
    """Measure, then print the table."""
    parser = drop_ins.parser(__doc__)
    parser.add_argument("--start", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sample-ms", type=int, default=100)
    options = drop_ins.parse(parser, one_batch)
    rows = drop_ins.rows_of(__file__, jobs(options), options)
    print("\n" + report(rows))


def jobs(options: argparse.Namespace) -> list[Row]:
    """What is run in each round."""
    settings = {"workers": options.workers, "batch": options.batch, "sample_ms": options.sample_ms}
    return [
        {"loader": name, "start": start} | settings
        for name in options.loader
        for start in (options.start if name != "torch" else ["warm"])
    ]


class Slow(Dataset[int]):
    """A sample that takes its time, and none of the CPU's."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


def one_batch(job: Row) -> Iterator[Row]:
    """In the fresh process: the first batch of an epoch in which every worker has some to make."""
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dataset = Slow(4 * job["batch"] * job["workers"], job["sample_ms"] / 1000)
    loader = drop_ins.make(job["loader"], dataset, batch_size=job["batch"], num_workers=job["workers"])
    if job["start"] == "warm":
        drop_ins.warm_up(job["loader"])
    yield {}
    start = time.perf_counter()
    batches: Iterator[Any] = iter(loader)
    started = time.perf_counter()
    next(batches)
    end = time.perf_counter()
    yield {"first_batch_s": end - start, "iter_s": started - start, "next_s": end - started}


def report(rows: list[Row]) -> str:
    """A line for each loader and start."""
    groups = rounds.group(rows, "loader", "start")
    lines = []
    for (loader, start), mine in groups.items():
        good = [row for row in mine if "first_batch_s" in row]
        lines.append([
            f"{loader} {start}" if loader != "torch" else loader,
            rounds.counted(mine),
            tables.spread((row["first_batch_s"] for row in good), 3),
            tables.spread(rounds.ratios(mine, groups.get(("torch", "warm"), []), "first_batch_s"), 3),
            tables.spread((row["iter_s"] for row in good), 3),
            tables.spread((row["next_s"] for row in good), 3),
        ])  # fmt: skip
    return tables.markdown(["loader", "runs", "first batch, s", "of torch's", "iter(), s", "next(), s"], lines)


if __name__ == "__main__":
    main()
