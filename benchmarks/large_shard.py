"""A tar shard of 1 GB over HTTP: what is asked for before the first batch, and memory against `memory_budget=`.

The trainer takes a first batch, pauses (so that whatever reads ahead does so as far as it ever will), and goes on to
the end of the epoch. Bytes are counted by the server when they are asked for: a GET without a range asks for all.
Memory is that of the whole process tree, above what it was when the loader was ready to start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import contestants
import data
import rounds
import tables
from fresh import Row
from server import Server, read_stats
from workloads import Work, crop


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--budget", nargs="*", default=["64MiB", "256MiB", "auto"], help="headrace's memory budgets")
    parser.add_argument("--peer", nargs="*", choices=["torch_dl", "wds", "spdl"], default=[], help="loaders beside it")
    parser.add_argument("--samples", type=int, default=1000, help="of 1 MB each, in the shard")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds after the first batch")
    options = rounds.parse(parser, one_epoch)
    loaders = [("headrace", budget) for budget in options.budget] + [(peer, "-") for peer in options.peer]
    settings = {"samples": options.samples, "pause": options.pause}
    jobs = [{"contestant": contestant, "budget": budget} | settings for contestant, budget in loaders]
    server = Server(data.DATA, lambda: data.ensure_large(options.samples))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server)))


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: the first batch, a pause, the rest."""
    work = Work("large", "one large shard", "tar", "large", "bin", "d5", 16, job["samples"], crop)
    contestant = contestants.load(job["contestant"])
    parameters: Row = {"num_workers": 2} if job["contestant"] != "spdl" else {"fetch": 4, "threads": 4}
    if job["budget"] != "-":
        parameters["memory_budget"] = job["budget"]
    contestants.prepare(contestant, work, parameters)
    yield {}
    row: Row = {}
    samples = label_sum = 0
    start = time.perf_counter()
    for _, labels in contestant.run(work, parameters):
        if not samples:
            row["first_batch_s"] = time.perf_counter() - start
            row["asked_at_first_batch"] = asked_bytes()
            time.sleep(job["pause"])
            row["asked_after_pause"] = asked_bytes()
        samples += len(labels)
        label_sum += int(labels.sum())
    row["seconds"] = time.perf_counter() - start - job["pause"]
    if (samples, label_sum) != (work.samples, work.label_sum()):
        raise SystemExit(f"a wrong epoch: {samples} samples of {work.samples}, sum of labels {label_sum}")
    yield row


def asked_bytes() -> int:
    """Bytes that have been asked of the server."""
    asked: int = read_stats(os.environ["HEADRACE_BENCH_SERVER"])["asked_bytes"]
    return asked


def report(rows: list[Row]) -> str:
    """A line for each loader and budget."""
    lines = []
    for (contestant, budget), mine in rounds.group(rows, "contestant", "budget").items():
        good = [row for row in mine if "seconds" in row]
        lines.append([
            contestant,
            budget,
            rounds.counted(mine),
            tables.spread((row["first_batch_s"] for row in good), 2),
            tables.spread(row["asked_at_first_batch"] / 1e6 for row in good),
            tables.spread(row["asked_after_pause"] / 1e6 for row in good),
            tables.spread((row["peak_pss"] - row["start_pss"]) / 2**20 for row in good),
            tables.spread(row["peak_pss"] / 2**20 for row in good),
            tables.spread((row["seconds"] for row in good), 2),
        ])  # fmt: skip
    columns = ["loader", "memory_budget", "runs", "first batch, s", "MB asked by then", "MB asked after a pause"]
    columns += ["peak memory above the start, MiB", "peak memory, MiB", "epoch without the pause, s"]
    return tables.markdown(columns, lines)


if __name__ == "__main__":
    main()
