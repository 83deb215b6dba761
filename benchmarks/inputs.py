"""Samples of filtered streams, which have no numbers: alone, and as one of five inputs of a mixture.

    mixture  `hr.mix` of five filtered streams, in batches of 32
    single   one filtered stream, sample by sample
    batches  the same in batches of 32

Time per sample from the first batch on, and CPU time per sample of the trainer's process, starting included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import tables

import headrace as hr


def work(n: int) -> dict[str, int]:
    return {"n": n, "sum": sum(range(200)) * n % 7}


def is_kept(sample: dict[str, int]) -> bool:
    return sample["n"] % 4 != 0


def filtered(count: int) -> hr.Stream:
    return hr.from_map(range(count)).map(work).filter(is_kept)


def mixture(count: int) -> hr.Stream:
    names = [f"input {k}" for k in range(5)]
    return hr.mix({name: filtered(count) for name in names}, {name: k + 1 for k, name in enumerate(names)})


Shape = tuple[Callable[[int], hr.Stream], int | None]
SHAPES: dict[str, Shape] = {"mixture": (mixture, 32), "single": (filtered, None), "batches": (filtered, 32)}


def measure(shape: str, count: int, workers: int) -> tuple[float, float]:
    """Return microseconds per sample: time, and CPU time."""
    make, batch_size = SHAPES[shape]
    cpu = time.process_time()
    with hr.DataLoader(make(count), batch_size=batch_size, num_workers=workers, seed=1) as loader:
        batches = iter(loader)
        next(batches)
        samples, began = 0, time.perf_counter()
        for batch in batches:
            samples += len(batch["n"]) if batch_size else 1
        seconds = time.perf_counter() - began
    return seconds / samples * 1e6, (time.process_time() - cpu) / samples * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6000, help="samples of each input before its filter")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for workers in (0, 2):
            times, cpus = zip(*(measure(shape, args.count, workers) for _ in range(args.runs)), strict=True)
            rows.append((shape, str(workers), tables.spread(times), tables.spread(cpus)))
    print(tables.markdown(("shape", "workers", "us", "us of CPU"), rows))


if __name__ == "__main__":
    main()
