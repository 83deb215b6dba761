"""Windows of 4,096 tokens from object storage, shuffled: windows a second, and what each costs in processor time.

    headrace      hr.tokens over http, one raw file: `.shuffle()`; "-0": without workers; "-global": each read by itself
                  "-packed": documents of some 600 tokens, packed into sequences of as many tokens, as they lie;
                  "-packed-shuffled": the same, shuffled behind
    torch         a Dataset of ranged reads, a kept connection in each worker, torch's DataLoader, shuffle=True
    litdata       its TokensLoader over chunks of the same tokens, copied from a folder of this machine to its cache, as
                  it does with a bucket's; another Python may have it: --litdata-python
    bytes         headrace's Reader alone, which reads the file once by ranges of 4 MiB

All with two workers and batches of 64, each in a process of its own, by turns, over the nginx of `server.py`. CPU is of
the process and its workers, from the first batch on; the server's is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from cpu import cpu_s

WINDOW, BATCH, WORKERS, CHUNKS = 4096, 64, 2, 4
EOS, DOCUMENT = 50_000, 600
NAMES = (
    "bytes", "headrace", "headrace-0", "headrace-global", "headrace-packed", "headrace-packed-shuffled", "torch",
    "litdata",
)  # fmt: skip


def write(folder: Path, windows: int) -> None:
    """The tokens as one raw file, and as LitData's chunks."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, EOS, windows * WINDOW, np.uint16)
    tokens[random.random(len(tokens)) < 1 / DOCUMENT] = EOS
    tokens.tofile(folder / "train.bin")
    (folder / "lit").mkdir()
    said = []
    for k, part in enumerate(np.split(tokens, CHUNKS)):
        name = f"chunk-0-{k}.bin"
        data = struct.pack("<III", 1, 12, 12 + part.nbytes) + part.tobytes()
        (folder / "lit" / name).write_bytes(data)
        said.append({"chunk_bytes": len(data), "chunk_size": 1, "dim": len(part), "filename": name})
    config = {
        "chunk_bytes": len(tokens) * 2 // CHUNKS + 12, "chunk_size": None, "compression": None, "encryption": None,
        "data_format": ["no_header_tensor:20"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "item_loader": "TokensLoader",
    }  # fmt: skip
    (folder / "lit/index.json").write_text(json.dumps({"chunks": said, "config": config, "updated_at": "0"}))


def headrace(url: str, folder: Path, by: str = "auto", workers: int = WORKERS) -> Iterable[Any]:
    import headrace as hr

    return hr.DataLoader(hr.tokens(url, "uint16", WINDOW).shuffle(by), batch_size=BATCH, num_workers=workers)  # type: ignore[arg-type]


def packed(url: str, *, is_shuffled: bool) -> Iterable[Any]:
    import headrace as hr

    data = hr.tokens(url, "uint16", 2**20, eos=EOS, documents="separate", tail="short")
    data = data.pack(WINDOW, tokens="tokens", document_ids=False)
    return hr.DataLoader(data.shuffle() if is_shuffled else data, batch_size=BATCH, num_workers=WORKERS)


class Ranges:
    """A data set of torch's: one request for each window."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.path, self.connection = parts.netloc, parts.path, None
        connection = http.client.HTTPConnection(self.host)
        connection.request("HEAD", self.path)
        self.count = int(connection.getresponse().headers["content-length"]) // (2 * WINDOW)
        connection.close()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        import torch

        self.connection = connection = self.connection or http.client.HTTPConnection(self.host)
        start = number * 2 * WINDOW
        connection.request("GET", self.path, headers={"range": f"bytes={start}-{start + 2 * WINDOW - 1}"})
        return torch.from_numpy(np.frombuffer(bytearray(connection.getresponse().read()), np.uint16))


def with_torch(url: str, folder: Path) -> Iterable[Any]:
    import torch

    return torch.utils.data.DataLoader(Ranges(url), BATCH, shuffle=True, num_workers=WORKERS)  # type: ignore[arg-type]


def litdata(url: str, folder: Path) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.resolver import Dir

    place = Dir(path=tempfile.mkdtemp(dir=folder), url=f"local:{folder}/lit")
    data = StreamingDataset(place, item_loader=TokensLoader(WINDOW), shuffle=True)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS)


def reader(url: str, folder: Path) -> Iterable[Any]:
    import asyncio

    from headrace.fetch import Reader
    from headrace.options import Fetch

    async def all_of_it() -> None:
        room = memoryview(bytearray(4 * 2**20))
        async with Reader(Fetch(), concurrency=8) as one:
            at, size = 0, 1
            while at < size:
                span = await one.read_into(url, at, room)
                at, size = span.stop, span.size

    yield None
    asyncio.run(all_of_it())


WAYS: dict[str, Callable[[str, Path], Iterable[Any]]] = {
    "headrace": headrace,
    "headrace-0": lambda url, folder: headrace(url, folder, workers=0),
    "headrace-global": lambda url, folder: headrace(url, folder, "global"),
    "headrace-packed": lambda url, folder: packed(url, is_shuffled=False),
    "headrace-packed-shuffled": lambda url, folder: packed(url, is_shuffled=True),
    "torch": with_torch,
    "litdata": litdata,
    "bytes": reader,
}


def contestant(name: str, url: str, folder: Path, windows: int) -> dict[str, float]:
    """One epoch; at most a quarter of it where each window is a request."""
    batches = WAYS[name](url, folder)
    seen, most = 0, windows // 4 if name in ("torch", "headrace-global") else windows
    cpu, began, first = 0.0, 0.0, 0
    for batch in batches:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        seen += 0 if tokens is None else len(tokens)
        if not began:
            cpu, began, first = cpu_s(), time.perf_counter(), seen
        if seen >= most:
            break  # its workers still live, and are counted
    count = windows if name == "bytes" else seen - first
    return {"rate": count / (time.perf_counter() - began), "cost_us": (cpu_s() - cpu) / count * 1e6}


def run(args: argparse.Namespace, name: str, url: str, folder: Path) -> tuple[float, float]:
    """(windows a second, microseconds of CPU a window), in a process of its own."""
    python = args.litdata_python if name == "litdata" else sys.executable
    told = [python, __file__, "--contestant", name, "--url", url, "--folder", folder, "--windows", args.windows]
    out = subprocess.run(list(map(str, told)), capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(f"{name}: {out.stderr[-2000:]}")
    said = json.loads(out.stdout.strip().splitlines()[-1])
    return said["rate"], said["cost_us"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", default="d0", help="before each answer, as server.lua has it")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--litdata-python", default=sys.executable)
    for name in ("contestant", "url", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        print(json.dumps(contestant(args.contestant, args.url, Path(args.folder), args.windows)))
        return
    from server import Server

    folder = Path(tempfile.mkdtemp(prefix="tokens-"))
    try:
        folder.chmod(0o755)
        write(folder, args.windows)
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
        with Server(folder) as server:
            for _ in range(args.rounds):
                for name in args.only:
                    results[name].append(run(args, name, f"{server.url}/{args.delay}/train.bin", folder))
        for name, some in results.items():
            rates, costs = zip(*some, strict=True)
            print(f"{name:24} {median(rates):9.0f} windows/s   {median(costs):8.1f} us CPU a window")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
