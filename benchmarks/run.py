"""Loaders beside each other on the same work: `run.py --workload W2 W4 --contestant headrace torch_dl --runs 5`.

Each run is one epoch in a fresh process. The contestants take turns, and the machine's limit is one of them. The table
at the end has the medians with the spread; ratios are taken within each round. `--report FILE` makes it again from
JSON lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median

import contestants
import data
import fresh
import rounds
import tables
from fresh import Row
from server import Server
from workloads import WORKLOADS

QUIET_CORES = 0.15
"""CPU used by others during a run, in cores, above which the run does not count (where quieter ones exist)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or report."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestant", nargs="+", choices=contestants.NAMES, default=list(contestants.NAMES))
    parser.add_argument("--variant", nargs="+", help="only these, also such as are not run by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of samples in an epoch")
    options = rounds.parse(parser, one_epoch, arguments)
    wanted = jobs(options)
    buckets = {WORKLOADS[job["workload"]].bucket for job in wanted} - {""}
    if "wds" in buckets:  # the sizes of its samples are looked up there
        buckets.add("images")
    rows = rounds.rows_of(__file__, wanted, options, Server(data.DATA, lambda: data.ensure(*sorted(buckets))))
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
            job = {"workload": workload, "contestant": name, "scale": options.scale}
            chosen += [job | {"variant": variant} for variant in variants if default]
    return chosen


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: one epoch of one contestant, checked."""
    work = WORKLOADS[job["workload"]].scaled(job["scale"])
    contestant = contestants.load(job["contestant"])
    parameters = contestant.VARIANTS[job["variant"]]
    contestants.prepare(contestant, work, parameters)
    yield {}
    samples = label_sum = batches = 0
    first = None
    cpu = time.process_time()
    start = time.perf_counter()
    for tensor, labels in contestant.run(work, parameters):
        tensor.reshape(-1)[:: 4096 // tensor.element_size()].sum()  # touch every page, as a copy to the device would
        first = first or time.perf_counter()
        samples += len(labels)
        label_sum += int(labels.sum())
        batches += 1
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    if (samples, label_sum) != (work.samples, work.label_sum()):
        raise SystemExit(f"a wrong epoch: {samples} samples of {work.samples}, sum of labels {label_sum}")
    yield {
        "seconds": end - start,
        "first_batch_s": (first or end) - start if batches > 1 else None,
        "samples": samples,
        "rate": samples / (end - start),
        "megabytes_s": work.payload_bytes() / (end - start) / 1e6,
        "trainer_us": 1e6 * cpu / samples,
        "versions": fresh.versions(contestant.PACKAGES),
    }


def report(rows: list[Row]) -> str:
    """Tables of all workloads, the fastest contestant first."""
    found = {name: version for row in rows for name, version in row.get("versions", {}).items()}
    parts = ["Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(found.items())) + "\n"]
    by_workload = rounds.group(rows, "workload")
    for work in WORKLOADS.values():
        if mine := by_workload.get((work.name,)):
            samples = max((row["samples"] for row in mine if "samples" in row), default=0)
            parts.append(f"## {work.name}: {work.about} (batch {work.batch}, {samples} samples)\n")
            parts.append(table(mine, work.base, by_workload.get((work.base,), [])))
    return "\n".join(parts)


def table(rows: list[Row], base: str, base_rows: list[Row]) -> str:
    """One workload's table, with each contestant's rate beside its own in the workload `base`."""
    limits = [row for row in rows if row["contestant"] == "limit" and row["variant"] != "copy"]
    at_base = rounds.group(base_rows, "contestant", "variant")
    lines: list[tuple[float, list[str]]] = []
    for (contestant, variant), group in rounds.group(rows, "contestant", "variant").items():
        good = [row for row in group if "rate" in row]
        counted = [row for row in good if row["foreign_cores"] < QUIET_CORES] or good
        head = [f"{contestant} {variant}", f"{len(counted)} of {len(group)}"]
        if not counted:
            lines.append((0.0, [*head, rounds.counted(group)]))
            continue
        cells = [
            *head,
            tables.spread(row["rate"] for row in counted),
            tables.spread(rounds.ratios(counted, limits, "rate"), 2),
            *(
                [tables.spread(rounds.ratios(counted, at_base.get((contestant, variant), []), "rate"), 2)]
                if base
                else []
            ),
            f"{median(row['megabytes_s'] for row in counted):.1f}",
            tables.spread((row["first_batch_s"] for row in counted), 2),
            tables.spread((1e3 * row["cpu_s"] / row["samples"] for row in counted), 3),
            tables.spread(row.get("trainer_us") for row in counted),
            tables.spread((row["requests"] / row["samples"] for row in counted), 3),
            tables.spread(row["peak_pss"] / 2**20 for row in counted),
            str(max(row["peak_processes"] for row in counted)),
            f"{median(row['foreign_cores'] for row in counted):.2f}",
        ]
        lines.append((median(row["rate"] for row in counted), cells))
    columns = ["contestant", "runs", "samples/s", "of the limit", *([f"of {base}"] if base else []), "MB/s"]
    columns += ["first batch, s", "CPU ms/sample", "of it the trainer, µs", "requests/sample"]
    columns += ["peak memory, MiB", "processes", "foreign CPU, cores"]
    return tables.markdown(columns, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])


if __name__ == "__main__":
    main()
