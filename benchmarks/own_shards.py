"""What LitData and MosaicML Streaming have written, 20 ms away: headrace's reader against their own loaders.

    headrace      `hr.stream`, in order
    litdata-own   LitData's StreamingDataset and StreamingDataLoader, over its chunks
    mosaic        MosaicML's StreamingDataset under torch's DataLoader, over its shards

First epochs, in order, two workers, batches of 256 that are counted and dropped, each in a process of its own, by
turns, with nothing copied to this machine before. CPU is of the process and its workers. The first batch is counted
from before the library is imported; rows/s and CPU behind it are from the first batch on; what is of the epoch has the
start of workers in it, and what was copied before the first batch came. Nothing is decoded on either side: images stay
the bytes that they are.
A library that is not installed is left out: `pip install litdata zstd`, or `mosaicml-streaming`, which exclude each
other in one environment.

python benchmarks/own_shards.py [SHAPE …] [--rounds 3] [--workers 2] [--delay d20]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import s3_peers
from cpu import cpu_s
from parquet import BATCH, SHAPES, measured

KINDS = {
    "short": {"text": "str", "label": "int"},
    "long": {"text": "str", "id": "str"},
    "images": {"image": "bytes", "label": "int"},
}
PEERS = {"litdata-own": s3_peers.litdata, "mosaic": s3_peers.mosaic}


def rows_of(shape: str, count: int) -> Iterator[dict[str, Any]]:
    make, rng = SHAPES[shape][0], np.random.default_rng(0)
    for _ in range(count):
        row = make(rng)
        yield {**row, "image": row["image"]["bytes"]} if shape == "images" else row


def write(peer: str, shape: str, rows: int, folder: Path) -> None:
    if peer == "mosaic":
        s3_peers.write_mosaic(rows_of(shape, rows), KINDS[shape], folder)
    else:
        s3_peers.write_litdata(rows_of(shape, rows), folder)


def headrace(endpoint: str, bucket: str, workers: int, batch: int) -> Iterable[int]:
    import headrace as hr

    data = hr.stream(f"{endpoint}/{bucket}/index.json")
    return hr.DataLoader(data, batch_size=batch, collate_fn=len, num_workers=workers)


def with_first(start: Callable[[], Iterable[int]], rows: int) -> dict[str, float]:
    """What `measured` says of an epoch, and before it what the first batch took."""
    began, used = time.perf_counter(), cpu_s()
    first: list[float] = []

    def watched() -> Iterator[int]:
        for count in batches:
            if not first:
                first.extend((time.perf_counter() - began, cpu_s() - used))
            yield count

    batches = start()
    said = measured(watched(), rows)
    return {"first_s": first[0], "first_cpu_s": first[1], **said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["short", "images"], metavar="SHAPE", help=", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of each shape; by default as many as take some seconds")
    parser.add_argument("--delay", default="d20", help="before each answer, as server.lua has it")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        endpoint, _, bucket = args.url.rpartition("/")
        way = PEERS.get(args.contestant, headrace)
        print(json.dumps(with_first(lambda: way(endpoint, bucket, args.workers, BATCH), args.rows)))
        return
    from server import Server

    heads = f"{'first batch: s':>15} {'CPU s':>6} "
    heads += f"{'rows/s':>9} {'CPU µs a row':>13} {'of the epoch: rows/s':>21} {'CPU':>9} {'requests':>9}"
    print(f"{'shards':12} {'shape':8} {'':12} {heads}")
    with tempfile.TemporaryDirectory(prefix="shards-") as place, Server(Path(place)) as server:
        folder = Path(place)
        folder.chmod(0o755)
        for peer in args.peers:
            if library := s3_peers.missing(peer):
                print(f"{peer}: left out, {library} is not installed", flush=True)
                continue
            for shape in args.shapes:
                bucket = f"{peer}-{shape}"
                rows = args.rows or SHAPES[shape][1]
                write(peer, shape, rows, folder / bucket)
                results: dict[str, list[tuple[float, ...]]] = {"headrace": [], peer: []}
                for _ in range(args.rounds):
                    for name, runs in results.items():
                        server.reset()
                        url = f"{server.url}/{args.delay}/{bucket}"
                        told = [sys.executable, __file__, shape, "--contestant", name, "--url", url]
                        told += ["--workers", str(args.workers), "--rows", str(rows)]
                        out = subprocess.run(
                            told, stdout=subprocess.PIPE, text=True, check=True,
                            env={**os.environ, "BENCH_SCRATCH": tempfile.mkdtemp(dir=place)},
                        )  # fmt: skip
                        said = json.loads(out.stdout.splitlines()[-1])
                        runs.append((*said.values(), server.stats()["requests"]))
                for name, runs in results.items():
                    first, first_cpu, rate, cost, epoch, whole, requests = map(median, zip(*runs, strict=True))
                    row = f"{first:15.2f} {first_cpu:6.2f} {rate:9.0f} {cost:13.1f} {epoch:21.0f} "
                    row += f"{whole:9.1f} {requests:9.0f}"
                    print(f"{peer:12} {shape:8} {name:12} {row}", flush=True)


if __name__ == "__main__":
    main()
