"""Memory against `memory_budget=`, with objects of 100 KB and of 1 GB: `bytes_in_flight.py --budget 64MiB 2GiB`.

"aget" is a data set whose `aget` awaits `hr.read`; "files" is `hr.files`. The trainer takes a first batch, pauses (so
that whatever reads ahead does so as far as it ever will), and goes on to the end of the epoch. Objects are sparse files
of zeros; two workers make 32 KiB of each. A sample larger than the budget is read alone. All figures are the most above
what there was before:

    told     what the loader says that it holds: inputs, and all shared memory (`stats()`)
    shared   memfds and such of the process tree, whoever holds them; like "told" sampled by a thread of the trainer,
             which gets no turn while another one keeps Python's lock
    taken    the proportional share of the process tree, seen from another process; Python's heap is in it
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import data
import process_memory
import rounds
import tables
from contestants import headrace
from fresh import Row
from server import Server
from workloads import Work, crop

import headrace as hr

HELD = ("inputs", "told", "shared")


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--dataset", nargs="+", choices=["aget", "files"], default=["aget", "files"])
    parser.add_argument("--budget", nargs="+", default=["64MiB", "256MiB", "3GiB"])
    parser.add_argument("--size", nargs="+", type=int, default=[10**5, 10**9], help="bytes of an object")
    parser.add_argument("--objects", type=int, default=8192, help="at most; 3 GB of them, but 3 at least")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds after the first batch")
    options = rounds.parse(parser, one_epoch)
    objects = {size: max(3, min(options.objects, 3 * 10**9 // size)) for size in options.size}
    jobs = [
        {"size": size, "dataset": kind, "budget": budget, "objects": objects[size], "pause": options.pause}
        for size in options.size
        for kind in options.dataset
        for budget in options.budget
    ]
    server = Server(data.DATA, lambda: [data.ensure_sparse(min(n, data.IMAGES), size) for size, n in objects.items()])
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server, limit_s=300)))


class First:
    """A sample of either data set to the first bytes of its object."""

    def __call__(self, sample: Any) -> Any:
        return crop(sample["bin"] if isinstance(sample, dict) else sample[0])


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: the first batch, a pause, the rest."""
    bucket = f"sparse/{job['size']}"
    work = Work("held", "objects of one size", "files", bucket, "bin", "d20", 64, job["objects"], crop)
    dataset: Any = headrace.Objects(work)
    if job["dataset"] == "files":
        dataset = hr.files([work.url(read.key) for read in work.reads()])
    batch = 64 if job["size"] < 10**7 else 1
    loader: hr.DataLoader[Any] = hr.DataLoader(
        dataset.map(First(), random=False), batch_size=batch, num_workers=2, memory_budget=job["budget"]
    )

    def look() -> process_memory.Memory:
        stats = loader.stats()
        told = {"told": stats.shared_bytes, "inputs": stats.fetch.input_bytes}
        return process_memory.memory(os.getpid()) | told

    headrace.prepare(work, {"num_workers": 2})
    yield {}
    samples = 0
    start = look()
    began = time.perf_counter()
    with process_memory.Peak(look) as peak:
        for number, tensor in enumerate(loader):
            samples += len(tensor)
            if not number:
                time.sleep(job["pause"])
    seconds = time.perf_counter() - began - job["pause"]
    if samples != job["objects"]:
        raise SystemExit(f"a wrong epoch: {samples} samples of {job['objects']}")
    row = {f"{name}_bytes": peak.most[name] - start[name] for name in HELD}
    yield row | {"budget_bytes": loader.stats().budget_bytes, "seconds": seconds}


def report(rows: list[Row]) -> str:
    """A line for each kind of object, data set and budget."""
    lines = []
    for (size, kind, budget), mine in rounds.group(rows, "size", "dataset", "budget").items():
        good = [row | {"taken_bytes": row["peak_pss"] - row["start_pss"]} for row in mine if "told_bytes" in row]
        cells = [f"{size:.0e}", kind, budget, rounds.counted(mine)]
        cells += [tables.spread(row[f"{name}_bytes"] / 2**20 for row in good) for name in (*HELD, "taken")]
        cells += [
            tables.spread((row[f"{n}_bytes"] / row["budget_bytes"] for row in good), 2) for n in ("told", "taken")
        ]
        lines.append([*cells, tables.spread((row["seconds"] for row in good), 2)])
    columns = ["object, bytes", "data set", "memory_budget", "runs", "inputs told, MiB", "told, MiB", "shared, MiB"]
    columns += ["taken, MiB", "told / budget", "taken / budget", "epoch without the pause, s"]
    return tables.markdown(columns, lines)


if __name__ == "__main__":
    main()
