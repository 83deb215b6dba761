"""Four planted bottlenecks, and the report names each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_helper")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def spin(seconds: float) -> None:
    """Use the CPU of this very thread for so long, whoever else uses the machine."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(hr.AsyncDataset):
    def __init__(self, count: int, wait_s: float = 0.0) -> None:
        self.count, self.wait_s = count, wait_s

    def __len__(self) -> int:
        return self.count

    async def aget(self, key: int) -> torch.Tensor:
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        return torch.full((256,), float(key))


def slow_decode(sample: torch.Tensor) -> torch.Tensor:
    spin(0.004)
    return sample


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    spin(0.02)
    return torch.stack(samples)


def run(data: Any, trainer_s: float = 0.0, **options: Any) -> tuple[str, str]:
    with hr.DataLoader(data, batch_size=4, **options) as loader:
        assert loader.bound_by() == "unknown"
        for _ in loader:
            spin(trainer_s)
        return loader.bound_by(), loader.report()


@WORKERS
def test_a_slow_store_is_named(num_workers: int) -> None:
    bound_by, report = run(Samples(160, wait_s=0.02), fetch_concurrency=4, num_workers=num_workers)
    assert bound_by == "fetch", report
    assert "Reading is the limit" in report
    assert "fetch_concurrency" in report


@WORKERS
def test_a_slow_function_in_workers_is_named(num_workers: int) -> None:
    bound_by, report = run(Samples(200 * max(1, num_workers)).map(slow_decode), num_workers=num_workers)
    assert bound_by == "work", report
    assert "most of it in map(slow_decode)" in report


@WORKERS
def test_a_slow_collate_function_is_named(num_workers: int) -> None:
    bound_by, report = run(Samples(160 * max(1, num_workers)), collate_fn=slow_collate, num_workers=num_workers)
    assert bound_by == "collate", report
    assert "Collating is the limit" in report


@WORKERS
def test_a_slow_trainer_is_named(num_workers: int) -> None:
    bound_by, report = run(Samples(120), trainer_s=0.03, num_workers=num_workers)
    assert bound_by == "trainer", report
    assert "The trainer is the limit" in report


def test_stages_are_counted() -> None:
    with hr.DataLoader(Samples(40).map(slow_decode), batch_size=4) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert len(batches) == stats.deliver.batches == 10
    assert stats.deliver.samples == 40
    assert stats.work.busy_s["map(slow_decode)"] >= 40 * 0.004
    assert stats.work.workers == 1
    assert stats.work.deaths == 0
    assert stats.started_s is not None
    assert stats.epoch == 1
