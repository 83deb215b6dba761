"""Loaders beside each other on the same work: `run.py --workload W2 W4 --contestant headrace torch_dl --runs 5`.

Each run is one epoch in a fresh process. The contestants take turns, and the machine's limit is one of them. The table
at the end has the medians with the spread; ratios are taken within each round. `--report FILE` makes it again from
JSON lines.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import contestants
import data
import fresh
import tables
from fresh import Row
from server import Server
from workloads import WORKLOADS

QUIET_CORES = 0.15
"""CPU used by others during a run, in cores, above which the run does not count (where quieter ones exist)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestant", nargs="+", choices=contestants.NAMES, default=list(contestants.NAMES))
    parser.add_argument("--variant", nargs="+", help="only these, also such as are not run by default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing: tables of the runs in FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        fresh.answer(one_epoch, options.child)
        return
    rows = tables.read(options.report) if options.report else measure_all(jobs(options), options.runs, options.json)
    print("\n" + report(rows))


def jobs(options: argparse.Namespace) -> list[Row]:
    """What is run in each round."""
    chosen: list[Row] = []
    for workload in options.workload:
        for name in options.contestant:
            try:
                contestant = contestants.load(name)
            except ImportError as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            default = contestant.WORKLOADS.get(workload, [])
            variants = [v for v in contestant.VARIANTS if v in options.variant] if options.variant else default
            chosen += [{"workload": workload, "contestant": name, "variant": v} for v in variants if default]
    return chosen


def measure_all(round_of_jobs: list[Row], runs: int, json_file: Path | None) -> list[Row]:
    """All jobs, `runs` times, in turns; the machine is held for one round at a time."""
    data.ensure(*{WORKLOADS[job["workload"]].bucket for job in round_of_jobs} - {""})
    if any(WORKLOADS[job["workload"]].field == "jpg" for job in round_of_jobs):
        data.ensure("images")
    rows: list[Row] = []
    session = time.strftime("%FT%T")
    with Server(data.DATA) as server:
        for number in range(runs):
            with fresh.machine():
                for job in round_of_jobs:
                    row = fresh.measure(__file__, job | {"session": session, "round": number}, server)
                    rows.append(row)
                    tables.append(json_file, row)
                    print(one_line(row), flush=True)
    return rows


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: one epoch of one contestant, checked."""
    work = WORKLOADS[job["workload"]]
    contestant = contestants.load(job["contestant"])
    parameters = contestant.VARIANTS[job["variant"]]
    contestants.prepare(contestant, work, parameters)
    yield {}
    samples = label_sum = batches = 0
    first = None
    start = time.perf_counter()
    for tensor, labels in contestant.run(work, parameters):
        tensor.reshape(-1)[:: 4096 // tensor.element_size()].sum()  # touch every page, as a copy to the device would
        first = first or time.perf_counter()
        samples += len(labels)
        label_sum += int(labels.sum())
        batches += 1
    end = time.perf_counter()
    if (samples, label_sum) != (work.samples, work.label_sum()):
        raise SystemExit(f"a wrong epoch: {samples} samples of {work.samples}, sum of labels {label_sum}")
    yield {
        "seconds": end - start,
        "first_batch_s": (first or end) - start if batches > 1 else None,
        "samples": samples,
        "rate": samples / (end - start),
        "megabytes_s": work.payload_bytes() / (end - start) / 1e6,
        "versions": fresh.versions(contestant.PACKAGES),
    }


def one_line(row: Row) -> str:
    """A run, as it is told when it has ended."""
    head = f"{row['round']:2} {row['workload']:3} {row['contestant'] + ' ' + row['variant']:20}"
    if "error" in row:
        return f"{head} FAILED {row['error'][-500:]}"
    return (
        f"{head} {row['rate']:9.0f}/s  first batch {row['first_batch_s'] or 0:5.2f} s"
        f"  {row['peak_pss'] / 2**20:5.0f} MiB"
        f"  cpu {1e3 * row['cpu_s'] / row['samples']:6.3f} ms/sample  foreign {row['foreign_cores']:.2f}"
    )


def report(rows: list[Row]) -> str:
    """Tables of all workloads, the fastest contestant first."""
    found = {name: version for row in rows for name, version in row.get("versions", {}).items()}
    parts = ["Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(found.items())) + "\n"]
    for work in WORKLOADS.values():
        mine = [row for row in rows if row["workload"] == work.name]
        if mine:
            parts.append(f"## {work.name}: {work.about} (batch {work.batch}, {work.samples} samples)\n")
            parts.append(table(mine))
    return "\n".join(parts)


def table(rows: list[Row]) -> str:
    """One workload's table."""
    two_processes = (row for row in rows if row["contestant"] == "limit" and row["variant"].endswith("2p"))
    limits = {_round(row): row["rate"] for row in two_processes if "rate" in row}
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["contestant"], row["variant"]].append(row)
    lines: list[tuple[float, list[str]]] = []
    for (contestant, variant), group in groups.items():
        good = [row for row in group if "rate" in row]
        counted = [row for row in good if row["foreign_cores"] < QUIET_CORES] or good
        if not counted:
            failed = f"failed: {tables.last_line(group[-1]['error'])}"
            lines.append((0.0, [f"{contestant} {variant}", f"0 of {len(group)}", failed] + [""] * 7))
            continue
        ratios = [row["rate"] / limits[_round(row)] for row in counted if _round(row) in limits]
        cells = [
            f"{contestant} {variant}",
            f"{len(counted)} of {len(group)}",
            tables.spread(row["rate"] for row in counted),
            tables.spread(ratios, 2),
            f"{median(row['megabytes_s'] for row in counted):.1f}",
            tables.spread((row["first_batch_s"] for row in counted), 2),
            tables.spread((1e3 * row["cpu_s"] / row["samples"] for row in counted), 3),
            tables.spread(row["peak_pss"] / 2**20 for row in counted),
            str(max(row["peak_processes"] for row in counted)),
            f"{median(row['foreign_cores'] for row in counted):.2f}",
        ]
        lines.append((median(row["rate"] for row in counted), cells))
    columns = ["contestant", "runs", "samples/s", "of the limit", "MB/s", "first batch, s", "CPU ms/sample"]
    columns += ["peak memory, MiB", "processes", "foreign CPU, cores"]
    return tables.markdown(columns, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])


def _round(row: Row) -> tuple[Any, Any]:
    return row["session"], row["round"]


if __name__ == "__main__":
    main()
