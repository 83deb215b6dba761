"""Ranks that are processes get, byte for byte, what a single one gets, whatever they run with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from end_to_end.state import sources
from end_to_end.state.sources import Places

RANK = """
import hashlib, json, sys, warnings
import torch.distributed as dist
warnings.filterwarnings("ignore", "This DataLoader will create")
import headrace as hr
from end_to_end.state.sources import Seen

rank, world, settings, urls, index = json.loads(sys.argv[1])
port = int(sys.stdin.readline()) if rank else 0
store = dist.TCPStore("127.0.0.1", port, world, is_master=not rank, wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

def loader_of(**options):
    data = hr.stream(urls, index=index).shuffle("window", window=40).map(Seen(with_torch=True))
    return hr.DataLoader(data, global_batch_size=12, fetch=hr.FetchOptions(range_bytes=4096), timeout=50, **options)

def digests(batch, with_torch):  # without workers, torch's own random numbers are the trainer's
    columns = [batch[name].numpy() for name in sorted(batch) if with_torch or name != "torch"]
    return [hashlib.sha256(b"".join(value.tobytes() for value in row)).hexdigest() for row in zip(*columns)]

found = {}
for workers, concurrency in settings:
    with loader_of(num_workers=workers, fetch_concurrency=concurrency) as loader:
        found[f"{workers} {concurrency}"] = [[digests(batch, workers > 0) for batch in loader] for _ in range(2)]
if world > 1:
    with loader_of(seed=int(rank == 1)) as loader:
        try:
            next(iter(loader))
        except hr.StateMismatchError as error:
            found["refused"] = str(error)
print(json.dumps(found), flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""
IS_LONG = int(os.environ.get("HEADRACE_RESUMES", "60")) > 60
WORLDS = (1, 2, 3) if IS_LONG else (1, 3)
SETTINGS = [(0, 1), (0, 64), (1, 1), (1, 64), (4, 1), (4, 64)] if IS_LONG else [(0, 64), (1, 64), (4, 1)]
OUTSIDE = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID")


@contextmanager
def rank_of(rank: int, world: int, urls: Sequence[str], index: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, json.dumps([rank, world, SETTINGS, urls, index])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def told_by(world: int, urls: Sequence[str], index: str) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank_of(rank, world, urls, index)) for rank in range(world)]
        port = _line(ranks[0])
        for process in ranks[1:]:
            _say(process, port)
            assert _line(process)
        told = [json.loads(_line(process)) for process in ranks]
        for process in ranks:
            _say(process, "end")
            assert process.wait(20) == 0
        return told


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a rank has ended"
    return line


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.strip() + "\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_batches_are_those_of_a_single_rank_byte_for_byte_with_any_workers_and_reads(places: Places) -> None:
    """Over HTTP, with torch's process group; random numbers too."""
    written = places.write([40, 3, 0, 60, 25], size=300)
    index = places.server.add("ranks.hri", places.index_of(written))
    (alone,) = told_by(1, written.urls[sources.TAR], index)
    first, second = alone["0 64"]
    assert len({digest for batch in first for digest in batch}) == written.total
    assert first != second
    assert alone["1 64"] != alone["0 64"]  # with torch's random numbers
    for world in WORLDS:
        ranks = told_by(world, written.urls[sources.TAR], index) if world > 1 else [alone]
        for workers, concurrency in SETTINGS:
            expected = alone["1 64" if workers else "0 64"]
            for number in range(2):
                steps = zip(*(rank[f"{workers} {concurrency}"][number] for rank in ranks), strict=True)
                found = [[digest for batch in step for digest in batch] for step in steps]
                assert found == expected[number], f"{world} ranks, {workers} workers, {concurrency} reads"
        if world > 1:  # the last loader of one rank has another seed
            assert all("1" in rank["refused"] for rank in ranks)
