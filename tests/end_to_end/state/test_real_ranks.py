"""Ranks that are processes get, byte for byte, what a single one gets, with any workers and reads."""

import asyncio
import os

import pytest
from end_to_end.state import sources
from end_to_end.state.sources import Places
from gloo import ranks_of

import headrace as hr

RANK = """
import hashlib
import torch.distributed as dist
import headrace as hr
from end_to_end.state.sources import Seen

def main(settings, urls, index):
    dist.init_process_group("gloo")

    def loader_of(concurrency="auto", **options):
        data = hr.stream(urls, index=index).shuffle("window", window=40).map(Seen(with_torch=True))
        fetch, ranks = hr.Fetch(range_bytes=4096, concurrency=concurrency), hr.Ranks(global_batch_size=12)
        return hr.DataLoader(data, ranks=ranks, fetch=fetch, timeout=50, **options)

    def digests(batch, with_torch):  # without workers, torch's own random numbers are the trainer's
        columns = [batch[name].numpy() for name in sorted(batch) if with_torch or name != "torch"]
        return [hashlib.sha256(b"".join(value.tobytes() for value in row)).hexdigest() for row in zip(*columns)]

    found = {}
    for workers, concurrency in settings:
        with loader_of(concurrency, num_workers=workers) as loader:
            found[f"{workers} {concurrency}"] = [[digests(batch, workers > 0) for batch in loader] for _ in range(2)]
    if dist.get_world_size() > 1:
        with loader_of(seed=int(dist.get_rank() == 1)) as loader:
            try:
                next(iter(loader))
            except hr.StateMismatchError as error:
                found["refused"] = str(error)
    dist.destroy_process_group()
    return found
"""
IS_LONG = int(os.environ.get("HEADRACE_RESUMES", "60")) > 60
WORLDS = (2, 3) if IS_LONG else (3,)
SETTINGS = [(0, 1), (0, 64), (1, 1), (1, 64), (4, 1), (4, 64)] if IS_LONG else [(0, 64), (1, 64), (4, 1)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_batches_are_those_of_a_single_rank_byte_for_byte_with_any_workers_and_reads(places: Places) -> None:
    """Over HTTP, with torch's process group; random numbers too."""
    written = places.write([40, 3, 0, 60, 25], size=300)
    index = places.server.add("ranks.hri", asyncio.run(hr.read(written.index)))
    arguments = [SETTINGS, written.urls[sources.TAR], index]
    (alone,) = ranks_of(1, RANK, arguments)
    first, second = alone["0 64"]
    assert len({digest for batch in first for digest in batch}) == written.total
    assert first != second
    assert alone["1 64"] != alone["0 64"]  # with torch's random numbers
    for workers, concurrency in SETTINGS:
        assert alone[f"{workers} {concurrency}"] == alone["1 64" if workers else "0 64"]
    for world in WORLDS:
        ranks = ranks_of(world, RANK, arguments)
        for workers, concurrency in SETTINGS:
            expected = alone["1 64" if workers else "0 64"]
            for number in range(2):
                steps = zip(*(rank[f"{workers} {concurrency}"][number] for rank in ranks), strict=True)
                found = [[digest for batch in step for digest in batch] for step in steps]
                assert found == expected[number], f"{world} ranks, {workers} workers, {concurrency} reads"
        assert all("1" in rank["refused"] for rank in ranks)  # the last loader of one rank has another seed
