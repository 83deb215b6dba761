"""Time to the first batch of W2 with two workers, cold and warm, and what it consists of: `first_batch.py --runs 5`.

Cold: nothing of headrace has run before; its fork server starts and imports torch. Warm: the fork server is there. The
clock starts before the data set is declared and stops with the first batch in hand; `import headrace` is not in it. The
parts are measured one by one, each from outside and alone: in the loader some of them overlap. What the loader's own
`stats()` gives in seconds is in the JSON lines.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import contestants
import data
import rounds
import tables
from fresh import Row
from server import Server
from workloads import W2, tar_samples

WORKERS = 2
CONTESTANTS = {"cold": ("headrace", True), "warm": ("headrace", False), "torch_dl": ("torch_dl", False)}
PARTS = {
    "helper_s": "the fork server, with its import of torch",
    "workers_s": "two workers forked, and one batch of four numbers through them",
    "range_s": "the first range of the first shard",
    "scan_s": "finding 64 samples in it (Python's tarfile)",
    "decode_s": "decoding 64 samples (half the time of one process: there are two workers)",
}


def main() -> None:
    """Measure, then print both tables."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--start", nargs="+", choices=[*CONTESTANTS, "parts"], default=[*CONTESTANTS, "parts"])
    options = rounds.parse(parser, one_start)
    jobs = [{"start": start} for start in options.start]
    server = Server(data.DATA, lambda: data.ensure("wds"))
    print("\n" + report(rounds.rows_of(__file__, jobs, options, server)))


def one_start(job: Row) -> Iterator[Row]:
    """In the fresh process: one first batch, or the parts."""
    if job["start"] == "parts":
        headrace = importlib.import_module("contestants.headrace")
        options = importlib.import_module("headrace").Fetch()
        yield {}
        yield parts(headrace.warm_up, options.range_bytes)
        return
    name, cold = CONTESTANTS[job["start"]]
    contestant = contestants.load(name)
    parameters = {"num_workers": WORKERS} | ({"cold": True} if cold else {})
    contestants.prepare(contestant, W2, parameters)
    yield {}
    start = time.perf_counter()
    loader = contestant.run(W2, parameters)
    built = time.perf_counter()
    batches = iter(loader)
    started = time.perf_counter()
    next(batches)
    end = time.perf_counter()
    row = {
        "first_batch_s": end - start,
        "construct_s": built - start,
        "iter_s": started - built,
        "next_s": end - started,
    }
    yield row | {"stats": seconds_in(loader.stats() if hasattr(loader, "stats") else {})}


def parts(warm_up: Callable[[int], object], range_bytes: int) -> Row:
    """Each part of a first batch, alone."""
    row: Row = {}
    start = time.perf_counter()
    first = warm_up(WORKERS)
    with_helper_s = time.perf_counter() - start
    start = time.perf_counter()
    second = warm_up(WORKERS)
    row["workers_s"] = time.perf_counter() - start
    row["helper_s"] = with_helper_s - row["workers_s"]
    del first, second
    request = urllib.request.Request(W2.url(W2.shards()[0]), headers={"Range": f"bytes=0-{range_bytes - 1}"})
    start = time.perf_counter()
    with urllib.request.urlopen(request) as body:
        body.read()
    row["range_s"] = time.perf_counter() - start
    shard = io.BytesIO((data.DATA / W2.bucket / W2.shards()[0]).read_bytes())
    start = time.perf_counter()
    samples = first_samples(shard, W2.batch)
    row["scan_s"] = time.perf_counter() - start
    W2.apply(samples[0])
    start = time.perf_counter()
    for sample in samples:
        W2.apply(sample)
    row["decode_s"] = (time.perf_counter() - start) / WORKERS
    return row


def first_samples(shard: io.BytesIO, count: int) -> list[bytes]:
    """The bodies of the first samples of a shard."""
    bodies: list[bytes] = []
    with tarfile.open(fileobj=shard) as tar:
        members = ((member.name, shard.getbuffer()[member.offset_data :][: member.size]) for member in tar)
        for body, _ in tar_samples(members):
            bodies.append(bytes(body))
            if len(bodies) == count:
                break
    return bodies


def seconds_in(stats: Any, prefix: str = "") -> dict[str, float]:
    """Every number named `…_s` in a snapshot of statistics, whatever its shape."""
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        stats = dataclasses.asdict(stats)
    found: dict[str, float] = {}
    if isinstance(stats, Mapping):
        for name, value in stats.items():
            if isinstance(value, int | float) and str(name).endswith("_s"):
                found[f"{prefix}{name}"] = float(value)
            else:
                found |= seconds_in(value, f"{prefix}{name}.")
    return found


def report(rows: list[Row]) -> str:
    """The first batches, then the parts."""
    lines = []
    for start in CONTESTANTS:
        mine = [row for row in rows if row["start"] == start]
        good = [row for row in mine if "first_batch_s" in row]
        if good:
            spreads = [
                tables.spread((row[n] for row in good), 3) for n in ("first_batch_s", "construct_s", "iter_s", "next_s")
            ]
            lines.append([start, str(len(good)), *spreads])
        elif mine:
            lines.append([start, rounds.counted(mine)])
    columns = ["start", "runs", "first batch, s", "DataLoader(), s", "iter(), s", "next(), s"]
    text = tables.markdown(columns, lines)
    alone = [row for row in rows if row["start"] == "parts"]
    if good := [row for row in alone if "helper_s" in row]:
        cells = [[about, tables.spread((row[name] for row in good), 3)] for name, about in PARTS.items()]
        text += "\n" + tables.markdown(["part, alone", "s"], cells)
    elif alone:
        text += f"\nThe parts failed: {tables.last_line(alone[-1]['error'])}\n"
    return text


if __name__ == "__main__":
    main()
