"""What `cache_dir=` costs in a first epoch and saves in a second one: W3, with and without a folder: `cache.py`.

Both epochs are of one loader in a fresh process; the folder is new in each, under $TMPDIR. "half" has room for half of
the objects' bytes. "bytes" are those that the server was asked for, of those that the objects have.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import data
import rounds
import tables
from contestants import headrace
from fresh import Row
from server import Server, read_stats
from workloads import W3

import headrace as hr

EPOCHS = ("first", "second")


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--cache", nargs="+", choices=["none", "folder", "half"], default=["none", "folder"])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of samples in an epoch")
    options = rounds.parse(parser, two_epochs)
    jobs = [{"workers": n, "cache": cache, "scale": options.scale} for n in options.workers for cache in options.cache]
    server = Server(data.DATA, lambda: data.ensure("images"))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server)))


def two_epochs(job: Row) -> Iterator[Row]:
    """In the fresh process: two epochs, checked."""
    work = W3.scaled(job["scale"])
    parameters = {"num_workers": job["workers"]}
    headrace.prepare(work, parameters)
    row: Row = {}
    whole = _asked_bytes()
    if job["cache"] == "half":
        with headrace.run(work, parameters) as loader:
            for _ in loader:
                pass
    whole = _asked_bytes() - whole
    with tempfile.TemporaryDirectory(prefix="headrace-cache-") as folder:
        if job["cache"] == "folder":
            parameters["fetch"] = hr.Fetch(cache_dir=folder)
        elif job["cache"] == "half":
            parameters["fetch"] = hr.Fetch(cache_dir=folder, cache_bytes=whole // 2)
        yield {}
        with headrace.run(work, parameters) as loader:
            for epoch in EPOCHS:
                before, asked = read_stats(os.environ["HEADRACE_BENCH_SERVER"])["requests"], _asked_bytes()
                label_sum = 0
                start, cpu = time.perf_counter(), time.process_time()
                for _, labels in loader:
                    label_sum += int(labels.sum())
                row[f"{epoch}_rate"] = work.samples / (time.perf_counter() - start)
                row[f"{epoch}_us"] = 1e6 * (time.process_time() - cpu) / work.samples
                row[f"{epoch}_requests"] = read_stats(os.environ["HEADRACE_BENCH_SERVER"])["requests"] - before
                asked = _asked_bytes() - asked
                whole = whole or asked  # without a folder, and in the first epoch, all of it
                row[f"{epoch}_bytes"] = asked / whole
                if label_sum != work.label_sum():
                    raise SystemExit(f"a wrong epoch: the sum of its labels is {label_sum}, not {work.label_sum()}")
        yield row


def _asked_bytes() -> int:
    asked: int = read_stats(os.environ["HEADRACE_BENCH_SERVER"])["asked_bytes"]
    return asked


def report(rows: list[Row]) -> str:
    """A line for each number of workers, with and without a folder."""
    groups = rounds.group(rows, "workers", "cache")
    lines = []
    for (workers, cache), mine in groups.items():
        cells = [str(workers), cache, rounds.counted(mine)]
        for epoch in EPOCHS:
            good = [row for row in mine if f"{epoch}_rate" in row]
            cells.append(tables.spread(row[f"{epoch}_rate"] for row in good))
            ratios = rounds.ratios(good, groups.get((workers, "none"), []), f"{epoch}_rate")
            cells.append(tables.spread(ratios, 2))
            cells.append(tables.spread(row[f"{epoch}_us"] for row in good))
            cells.append(tables.spread(row[f"{epoch}_requests"] for row in good))
            cells.append(tables.spread((row[f"{epoch}_bytes"] for row in good), 2))
        lines.append(cells)
    columns = ["num_workers", "cache_dir", "runs"]
    for epoch in EPOCHS:
        columns += [f"{epoch} epoch, samples/s", "of that without", "trainer's CPU, µs/sample", "requests", "bytes"]
    return tables.markdown(columns, lines)


if __name__ == "__main__":
    main()
