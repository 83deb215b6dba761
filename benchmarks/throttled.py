"""A store that answers 503 above N requests a second, and eight loaders that share it: `throttled.py --limit 200 1000`.

Each loader is a process of its own, and reads an eighth of some seconds' worth of objects of 83 KB, 20 ms away, into
batches; every sample must come once. Tokens come at N a second, and those of a tenth of a second can be saved up; a
request that finds none is refused at once, with "Retry-After: 1" or without. "goodput" is samples a second by N, from
the first loader's start to the last one's end.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import data
import rounds
import tables
import torch
from contestants import headrace
from fresh import Row
from server import Server
from workloads import W3, Work

import headrace as hr


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--limit", nargs="+", type=int, default=[200, 1000], help="requests a second")
    parser.add_argument("--retry-after", nargs="+", choices=["no", "yes"], default=["no", "yes"])
    parser.add_argument("--loaders", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of reading at the limit")
    options = rounds.parse(parser, one_epoch)
    settings = {"loaders": options.loaders, "seconds_at_limit": options.seconds}
    jobs = [{"limit": n, "retry_after": after} | settings for n in options.limit for after in options.retry_after]
    server = Server(data.DATA, lambda: data.ensure("images"))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server, limit_s=60 + 10 * options.seconds)))


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: all loaders, each in a process below it."""
    prefix = f"limit{job['limit']}{'s' if job['retry_after'] == 'yes' else ''}"
    samples = int(job["seconds_at_limit"] * job["limit"])
    work = replace(W3, delay=f"{prefix}/{W3.delay}", samples=samples)
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(job["loaders"]) as pool:
        yield {}
        start = time.perf_counter()
        parts = pool.map(partial(one_loader, work, job["loaders"]), range(job["loaders"]), chunksize=1)
        seconds = time.perf_counter() - start
    counts, sums, ends = zip(*parts, strict=True)
    if (sum(counts), sum(sums)) != (samples, work.label_sum()):
        raise SystemExit(f"a wrong epoch: {sum(counts)} samples of {samples}, sum of labels {sum(sums)}")
    goodput = samples / seconds / job["limit"]
    yield {"goodput": goodput, "seconds": seconds, "samples": samples, "first_end": min(ends) / max(ends)}


def one_loader(work: Work, loaders: int, number: int) -> tuple[int, int, float]:
    """One loader's epoch: samples, the sum of their labels, and how long it took."""
    start = time.perf_counter()
    dataset = headrace.Objects(work, slice(number, None, loaders)).map(headrace.Sample(work), random=False)
    loader: hr.DataLoader[Any] = hr.DataLoader(dataset, batch_size=16, shuffle=True)
    samples = label_sum = 0
    with loader:
        for _, labels in loader:
            samples += len(labels)
            label_sum += int(labels.sum())
    return samples, label_sum, time.perf_counter() - start


def report(rows: list[Row]) -> str:
    """A line for each limit, with and without Retry-After."""
    lines = []
    for (limit, after), mine in rounds.group(rows, "limit", "retry_after").items():
        good = [row for row in mine if "goodput" in row]
        lines.append([
            str(limit),
            after,
            rounds.counted(mine),
            tables.spread((row["goodput"] for row in good), 2),
            tables.spread((row["requests"] / row["samples"] for row in good), 2),
            tables.spread((row["throttled"] / row["requests"] for row in good), 2),
            tables.spread(row["peak_in_flight"] for row in good),
            tables.spread((row["first_end"] for row in good), 2),
        ])  # fmt: skip
    columns = ["requests/s", "Retry-After", "runs", "goodput", "requests made / needed", "refused"]
    return tables.markdown([*columns, "in flight, peak", "first loader's time / last one's"], lines)


if __name__ == "__main__":
    main()
