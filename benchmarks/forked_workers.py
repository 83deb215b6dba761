"""First batch and memory of a torch data set with two workers: `forked_workers.py --data strings --runs 5`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import drop_ins
import numpy as np
import rounds
import tables
from fresh import Row
from local_samples import Numbers


class Array(Numbers):
    """Beside an array of 500 MB."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.array = np.ones(62_500_000)


class Strings(Numbers):
    """Beside a list of a million strings, of which each sample reads one."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.strings = [f"a string of number {number}" for number in range(1_000_000)]

    def __getitem__(self, index: int) -> int:
        return len(self.strings[index * 7919 % len(self.strings)])


DATA = {"small": Numbers, "array": Array, "strings": Strings}


def main() -> None:
    """Measure, then print the table."""
    parser = drop_ins.parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--workers", type=int, default=2)
    options = drop_ins.parse(parser, two_epochs)
    print("\n" + report(drop_ins.rows_of(__file__, jobs(options), options)))


def jobs(options: argparse.Namespace) -> list[Row]:
    """Return the jobs of a round."""
    return [
        {"data": data, "loader": name, "workers": options.workers} for data in options.data for name in options.loader
    ]


def two_epochs(job: Row) -> Iterator[Row]:
    """Time two epochs in the fresh process."""
    data: Any = DATA[job["data"]](6400)
    drop_ins.make(job["loader"], Numbers(4))  # imports are not measured
    yield {}
    start = time.perf_counter()
    loader = drop_ins.make(job["loader"], data, batch_size=64, num_workers=job["workers"])
    iterator = iter(loader)
    next(iterator)
    first_s = time.perf_counter() - start
    list(iterator)
    del iterator
    start = time.perf_counter()
    list(loader)
    yield {"first_batch_s": first_s, "later_epoch_s": time.perf_counter() - start}


def report(rows: list[Row]) -> str:
    """Return a line for each data set and loader."""
    lines = []
    for (data, loader), mine in rounds.group(rows, "data", "loader").items():
        good = [row for row in mine if "first_batch_s" in row]
        cells = [data, loader, rounds.counted(mine)]
        cells += [tables.spread((row[name] for row in good), 3) for name in ("first_batch_s", "later_epoch_s")]
        lines.append([*cells, tables.spread(row["peak_pss"] / 2**20 for row in good)])
    return tables.markdown(["data", "loader", "runs", "first batch, s", "later epoch, s", "peak memory, MiB"], lines)


if __name__ == "__main__":
    main()
