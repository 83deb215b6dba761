"""Seconds until a loader raises the first error, as a multiple of what one read may take.

A server accepts every connection and never answers. A read is given up after `--timeout-s` without a byte, in one
attempt. Nothing can come before the first sample's error, so that it should be raised after about one such time,
whatever the size of the batch, and however few reads may be under way at once.

    shards   one tar shard a sample, unshuffled
    files    one object a sample, hr.files
    own      an AsyncDataset whose aget reads an object

"times" is the time from `iter` to the error, divided by the time-out: 1.0 is the least that is possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import rounds
import tables
from fresh import Row
from server import NoServer

import headrace as hr
from headrace.testing import FaultServer

SAMPLES = 512


class Own(hr.AsyncDataset):
    """An object for each number."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return SAMPLES

    async def aget(self, index: int) -> Any:
        return await hr.read(f"{self.url}/{index:04}.tar")


DATA: dict[str, Callable[[str], Any]] = {
    "shards": lambda url: hr.stream(f"{url}/{{0000..{SAMPLES - 1:04}}}.tar"),
    "files": lambda url: hr.files(f"{url}/{{0000..{SAMPLES - 1:04}}}.tar"),
    "own": Own,
}


def main() -> None:
    """Measure, then print the table."""
    line = rounds.parser(__doc__)
    line.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    line.add_argument("--batch-size", nargs="+", type=int, default=[1, 64])
    line.add_argument("--reads", nargs="+", type=int, default=[8, 128], help="under way at once")
    line.add_argument("--timeout-s", type=float, default=1.0)
    options = rounds.parse(line, first_error)
    jobs = [
        {"data": name, "batch_size": size, "reads": reads, "timeout_s": options.timeout_s}
        for name in options.data
        for size in options.batch_size
        for reads in options.reads
    ]
    print("\n" + report(rounds.rows_of(__file__, jobs, options, NoServer(), limit_s=300)))


def first_error(job: Row) -> Iterator[Row]:
    """In the fresh process: wait for the error of the first sample."""
    fetch = hr.Fetch(first_byte_timeout_s=job["timeout_s"], attempts=1)
    with FaultServer({f"{number:04}.tar": bytes(10240) for number in range(SAMPLES)}, faults=["hang"]) as server:
        data = DATA[job["data"]](server.url)
        size, reads = job["batch_size"], job["reads"]
        with hr.DataLoader(data, batch_size=size, fetch=replace(fetch, concurrency=reads)) as loader:
            yield {}
            start = time.perf_counter()
            try:
                next(iter(loader))
            except hr.errors.ReadTimeoutError as error:
                seconds, text = time.perf_counter() - start, str(error)
            else:
                raise RuntimeError("a batch came of a server that never answers")
    if "0000.tar" not in text:
        raise RuntimeError(f"this is not the first sample's error: {text}")
    yield {"times": seconds / job["timeout_s"]}


def report(rows: list[Row]) -> str:
    """A line for each kind of data, batch size and number of reads."""
    lines = [
        [name, str(size), str(reads), rounds.counted(mine), tables.spread((row.get("times") for row in mine), 2)]
        for (name, size, reads), mine in rounds.group(rows, "data", "batch_size", "reads").items()
    ]
    return tables.markdown(["data", "batch size", "reads at once", "runs", "times"], lines)


if __name__ == "__main__":
    main()
