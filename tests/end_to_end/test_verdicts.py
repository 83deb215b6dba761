"""Planted bottlenecks, and the report names each. A profiler sees the waiting for batches."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from builders.numbers import Made, Numbers, spin
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset

import headrace as hr

pytestmark = pytest.mark.usefixtures("ready_fork_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def tensor(key: int) -> torch.Tensor:
    return torch.full((256,), float(key))


async def waits(key: int) -> torch.Tensor:
    await asyncio.sleep(0.02)
    return tensor(key)


async def computes(key: int) -> torch.Tensor:
    await asyncio.sleep(0)
    spin(0.004)
    await asyncio.sleep(0)
    return tensor(key)


async def sleeps(key: int) -> torch.Tensor:
    time.sleep(0.004)  # noqa: ASYNC251 (the mistake that is to be found)
    return tensor(key)


class GetsMany(Made):
    async def aget_many(self, keys: Sequence[int]) -> list[torch.Tensor]:
        spin(0.004 * len(keys))
        return list(map(tensor, keys))


class Feed(hr.AsyncIterableDataset):
    async def aiter(self) -> AsyncIterator[torch.Tensor]:
        for number in range(200):
            spin(0.004)
            await asyncio.sleep(0)
            yield tensor(number)


@pytest.fixture(scope="module")
def ready_fork_server(warm_server: None) -> None:
    """The start of the fork server is no part of what is measured."""
    with hr.DataLoader(Made(tensor, 4), num_workers=1) as loader:
        list(loader)


def slow_decode(sample: torch.Tensor) -> torch.Tensor:
    spin(0.004)
    return sample


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    spin(0.02)
    return torch.stack(samples)


BOUND: dict[str, tuple[Callable[[int], Any], dict[str, Any], list[str]]] = {
    "fetch": (
        lambda _: Made(waits, 160),
        {"fetch": hr.Fetch(concurrency=4)},
        ["Reading is the limit", "hr.Fetch(concurrency=)"],
    ),
    "work": (lambda workers: Made(tensor, 200 * workers).map(slow_decode), {}, ["most of it in map(slow_decode)"]),
    "collate": (lambda workers: Made(tensor, 160 * workers), {"collate_fn": slow_collate}, ["Collating is the limit"]),
    "trainer": (lambda _: Made(tensor, 120), {"trainer_s": 0.03}, ["The trainer is the limit"]),
}


def run(data: Any, trainer_s: float = 0.0, **options: Any) -> tuple[str, str]:
    with hr.DataLoader(data, batch_size=4, **options) as loader:
        assert loader.bound_by() == "unknown"
        while True:
            for _ in loader:
                spin(trainer_s)
            stats = loader.stats()
            if stats.deliver.active_s > 4 * stats.start_s:  # on a busy machine workers may stand ready after the rest
                break
        return loader.bound_by(), loader.report()


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("limit", BOUND)
def test_slowest_part_is_named(limit: str, num_workers: int) -> None:
    data, options, texts = BOUND[limit]
    bound_by, report = run(data(max(1, num_workers)), num_workers=num_workers, **options)
    assert bound_by == limit, report
    assert all(text in report for text in texts), report


class Counter(AsyncIterator[int]):
    def __init__(self) -> None:
        self.number = 0

    async def __anext__(self) -> int:
        if self.number == 200:
            raise StopAsyncIteration
        spin(0.004)
        self.number += 1
        return self.number


class Counts(hr.AsyncIterableDataset):
    def aiter(self) -> Counter:
        return Counter()


async def slow_step(sample: torch.Tensor) -> torch.Tensor:
    spin(0.004)
    return sample


def light(sample: torch.Tensor) -> torch.Tensor:
    return sample + 1


async def slow_after(sample: torch.Tensor) -> torch.Tensor:
    return await slow_step(sample)


ON_THE_LOOP: dict[str, Any] = {
    "Made.aget": Made(computes, 200).map(light),
    "Made.aget, asleep": Made(sleeps, 200).map(light),
    "GetsMany.aget_many": GetsMany(tensor, 200).map(light),
    "Feed.aiter": Feed(),
    "Counts.aiter": Counts(),
    "map(slow_step)": Made(tensor, 200).map(slow_step).map(light),
    "map(slow_after)": Made(tensor, 200).map(light).map(slow_after),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("name", ON_THE_LOOP)
def test_coroutine_that_blocks_the_loop_is_named_with_its_milliseconds(name: str, num_workers: int) -> None:
    bound_by, report = run(ON_THE_LOOP[name], num_workers=num_workers)
    assert bound_by == "loop", report
    start = f"Your coroutine {name.partition(',')[0]} is the limit: it holds the event loop "
    found = re.search(re.escape(start) + r"([\d.]+) ms a call", report)
    assert found is not None, report
    assert float(found[1]) >= 4
    assert ".map(a plain function)" in report


class Plain:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        spin(0.004)
        return torch.full((256,), float(index))


class Lines:
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (Plain()[index] for index in range(200))


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("name", ["Plain.__getitem__", "Lines.__next__"])
def test_synchronous_data_that_computes_in_threads_is_named(name: str, num_workers: int) -> None:
    data = hr.from_map(Plain(), threads=1) if name.startswith("Plain") else hr.from_iterable(Lines())
    with hr.DataLoader(data.map(light), batch_size=4, num_workers=num_workers) as loader:
        for _ in range(2):
            list(loader)
        stats, report, bound_by = loader.stats(), loader.report(), loader.bound_by()
    found = stats.fetch.functions[name]
    assert (found.where, found.calls) == ("threads", 400)
    assert found.seconds >= 400 * 0.004
    assert f"{name} computes in threads" in report
    if found.seconds > 0.6 * stats.deliver.active_s:  # else other programs have had the processors
        assert bound_by == "loop", report
        assert f"Your {name} is the limit: it computes" in report


@pytest.mark.slow
def test_time_of_a_coroutine_excludes_its_reads(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(bytes(20_000_000))

    async def reads(key: int) -> torch.Tensor:
        body = await hr.read(str(tmp_path / "body"))
        spin(0.002)
        return torch.tensor([len(body)])

    with hr.DataLoader(Made(reads, 60), batch_size=4) as loader:
        list(loader)
        found = loader.stats().fetch.functions["Made.aget"]
    assert (found.where, found.calls) == ("loop", 60)
    assert found.seconds >= 60 * 0.002


def test_stages_are_counted() -> None:
    with hr.DataLoader(Made(tensor, 40).map(slow_decode), batch_size=4) as loader:
        batches = list(loader)
        stats = loader.stats()
    assert len(batches) == stats.deliver.batches == 10
    assert stats.deliver.samples == 40
    assert stats.work.busy_s["map(slow_decode)"] >= 40 * 0.004
    assert stats.work.workers == 1
    assert stats.work.deaths == 0
    assert stats.started_s is not None
    assert stats.epoch == 1


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def profiled(batches: Iterable[object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        for _ in batches:
            torch.ones(2).sum()
    return {event.key: event.count for event in running.key_averages()}


class MyLoader(hr.DataLoader):  # type: ignore[type-arg]
    pass


@pytest.mark.slow
def test_each_wait_is_an_event_of_the_profile_with_the_name_of_the_class() -> None:
    for kind in (hr.DataLoader, MyLoader):
        with kind(Numbers(8), batch_size=2) as loader:
            assert profiled(loader)[f"enumerate(DataLoader)#{kind.__name__}.__next__"] == 5  # four batches and the end
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert name in profiled(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))


def test_nothing_is_recorded_while_nobody_profiles() -> None:
    with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError):
        for data in (Numbers(8), torch.arange(8), Counted()):
            with hr.DataLoader(data, batch_size=2) as loader:
                assert len(list(loader)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_torchs_data_sets_are_events_too(workers: int) -> None:
    with hr.DataLoader(torch.arange(8), batch_size=2, num_workers=workers) as loader:
        events = profiled(loader)
    assert [count for name, count in events.items() if name.startswith("enumerate(DataLoader)#")] == [5]
