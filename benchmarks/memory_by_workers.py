"""Memory of the process tree against num_workers, for batches of 38 MB: `memory_by_workers.py --plot FILE.svg`.

The trainer takes batches as fast as they come until each worker has made some, then pauses until everything that is
made ahead is there. The most that the whole tree took meanwhile is reported: its proportional set size, and all of its
shared memory, also such as no process has mapped just then.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import drop_ins
import pictures
import rounds
import tables
from fresh import Row
from local_samples import Images
from process_memory import Peak

BATCH = 64
BATCH_BYTES = BATCH * 3 * 224 * 224 * 4
QUANTITIES = {"shared": "shared memory", "pss": "PSS of the process tree"}


def main() -> None:
    """Measure, then print the table and draw the picture."""
    parser = drop_ins.parser(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prefetch", type=int, default=2, help="prefetch_factor of all loaders")
    parser.add_argument("--rounds", type=int, default=4, help="batches taken for each worker")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = drop_ins.parse(parser, some_batches)
    rows = drop_ins.rows_of(__file__, jobs(options), options, limit_s=300)
    print("\n" + report(rows))
    if options.plot:
        draw(rows, options.plot)


def jobs(options: argparse.Namespace) -> list[Row]:
    """What is run in each round."""
    settings = {"prefetch": options.prefetch, "rounds": options.rounds}
    return [{"loader": name, "workers": count} | settings for count in options.workers for name in options.loader]


def some_batches(job: Row) -> Iterator[Row]:
    """In the fresh process: batches, and what they took."""
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    count = job["rounds"] * job["workers"] + 8
    dataset = Images(BATCH * (count + job["prefetch"] * job["workers"] + 1))
    loader = drop_ins.make(
        job["loader"], dataset, batch_size=BATCH, num_workers=job["workers"], prefetch_factor=job["prefetch"]
    )
    yield {}
    start = time.perf_counter()
    with Peak() as peak:
        batches = iter(loader)
        for _ in range(count):
            batch = next(batches)
            batch.view(-1)[::1024].sum()  # touch every page
        seconds = time.perf_counter() - start
        time.sleep(1.0 + seconds * job["prefetch"] / job["rounds"])
    yield {f"{name}_bytes": size for name, size in peak.most.items()} | {"seconds": seconds}


def report(rows: list[Row]) -> str:
    """A line for each number of workers and loader."""
    groups = rounds.group(rows, "workers", "loader")
    lines = []
    for (workers, loader), mine in groups.items():
        good = [row for row in mine if "pss_bytes" in row]
        cells = [str(workers), loader, rounds.counted(mine)]
        for name in ("pss_bytes", "all_bytes"):
            cells.append(tables.spread(row[name] / 2**20 for row in good))
            cells.append(tables.spread(rounds.ratios(mine, groups.get((workers, "torch"), []), name), 2))
        cells.append(tables.spread(row["shared_bytes"] / 2**20 for row in good))
        cells.append(tables.spread((row["shared_bytes"] / BATCH_BYTES for row in good), 1))
        lines.append(cells)
    columns = ["num_workers", "loader", "runs", "PSS, MiB", "of torch's", "private and shared, MiB", "of torch's"]
    return tables.markdown([*columns, "shared, MiB", "shared, in batches"], lines)


def draw(rows: list[Row], file: Path) -> None:
    """Both quantities against the number of workers."""
    good = [row for row in rows if "pss_bytes" in row]
    panels: dict[str, dict[str, dict[int, float]]] = {about: {} for about in QUANTITIES.values()}
    for (loader, workers), mine in rounds.group(good, "loader", "workers").items():
        for name, about in QUANTITIES.items():
            panels[about].setdefault(loader, {})[workers] = median(row[f"{name}_bytes"] for row in mine) / 2**30
    pictures.lines(file, panels, "num_workers", "GiB")


if __name__ == "__main__":
    main()
