"""Counts and verdicts of loaders in the torch regime."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders.numbers import spin
from drop_in.acting import Made, read_all
from drop_in.stateful_data import Stream

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


class Numbers(Made):
    """Tensors of `size` numbers, each made in `spent_s` seconds of CPU time."""

    def __init__(self, count: int, spent_s: float = 0.0, size: int = 8) -> None:
        super().__init__(partial(torch.full, (size,)), count)
        self.spent_s = spent_s

    def __getitem__(self, index: int) -> torch.Tensor:
        spin(self.spent_s)
        return super().__getitem__(index)


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


def fail_at_4(samples: list[torch.Tensor]) -> Any:
    if int(samples[0][0]) == 4:
        raise ValueError("bad")
    return samples


COUNTED: dict[str, tuple[Callable[[], Any], dict[str, Any], int, int]] = {  # data, options, batches, samples
    "unbatched": (lambda: Numbers(10), {"batch_size": None}, 10, 10),
    "iterable": (lambda: Stream(10), {"batch_size": 5}, 2, 10),
    "error in place of a batch": (lambda: Numbers(12), {"batch_size": 4, "collate_fn": fail_at_4}, 3, 8),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", COUNTED)
def test_samples_of_all_kinds_are_counted(kind: str, num_workers: int) -> None:
    make, options, batches, samples = COUNTED[kind]
    with hr.DataLoader(make(), num_workers=num_workers, **options) as loader:
        assert len(read_all(iter(loader))) == batches
        assert loader.stats().deliver.samples == samples
        assert "error" in kind or loader.stats().deliver.batches == batches


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


# What is slow, and its name, the seconds that it takes at least, the verdict and a text of the report.
SLOW: dict[str, tuple[dict[str, Any], str, float, str, str]] = {
    "data set": (
        {"spent_s": 0.005},
        *("Numbers.__getitem__", 200 * 0.005, "work", "most of it in Numbers.__getitem__"),
    ),
    "collate function": ({"collate_fn": slow_collate}, "collate", 50 * 0.04, "collate", ""),
}


@pytest.mark.slow
@pytest.mark.usefixtures("ready_fork_server")
@pytest.mark.parametrize("way", [name for name in WAYS if name != "economic"])
@pytest.mark.parametrize("slow", SLOW)
def test_slow_function_of_the_user_is_named(slow: str, way: str) -> None:
    options, name, least_s, verdict, text = SLOW[slow]
    stats, report, bound_by = run(200, **options, **WAYS[way])
    assert stats.work.busy_s[name] >= least_s
    assert bound_by == verdict, report
    assert text in report


@pytest.mark.slow
@WAY
def test_a_slow_trainer_is_named(way: str) -> None:
    with hr.DataLoader(Numbers(40), batch_size=1, **WAYS[way]) as loader:
        for _ in loader:
            spin(0.05)
        assert loader.bound_by() == "trainer", loader.report()


def begin(seconds: float, _: int) -> None:
    """Keep a worker busy before it is ready."""
    spin(seconds)


@pytest.mark.slow
@pytest.mark.usefixtures("ready_fork_server")
def test_the_start_of_workers_is_named() -> None:
    seconds = 1.0
    while True:  # on a busy machine all else may take longer
        with hr.DataLoader(Numbers(40), batch_size=4, num_workers=1, worker_init_fn=partial(begin, seconds)) as loader:
            list(loader)
            stats, report = loader.stats(), loader.report()
        assert stats.work.busy_s["start"] >= seconds
        if stats.start_s > 0.5 * stats.deliver.active_s:
            break
        seconds *= 2
    assert "The start of the workers is the limit so far" in report


@pytest.mark.parametrize("num_workers", [0, 1])
def test_async_for_is_counted_too(num_workers: int) -> None:
    async def run(loader: Any) -> None:
        async for _ in loader:
            await asyncio.sleep(0.01)

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
