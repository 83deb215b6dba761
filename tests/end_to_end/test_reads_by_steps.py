"""Reads that steps and other loops make are theirs: no budget of a source that is done with its sample."""

from __future__ import annotations

from typing import Any

import pytest
from builders.numbers import Iterated, Numbers

import headrace as hr
from headrace.fetch.stores import memory

MiB = 2**20
SIZE, COUNT = 3 * MiB, 16

pytestmark = pytest.mark.usefixtures("warm_server")


@pytest.fixture
def urls() -> Any:
    made = [f"memory://steps/{k:02d}.bin" for k in range(COUNT)]
    for k, url in enumerate(made):
        memory.put(url, bytes([k]) * SIZE)
    yield made
    for url in made:
        memory.remove(url)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("filtered", [False, True], ids=["map", "filter"])
def test_a_step_that_reads_neither_locks_up_nor_leaves_a_claim(
    urls: list[str], filtered: bool, num_workers: int
) -> None:
    async def load(number: int) -> int:
        return (await hr.read(urls[number]))[-1]

    async def is_loaded(number: int) -> bool:
        return len(await hr.read(urls[number])) == SIZE

    data = Numbers(COUNT).filter(is_loaded) if filtered else Numbers(COUNT).map(lambda n: n).map(load)
    with hr.DataLoader(data, batch_size=4, num_workers=num_workers, memory_budget=8 * MiB, timeout=30) as loader:
        for _ in range(2):
            assert [int(n) for batch in loader for n in batch] == list(range(COUNT))
        assert loader.stats().fetch.claimed_bytes == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_iterator_of_the_callers_loop_reads_on_that_loop(urls: list[str]) -> None:
    async def feed() -> Any:
        for url in urls:
            yield (await hr.read(url))[0]

    async with hr.DataLoader(Iterated(feed, loop="caller"), batch_size=4, memory_budget=8 * MiB, timeout=30) as loader:
        assert [int(n) async for batch in loader for n in batch] == list(range(COUNT))
        stats = loader.stats().fetch
        assert (stats.claimed_bytes, stats.requests) == (0, 0)
