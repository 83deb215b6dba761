"""Samples a second and CPU time per sample of sources with operators after them, to find combinations that are slow.

Each source has two local shards of 10,000 samples of 700 B, with an index where the format has one. The time of the
first batch is shown apart. CPU time is that of all processes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import tables

import headrace as hr

SAMPLES, TEXT = 20_000, "x" * 700
OTHER = hr.from_map([{"n": n, "text": TEXT} for n in range(SAMPLES)])
SHARES = {"a": 1, "b": 1}
SOURCES: dict[str, dict[str, Any]] = {
    "tar": {"index": "build"},
    "tar.gz": {"index": "build"},
    "jsonl.gz": {"index": None},
    "parquet": {},
}
OPERATORS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "none": lambda data: data,
    "map": lambda data: data.map(same),
    "filter": lambda data: data.filter(always),
    "flat_map": lambda data: data.flat_map(twice),
    "filter, enumerate": lambda data: data.filter(always).enumerate(),
    "batch, unbatch": lambda data: data.batch(10).unbatch(),
    "shuffle": lambda data: data.shuffle(),
    "shuffle global": lambda data: data.shuffle("global"),
    "skip": lambda data: data.skip(100),
    "slice": lambda data: data.slice(0, None, 7),
    "repeat, epoch": lambda data: data.repeat().epoch(samples=SAMPLES),
    "zip": lambda data: data.zip(OTHER, strict=False),
    "concat": lambda data: data.concat(OTHER),
    "mix": lambda data: hr.mix({"a": data, "b": OTHER}, SHARES),
}


def same(sample: Any) -> Any:
    return sample


def always(_: Any) -> bool:
    return True


def twice(sample: Any) -> list[Any]:
    return [sample, sample]


def write(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, part in enumerate((range(SAMPLES // 2), range(SAMPLES // 2, SAMPLES))):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for n in part:
                member = tarfile.TarInfo(f"{n:06d}.txt")
                member.size = len(TEXT)
                archive.addfile(member, io.BytesIO(TEXT.encode()))
        (folder / f"{number}.tar").write_bytes(data.getvalue())
        (folder / f"{number}.tar.gz").write_bytes(gzip.compress(data.getvalue()))
        lines = "".join(json.dumps({"n": n, "text": TEXT}) + "\n" for n in part)
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        pq.write_table(pa.table({"n": part, "text": [TEXT] * len(part)}), folder / f"{number}.parquet")


def cpu_s() -> float:
    trainer = psutil.Process()
    times = [process.cpu_times() for process in (trainer, *trainer.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(data: hr.Stream, workers: int) -> tuple[float, float, float]:
    """Return (samples/s, microseconds of CPU time per sample, seconds to the first batch) of the second epoch."""
    with hr.DataLoader(data, batch_size=32, num_workers=workers, collate_fn=list, seed=1) as loader:
        for _ in loader:
            pass
        before_s, began = cpu_s(), time.perf_counter()
        batches = iter(loader)
        count, first_s = len(next(batches)), time.perf_counter() - began
        count += sum(map(len, batches))
        return count / (time.perf_counter() - began), 1e6 * (cpu_s() - before_s) / count, first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        write(Path(folder))
        for source, name in itertools.product(args.sources, args.operators):
            try:
                data = OPERATORS[name](hr.stream(f"{folder}/*.{source}", **SOURCES[source]))
                runs = [measure(data, args.workers) for _ in range(args.runs)]
            except hr.OptionError:
                continue  # this operator cannot follow this source
            rates, cpu_us, first_s = zip(*runs, strict=True)
            rows.append((source, name, tables.spread(rates), tables.spread(cpu_us), tables.spread(first_s, 3)))
    print(tables.markdown(("source", "operators", "samples/s", "CPU, µs per sample", "first batch, s"), rows))


if __name__ == "__main__":
    main()
