"""What it costs to bring batches from two workers to the trainer: `transport.py --case images numbers --runs 5`.

    images     64 samples of [3, 224, 224] float32, the default collate_fn (W5 of run.py, without labels)
    collated   the same with a collate_fn of the user's, which returns a tensor
    numbers    256 samples, each a Python int, the default collate_fn

Samples are made in the workers and cost next to nothing. "limit" is W5's: two processes that make the samples, and
copy each once to its place in a batch that is used again; it hands nothing over. An epoch starts with `iter`, so the
start of two workers is in it; the rate after the first batch is without.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import drop_ins
import limits
import rounds
import tables
import torch
from fresh import Row
from local_samples import Images, Numbers, stacked
from torch.utils.data import Dataset
from workloads import W5

LOADERS = (*drop_ins.LOADERS, "limit")
WORKERS = 2


@dataclass(frozen=True)
class Case:
    """One kind of sample and batch."""

    dataset: Callable[[int], Dataset[Any]]
    batch: int
    batches: int
    collate: Callable[[list[Any]], Any] | None = None


CASES = {
    "images": Case(Images, 64, 300),
    "collated": Case(Images, 64, 300, stacked),
    "numbers": Case(Numbers, 256, 8000),
}


def main() -> None:
    """Measure, then print the tables."""
    parser = drop_ins.parser(__doc__, LOADERS)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of batches in an epoch")
    options = drop_ins.parse(parser, one_epoch)
    rows = drop_ins.rows_of(__file__, jobs(options), options)
    print("\n" + report(rows))


def jobs(options: argparse.Namespace) -> list[Row]:
    """What is run in each round; the limit of both kinds of images is the same, and is run once."""
    chosen = [(case, name) for case in options.case for name in options.loader if name != "limit"]
    if "limit" in options.loader and set(options.case) & {"images", "collated"}:
        chosen.append(("images", "limit"))
    return [{"loader": name, "case": case, "batches": batches(case, options.scale)} for case, name in chosen]


def batches(case: str, scale: float) -> int:
    """Batches in an epoch; of one alone there is no rate after the first."""
    return max(2, int(scale * CASES[case].batches))


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: one epoch, checked."""
    case = CASES[job["case"]]
    samples = case.batch * job["batches"]
    if job["loader"] == "limit":
        loader = limit(samples)
        next(loader)
    else:
        options: dict[str, Any] = {"collate_fn": case.collate} if case.collate else {}
        if job["loader"] == "economic":
            options["prefetch_factor"] = (
                2 * WORKERS
            )  # as many batches under way as torch's default of 2 for each worker
        loader = drop_ins.make(
            job["loader"], case.dataset(samples), batch_size=case.batch, num_workers=WORKERS, **options
        )
        drop_ins.warm_up(job["loader"])
    yield {}
    total = count = 0
    first = None
    start = time.perf_counter()
    for batch in loader:
        if job["loader"] != "limit":
            flat = batch.view(len(batch), -1)
            flat.view(-1)[:: 4096 // flat.element_size()].sum()  # touch every page, as a copy to the device would
            total += int(flat[:, 0].sum(dtype=torch.float64))
            count += len(batch)
            first = first or time.perf_counter()
    end = time.perf_counter()
    row = {"seconds": end - start, "samples": samples, "rate": samples / (end - start)}
    if first is None:
        yield row | {"later_rate": row["rate"]}
        return
    if (count, total) != (samples, samples * (samples - 1) // 2):
        raise SystemExit(f"a wrong epoch: {count} samples of {samples}, sum {total}")
    yield row | {"first_batch_s": first - start, "later_rate": (samples - case.batch) / (end - first)}


def limit(samples: int) -> Iterator[Any]:
    """The limit's epoch, after a first, empty value: then it is prepared."""
    work = dataclasses.replace(W5, samples=samples)
    parameters = limits.VARIANTS["place-2p"]
    limits.prepare(work, parameters)
    yield None
    yield from limits.run(work, parameters)


def report(rows: list[Row]) -> str:
    """A line for each case and loader."""
    groups = rounds.group(rows, "case", "loader")
    lines = []
    for (case, loader), mine in groups.items():
        good = [row for row in mine if "rate" in row]
        cells = [case, loader, rounds.counted(mine)]
        for name in ("rate", "later_rate"):
            cells.append(tables.spread(row[name] for row in good))
            cells.append(tables.spread(rounds.ratios(mine, groups.get((case, "torch"), []), name), 2))
            limits_of_case = groups.get(("images", "limit"), []) if case != "numbers" else []
            cells.append(tables.spread(rounds.ratios(mine, limits_of_case, name), 2))
        cells.append(tables.spread((1e3 * row["cpu_s"] / row["samples"] for row in good), 4))
        foreign = tables.spread((row["foreign_cores"] for row in good), 2)
        lines.append([*cells, foreign])
    columns = ["case", "loader", "runs", "samples/s", "of torch's", "of the limit", "after the first batch"]
    return tables.markdown([*columns, "of torch's", "of the limit", "CPU s/1000 samples", "foreign CPU, cores"], lines)


if __name__ == "__main__":
    main()
