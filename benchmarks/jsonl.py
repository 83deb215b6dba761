"""Lines of JSON of about 1 KB in local files: lines per second, and CPU time of all processes per line.

    headrace          two workers decode, `.map` keeps two numbers of each line, batches of 256 become tensors
    headrace, dicts   the same without `.map`: batches are lists of the decoded lines
    datasets          Hugging Face datasets, streaming, in the trainer's process: decoded lines
    orjson            two processes that decode lines that lie in memory, one by one, and drop them: the limit

Each runs in a process of its own, all in turns; the clock starts with the first batch, so that no start is in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import tables
from cpu import cpu_s
from data import DATA

FILES = 4
BATCH = 256


def ensure(lines: int) -> list[str]:
    """The files, made where they are missing."""
    folder, source = DATA / f"jsonl-{lines}", random.Random(0)
    paths = [folder / f"{k}.jsonl" for k in range(FILES)]
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(5000)]
    for path in paths:
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("w") as file:
            for n in range(lines // FILES):
                row = {"id": n, "text": " ".join(source.choices(words, k=130)), "score": source.random(),
                       "tags": source.choices(words, k=5), "meta": {"lang": "en", "ok": True}}  # fmt: skip
                file.write(json.dumps(row) + "\n")
        path.with_suffix(".part").rename(path)
    return [str(path) for path in paths]


def headrace(paths: list[str], *, is_mapped: bool) -> Iterator[int]:
    """How many lines each batch has."""
    import headrace as hr

    data = hr.stream(paths, index=None)
    if is_mapped:
        data = data.map(lambda line: {"id": line["id"], "length": len(line["text"])}, random=False)
    loader: hr.DataLoader[Any] = hr.DataLoader(
        data, batch_size=BATCH, num_workers=2, collate_fn=None if is_mapped else list
    )
    with loader:
        for batch in loader:
            yield len(batch["id"]) if is_mapped else len(batch)


def datasets(paths: list[str]) -> Iterator[int]:
    """The same of Hugging Face's."""
    from datasets import load_dataset

    lines = iter(load_dataset("json", data_files=paths, split="train", streaming=True))
    while batch := list(islice(lines, BATCH)):
        yield len(batch)


def limit(paths: list[str]) -> tuple[float, float]:
    """(lines per second, CPU time per line) of orjson alone in two processes."""
    ready = multiprocessing.Barrier(3)
    done: Any = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=_decode, args=(paths[k::2], ready, done)) for k in range(2)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    counts, cpu = zip(*(done.get() for _ in workers), strict=True)
    wall = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return sum(counts) / wall, sum(cpu) / sum(counts)


def _decode(paths: list[str], ready: Any, done: Any) -> None:
    import orjson

    lines = [line for path in paths for line in Path(path).read_bytes().splitlines()]
    ready.wait()
    began = time.process_time()
    for line in lines:
        orjson.loads(line)
    done.put((len(lines), time.process_time() - began))


def measured(batches: Iterator[int]) -> tuple[float, float]:
    """(lines per second, CPU time per line), from the first batch to the last but some."""
    next(batches)
    began, cpu, count = time.perf_counter(), cpu_s(), 0
    wall = spent = 0.0
    for lines in batches:
        count += lines
        if count % (40 * BATCH) < BATCH:  # workers end with the epoch, and their time with them
            wall, spent, known = time.perf_counter() - began, cpu_s() - cpu, count
    return known / wall, spent / known


CONTESTANTS = {
    "headrace": lambda paths: measured(headrace(paths, is_mapped=True)),
    "headrace, dicts": lambda paths: measured(headrace(paths, is_mapped=False)),
    "datasets": lambda paths: measured(datasets(paths)),
    "orjson": limit,
}


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep every run as a line of this file")
    parser.add_argument("--report", type=Path, help="make the table from such a file, and measure nothing")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(CONTESTANTS[given.one](ensure(given.lines))))
        return
    results = tables.read(given.report) if given.report else []
    ensure(given.lines)
    for _ in range(0 if given.report else given.runs):
        for name in CONTESTANTS:
            command = [sys.executable, __file__, "--one", name, "--lines", str(given.lines)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            speed, cpu = json.loads(said.splitlines()[-1])
            results.append({"name": name, "lines_per_s": speed, "cpu_us": cpu * 1e6})
            tables.append(given.json, results[-1])
    rows = []
    for name in CONTESTANTS:
        own = [row for row in results if row["name"] == name]
        if own:
            speeds, cpu = [row["lines_per_s"] for row in own], [row["cpu_us"] for row in own]
            rows.append([name, tables.spread(speeds), tables.spread(cpu, 1)])
    print(tables.markdown(["", "lines/s", "CPU µs a line, all processes"], rows))
    print(
        f"{median(len(Path(path).read_bytes()) for path in ensure(given.lines)) * FILES / given.lines:.0f} bytes a line"
    )


if __name__ == "__main__":
    main()
