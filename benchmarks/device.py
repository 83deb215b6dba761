"""Batches on a GPU, from two workers or more: `device.py --way torch device --step 0 5 --runs 5`.

    torch       torch's DataLoader with pin_memory=True, and .to(device, non_blocking=True) in the loop
    pinned      the same two lines with headrace's
    device      headrace.DataLoader(device="cuda")
    stream      the same over a stream, whose workers make samples and collate them

A batch is 64 samples of [3, 224, 224] float32 (38.5 MB), made in the workers at next to no cost. `--step` is how long
the GPU works on a batch, in milliseconds. All values of every batch are summed on the GPU, and the sums are checked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import drop_ins
import rounds
import tables
import torch
from fresh import Row
from local_samples import Images

import headrace as hr

BATCH = 64
WAYS = ("torch", "pinned", "device", "stream")


def main() -> None:
    """Measure, then print the table."""
    parser = drop_ins.parser(__doc__)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--step", nargs="+", type=float, default=[0.0, 5.0], help="milliseconds of the GPU's per batch")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=300)
    options = drop_ins.parse(parser, two_epochs)
    print("\n" + report(drop_ins.rows_of(__file__, jobs(options), options)))


def jobs(options: argparse.Namespace) -> list[Row]:
    """Return the jobs of a round."""
    shared = {"workers": options.workers, "batches": options.batches}
    return [{"way": way, "step_ms": step} | shared for step in options.step for way in options.way]


def two_epochs(job: Row) -> Iterator[Row]:
    """In the fresh process: two epochs of persistent workers, of which the second is timed, without its first batch."""
    cycles = _cycles_per_ms() * job["step_ms"]
    loader = _loader(job)
    expected = sum(range(BATCH * job["batches"])) * 3 * 224 * 224
    for is_timed in (False, True):
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        waited = 0.0
        iterator = iter(loader)
        total += _on_device(next(iterator)).sum(dtype=torch.float64)
        torch.cuda.synchronize()
        if is_timed:
            yield {}
        start, cpu = time.perf_counter(), time.process_time()
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                break
            batch = _on_device(batch)
            waited += time.perf_counter() - before
            if cycles:
                torch.cuda._sleep(int(cycles))  # type: ignore[no-untyped-call]
            total += batch.sum(dtype=torch.float64)
        torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if int(total) != expected:
            raise SystemExit(f"a wrong epoch: {int(total)} instead of {expected}")
    timed = job["batches"] - 1
    yield {"batch_ms": 1e3 * seconds / timed, "wait_ms": 1e3 * waited / timed, "trainer_cpu_ms": 1e3 * cpu / timed}


def report(rows: list[Row]) -> str:
    """A line for each step and way."""
    groups = rounds.group(rows, "step_ms", "way")
    lines = []
    for (step, way), mine in groups.items():
        good = [row for row in mine if "batch_ms" in row]
        names = ("batch_ms", "wait_ms", "trainer_cpu_ms")
        cells = [str(step), way, rounds.counted(mine)]
        cells += [tables.spread((row[name] for row in good), 2) for name in names]
        lines.append([*cells, tables.spread(rounds.ratios(mine, groups.get((step, "torch"), []), "batch_ms"), 2)])
    columns = ["step, ms", "loader", "runs", "ms/batch", "in next and .to, ms", "CPU of the trainer, ms"]
    return tables.markdown([*columns, "time, of torch's"], lines)


def _loader(job: Row) -> Any:
    samples = BATCH * job["batches"]
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": job["workers"]}
    if job["way"] == "stream":
        return hr.DataLoader(Keys(samples).map(_image), device="cuda", **options)
    options["persistent_workers"] = True
    if job["way"] == "device":
        return hr.DataLoader(Images(samples), device="cuda", **options)
    loader_class = torch.utils.data.DataLoader if job["way"] == "torch" else hr.DataLoader
    return loader_class(Images(samples), pin_memory=True, **options)


class Keys(hr.AsyncDataset):
    """The key is the sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    async def aget(self, key: int) -> int:
        return key


def _image(index: int) -> torch.Tensor:
    return torch.empty(3, 224, 224).fill_(index)


def _on_device(batch: torch.Tensor) -> torch.Tensor:
    return batch.to("cuda", non_blocking=True)  # nothing, if it is there


def _cycles_per_ms() -> float:
    """How long the GPU sleeps: its clock is not what `_sleep` counts on every card."""
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return 200_000.0 / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
