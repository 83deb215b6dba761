"""Several threads, tasks, iterators and loaders at once."""

import asyncio
from typing import Any

import pytest
from builders.numbers import Made, Numbers
from process.waiting import children_of, wait_until, workers_of

import headrace as hr
from headrace.workers.forkserver.client import ForkServer


def double(x: int) -> int:
    return 2 * x


def numbers(batches: Any) -> list[int]:
    return [x for batch in batches for x in batch.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("threads", "tasks"), [(1, 2), (2, 0), (5, 0)])
def test_threads_and_tasks_on_one_iterator_get_each_batch_once_and_all_end(
    threads: int, tasks: int, workers: int
) -> None:
    """`next` in a thread and `anext` in a task wait on the same channel."""

    async def run(iterator: Any) -> list[list[int]]:
        async def take() -> list[int]:
            return [x async for batch in iterator for x in batch.tolist()]

        async with asyncio.timeout(20):
            in_threads = [asyncio.to_thread(numbers, iterator) for _ in range(threads)]
            return await asyncio.gather(*in_threads, *(take() for _ in range(tasks)))

    with hr.DataLoader(Numbers(2000).map(double), batch_size=4, num_workers=workers) as loader:
        for epoch in range(3):
            parts = asyncio.run(run(iter(loader)))
            assert sorted(x for part in parts for x in part) == list(range(0, 4000, 2))
            assert all(part == sorted(part) for part in parts)
            assert loader.epoch == epoch + 1


def test_iterator_that_nobody_reads_does_not_stop_another() -> None:
    with hr.DataLoader(Numbers(200).map(double), batch_size=4, num_workers=2, memory_budget="1MiB") as loader:
        idle = [iter(loader) for _ in range(3)]
        next(idle[0])
        assert numbers(loader) == list(range(0, 400, 2))
        assert numbers(idle[1]) == list(range(0, 400, 2))
        assert numbers(idle[0]) == list(range(8, 400, 2))


def test_loaders_share_one_fork_server_and_keep_to_themselves() -> None:
    with (
        hr.DataLoader(Numbers(300).map(double), batch_size=4, num_workers=2) as one,
        hr.DataLoader(Made(lambda k: 1000 + k, 300), batch_size=4, num_workers=1) as two,
    ):
        mixed = [(a.tolist(), b.tolist()) for a, b in zip(one, two, strict=True)]
        assert [x for a, _ in mixed for x in a] == list(range(0, 600, 2))
        assert [x for _, b in mixed for x in b] == list(range(1000, 1300))
        fork_server = ForkServer._shared
        assert fork_server is not None
        assert set(workers_of(one) + workers_of(two)) <= set(children_of(fork_server.process.pid))
        one.close()
        wait_until(lambda: len(children_of(fork_server.process.pid)) == 1, "only the other loader's worker is left")
        assert numbers(two) == list(range(1000, 1300))


def test_sync_loop_works_inside_a_running_event_loop() -> None:
    async def run(loader: Any) -> list[int]:
        return numbers(loader)

    with hr.DataLoader(Numbers(80).map(double), batch_size=4, num_workers=2) as loader:
        assert asyncio.run(run(loader)) == list(range(0, 160, 2))
