"""Counts and verdicts of loaders in the torch regime."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import headrace as hr

WAYS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "thread"},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "economic": {"num_workers": 2, "economic": True},
}
WAY = pytest.mark.parametrize("way", WAYS)


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int, spent_s: float = 0.0, size: int = 8) -> None:
        self.count, self.spent_s, self.size = count, spent_s, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        spin(self.spent_s)
        return torch.full((self.size,), index)


class Feed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


@pytest.mark.slow
@WAY
def test_batches_and_samples_are_counted_over_all_epochs(way: str) -> None:
    with hr.DataLoader(Numbers(10), batch_size=4, **WAYS[way]) as loader:
        assert loader.bound_by() == "unknown"
        assert "0 samples in 0 batches" in loader.report()
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 10
        deliver = loader.stats().deliver
        assert (deliver.batches, deliver.samples) == (6, 20)
        assert deliver.first_wait_s > 0 and deliver.wait_s > 0 and deliver.trainer_s > 0
        assert "20 samples in 6 batches" in loader.report()
    assert loader.stats().deliver.samples == 20, "also once it is closed"


@pytest.mark.parametrize("size", [8, 4096])
def test_bytes_from_workers_are_counted(size: int) -> None:
    with hr.DataLoader(Numbers(8, size=size), batch_size=4, num_workers=1) as loader:
        list(loader)
        nbytes = loader.stats().deliver.bytes
    assert 8 * 8 * size <= nbytes <= 8 * 8 * size + 4096


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "batch_size", "batches"), [(lambda: Numbers(10), None, 10), (Feed, 5, 2)], ids=["unbatched", "iterable"]
)
def test_samples_of_unbatched_and_iterable_data_are_counted(
    data: Any, batch_size: int | None, batches: int, num_workers: int
) -> None:
    with hr.DataLoader(data(), batch_size, num_workers=num_workers) as loader:
        list(loader)
        assert (loader.stats().deliver.batches, loader.stats().deliver.samples) == (batches, 10)


@pytest.fixture(scope="module")
def ready_fork_server() -> None:
    """The start of the fork server, and what it imports for these data sets, is no part of what is measured."""
    with hr.DataLoader(Numbers(4), num_workers=1) as loader:
        list(loader)


def run(samples: int, spent_s: float = 0.0, **options: Any) -> tuple[Any, str, str]:
    """Statistics, report and verdict of an epoch; of a longer one where workers took most of it to stand ready."""
    while True:
        with hr.DataLoader(Numbers(samples, spent_s), batch_size=4, **options) as loader:
            list(loader)
            stats = loader.stats()
            if stats.deliver.active_s > 4 * (stats.start_s + stats.deliver.first_wait_s):
                return stats, loader.report(), loader.bound_by()
        samples *= 2


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    spin(0.04)
    return torch.stack(samples)


@pytest.mark.slow
@pytest.mark.usefixtures("ready_fork_server")
@pytest.mark.parametrize("way", [name for name in WAYS if name != "economic"])
def test_a_slow_data_set_is_named(way: str) -> None:
    stats, report, bound_by = run(200, 0.005, **WAYS[way])
    assert stats.work.busy_s["Numbers.__getitem__"] >= 200 * 0.005
    assert bound_by == "work", report
    assert "most of it in Numbers.__getitem__" in report


@pytest.mark.slow
@pytest.mark.usefixtures("ready_fork_server")
@pytest.mark.parametrize("way", [name for name in WAYS if name != "economic"])
def test_a_slow_collate_function_is_named(way: str) -> None:
    stats, report, bound_by = run(200, collate_fn=slow_collate, **WAYS[way])
    assert stats.work.busy_s["collate"] >= 50 * 0.04
    assert bound_by == "collate", report


@pytest.mark.slow
@WAY
def test_a_slow_trainer_is_named(way: str) -> None:
    with hr.DataLoader(Numbers(40), batch_size=1, **WAYS[way]) as loader:
        for _ in loader:
            spin(0.05)
        assert loader.bound_by() == "trainer", loader.report()


class Beginning:
    """Keeps a worker busy for some seconds before it is ready."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _: int) -> None:
        spin(self.seconds)


@pytest.mark.slow
@pytest.mark.usefixtures("ready_fork_server")
def test_the_start_of_workers_is_named() -> None:
    seconds = 1.0
    while True:  # on a busy machine all else may take longer
        with hr.DataLoader(Numbers(40), batch_size=4, num_workers=1, worker_init_fn=Beginning(seconds)) as loader:
            list(loader)
            stats, report = loader.stats(), loader.report()
        assert stats.work.busy_s["start"] >= seconds
        if stats.start_s > 0.5 * stats.deliver.active_s:
            break
        seconds *= 2
    assert "The start of the workers is the limit so far" in report


def test_async_for_is_counted_too() -> None:
    async def run(loader: Any) -> None:
        async for _ in loader:
            await asyncio.sleep(0.01)

    for num_workers in (0, 1):
        with hr.DataLoader(Numbers(12), batch_size=4, num_workers=num_workers) as loader:
            asyncio.run(run(loader))
            assert (loader.stats().deliver.batches, loader.stats().deliver.samples) == (3, 12)
            assert loader.stats().deliver.trainer_s >= 0.02


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_deaths_are_counted() -> None:
    with hr.DataLoader(Numbers(40), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        assert len(list(iterator)) == 9
        del iterator
        assert loader.stats().work.deaths == 1
        assert "1 workers ended and were replaced" in loader.report()


def test_error_in_the_place_of_a_batch_has_no_samples() -> None:
    def fail(samples: list[torch.Tensor]) -> Any:
        if int(samples[0][0]) == 4:
            raise ValueError("bad")
        return samples

    for num_workers in (0, 1):
        with hr.DataLoader(Numbers(12), batch_size=4, num_workers=num_workers, collate_fn=fail) as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.raises(ValueError, match="bad"):
                next(iterator)
            next(iterator)
            assert loader.stats().deliver.samples == 8
