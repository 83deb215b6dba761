"""Samples one by one: what one costs when a shard has ever more of them. A flat line is the promise.

    one by one      for sample in hr.stream(shard): batch_size=None
    batches of one  hr.DataLoader(hr.stream(shard), batch_size=1)
    filtered        the same behind a filter that keeps every sample
    batches of 64   hr.DataLoader(hr.stream(shard), batch_size=64), in lists
    lines           as the first, of lines of JSON
    lines, 64       as batches of 64, of lines of JSON
    webdataset      for sample in webdataset.WebDataset(shard)

The shard is a local tar file of samples of two fields, 64 bytes and one digit; or a file of lines of JSON of 1 KB.
There are no workers, so that everything is in the process that trains. "cpu" is what that took from `iter` to the end
of the epoch, all threads, in microseconds a sample; beside it stands the same as a multiple of the smallest shard's in
the same round, and, where they are measured too, of that of batches of 64.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import rounds
import tables
from fresh import Row
from server import NoServer

import headrace as hr

SIZES = (1_000, 4_000, 16_000, 100_000)


def one_by_one(shard: str) -> Iterable[Any]:
    """A stream that is iterated by itself."""
    return hr.DataLoader(hr.stream(shard), batch_size=None)


def batches_of_one(shard: str) -> Iterable[Any]:
    """Batches that are no larger than a sample."""
    return hr.DataLoader(hr.stream(shard).to_tuple("txt", "cls"), batch_size=1, collate_fn=_first)


def filtered(shard: str) -> Iterable[Any]:
    """As above, where it is not known how many samples there will be."""
    return hr.DataLoader(hr.stream(shard).filter(_is_kept).to_tuple("txt", "cls"), batch_size=1, collate_fn=_first)


def batches_of_64(shard: str) -> Iterable[Any]:
    """The same samples, some together."""
    return hr.DataLoader(hr.stream(shard), batch_size=64, collate_fn=_as_it_is)


def by_webdataset(shard: str) -> Iterable[Any]:
    """Samples of raw fields."""
    import webdataset

    found: Iterable[Any] = webdataset.WebDataset(shard, shardshuffle=False)
    return found


WAYS: dict[str, Callable[[str], Iterable[Any]]] = {
    "one by one": one_by_one,
    "batches of one": batches_of_one,
    "filtered": filtered,
    "batches of 64": batches_of_64,
    "lines": one_by_one,
    "lines, 64": batches_of_64,
    "webdataset": by_webdataset,
}
TOGETHER = {"one by one": "batches of 64", "lines": "lines, 64"}


def main() -> None:
    """Measure, then print the table."""
    line = rounds.parser(__doc__)
    line.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    line.add_argument("--samples", nargs="+", type=int, default=list(SIZES), help="in the shard")
    options = rounds.parse(line, epoch)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shards = {
            (count, are_lines): _write_lines(place, count) if are_lines else _write(place, count)
            for count in options.samples
            for are_lines in {way.startswith("lines") for way in options.way}
        }
        jobs = [
            {"way": way, "samples": count, "shard": str(shards[count, way.startswith("lines")])}
            for way in options.way
            for count in options.samples
        ]
        rows = rounds.rows_of(__file__, jobs, options, NoServer(), limit_s=600)
    print("\n" + report(rows))


def epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: one epoch, of which every sample is counted."""
    samples = WAYS[job["way"]](job["shard"])
    yield {}
    start, start_cpu = time.perf_counter(), time.process_time()
    count = sum(len(one) if type(one) is list else 1 for one in samples)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    if count != job["samples"]:
        raise RuntimeError(f"{count} samples came of {job['samples']}")
    yield {"us": 1e6 * seconds / count, "cpu_us": 1e6 * cpu / count}


def report(rows: list[Row]) -> str:
    """A line for each way and size."""
    lines = []
    for (way, count), mine in rounds.group(rows, "way", "samples").items():
        smallest = min(row["samples"] for row in rows if row["way"] == way)
        base = [row for row in rows if row["way"] == way and row["samples"] == smallest]
        together = [row for row in rows if row["way"] == TOGETHER.get(way) and row["samples"] == count]
        lines.append(
            [
                way,
                f"{count:,}",
                rounds.counted(mine),
                tables.spread(row.get("cpu_us") for row in mine),
                tables.spread(rounds.ratios(mine, base, "cpu_us"), 2),
                tables.spread(rounds.ratios(mine, together, "cpu_us"), 2) if together else "",
                tables.spread(row.get("us") for row in mine),
            ]
        )
    columns = [
        "way",
        "samples in the shard",
        "runs",
        "cpu, µs a sample",
        "of the smallest",
        "of batches of 64",
        "wall, µs a sample",
    ]
    return tables.markdown(columns, lines)


def _first(samples: list[Any]) -> Any:
    return samples[0]


def _is_kept(_: Any) -> bool:
    return True


def _as_it_is(samples: list[Any]) -> Any:
    return samples


def _write_lines(folder: Path, count: int) -> Path:
    path, words = folder / f"{count}.jsonl", random.Random(0)
    with path.open("w") as lines:
        for number in range(count):
            text = " ".join(str(words.random()) for _ in range(48))
            lines.write(json.dumps({"id": number, "text": text, "meta": {"a": 1, "b": [1, 2, 3]}}) + "\n")
    return path


def _write(folder: Path, count: int) -> Path:
    path = folder / f"{count}.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            for suffix, body in (("txt", b"%064d" % number), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:08}.{suffix}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return path


if __name__ == "__main__":
    main()
