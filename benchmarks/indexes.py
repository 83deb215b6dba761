"""Indexes of shards: what making one costs, and how a stream of very many shards starts with one.

* "build": `headrace index` of W2's shards (JPEGs of 83 KB and a class) and of W4's (arrays of 1.6 KB and a class), all
  of them and `--headers`: requests, and bytes read beside those of the shards.
* "start": a stream of `--shards` shards with one index file, from the list of their addresses to the first batch of 64:
  seconds, requests, and memory above what the process had before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import data
import rounds
import tables
from fresh import Row
from server import Server, read_stats
from workloads import W2, W4

import headrace as hr
from headrace.cli import main as command
from headrace.formats.index import Entry, ShardIndex, pack_directory
from headrace.formats.tar.scanner import TarScanner

FOLDER = "many"


def main() -> None:
    """Measure, then print the tables."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    options = rounds.parse(parser, one_run)
    jobs: list[Row] = [
        {"case": "build", "workload": name, "headers": only} for name in ("W2", "W4") for only in (False, True)
    ]
    jobs.append({"case": "start", "workload": "W2", "headers": False, "shards": options.shards})
    server = Server(data.DATA, lambda: _make_data(options.shards))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server)))


def one_run(job: Row) -> Iterator[Row]:
    """In the fresh process: one index made, or one start."""
    yield from _build(job) if job["case"] == "build" else _start(job["shards"])


def report(rows: list[Row]) -> str:
    """A table for each case."""
    built = []
    for (workload, headers), mine in rounds.group(rows, "workload", "headers").items():
        good = [row for row in mine if row["case"] == "build" and "seconds" in row]
        if good:
            share = (100 * row["read_bytes"] / row["shard_bytes"] for row in good)
            built.append([
                workload,
                "headers" if headers else "all",
                rounds.counted(good),
                tables.spread(row["requests"] for row in good),
                tables.spread(share, 2),
                tables.spread((row["index_bytes"] / row["members"] for row in good), 2),
                tables.spread((row["seconds"] for row in good), 2),
            ])  # fmt: skip
    starts = [row for row in rows if row["case"] == "start" and "first_batch_s" in row]
    columns = ["shards of", "read", "runs", "requests", "% of the bytes", "index bytes/member", "s"]
    started = [
        tables.spread((row["first_batch_s"] for row in starts), 2),
        tables.spread((row["length_s"] for row in starts), 2),
        tables.spread(row["index_requests"] for row in starts),
        tables.spread((row["peak_pss"] - row["start_pss"]) / 2**20 for row in starts),
    ]
    names = ["first batch, s", "of it to len(data), s", "requests to len(data)", "peak memory above the start, MiB"]
    return tables.markdown(columns, built) + "\n\n" + tables.markdown(names, [started])


def _build(job: Row) -> Iterator[Row]:
    work = {"W2": W2, "W4": W4}[job["workload"]]
    urls = [work.url(shard) for shard in work.shards()]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "shards.hri"
        yield {}
        before, start = _stats(), time.perf_counter()
        assert command(["index", *urls, "--output", str(output), "--quiet", *["--headers"] * job["headers"]]) == 0
        seconds, after = time.perf_counter() - start, _stats()
        yield {
            "seconds": seconds,
            "requests": after["requests"] - before["requests"],
            "read_bytes": after["asked_bytes"] - before["asked_bytes"],
            "shard_bytes": sum((data.DATA / work.bucket / shard).stat().st_size for shard in work.shards()),
            "index_bytes": output.stat().st_size,
            "members": 2 * work.samples,
        }


def _start(shards: int) -> Iterator[Row]:
    base = replace(W2, bucket=FOLDER)
    with hr.DataLoader(hr.stream([base.url("0.tar")], index=None), batch_size=64) as loader:
        next(iter(loader))  # all is imported
    yield {}
    before, start = _stats(), time.perf_counter()
    data_set = hr.stream(base.url(f"{{0..{shards - 1}}}.tar"), index=base.url("index.hri"))
    length = len(data_set)
    length_s, asked = time.perf_counter() - start, _stats()
    with hr.DataLoader(data_set, batch_size=64) as loader:
        batch = next(iter(loader))
        first_batch_s = time.perf_counter() - start
    assert (length, len(batch["__key__"])) == (16 * shards, 64)
    yield {
        "first_batch_s": first_batch_s,
        "length_s": length_s,
        "index_requests": asked["requests"] - before["requests"],
    }


def _make_data(shards: int) -> None:
    """W2's and W4's shards, and a folder of `shards` names of one small shard with their index."""
    data.ensure("images", "wds", "small")
    folder = data.DATA / FOLDER
    if len(list(folder.glob("*.tar"))) != shards:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        small = (data.DATA / "small/00000.tar").read_bytes()[: 16 * 7 * 512] + bytes(1024)  # 7 blocks a sample
        scanner = TarScanner("small")
        rows = scanner.feed(small, 0, last=True)
        assert scanner.error is None
        assert len(rows) == 16
        for number in range(shards):
            name = folder / f"{number}.tar"
            if number % 10_000:
                os.link(folder / f"{number - number % 10_000}.tar", name)  # a file has no more than some names
            else:
                name.write_bytes(small)
        shard = ShardIndex(rows, None, len(small), None)
        block = shard.pack()
        first = Entry.of("0.tar", shard, block)
        assert first.check == zlib.crc32(block)
        entries = [replace(first, name=f"many/{number}.tar") for number in range(shards)]
        with (folder / "index.hri").open("wb") as file:
            file.write(pack_directory(entries))
            file.writelines([block] * shards)


def _stats() -> Row:
    found: Row = read_stats(os.environ["HEADRACE_BENCH_SERVER"])
    return found


if __name__ == "__main__":
    main()
