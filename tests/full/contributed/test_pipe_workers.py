"""An executor that shares no memory, written as one would who is not of the project."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.tars import tar
from full.contributed.pipe_workers import PipeExecutor

import headrace as hr
from headrace.testing import ExecutorContract
from headrace.workers.executor import Executor


@pytest.fixture(scope="module", autouse=True)
def process_that_workers_are_forked_from() -> Iterator[None]:
    """Python keeps it for the life of the interpreter, and what follows its shared memory."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()


class TestPipes(ExecutorContract):
    def open_executor(self, count: int) -> Executor:
        return PipeExecutor()


class Numbers(hr.AsyncDataset):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    async def aget(self, key: int) -> Any:
        return {"n": key, "pixels": np.full((4, 4), key % 256, np.uint8), "name": str(key)}


def labelled(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["n"] % 50 == 7:
        raise ValueError("bad")
    return {**sample, "draw": int(hr.rng().integers(1 << 30))}


def kept(sample: dict[str, Any]) -> bool:
    return bool(sample["n"] % 3)


def itself(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def lengths(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), len(sample["txt"])


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def told(loader: Any) -> list[str]:
    torch.set_printoptions(threshold=100_000)
    return [str(batch) for batch in loader]


@pytest.mark.parametrize("collate", [None, as_list])
def test_loader_gives_the_same_batches_with_workers_that_copy(collate: Any) -> None:
    data = Numbers(120).shuffle().map(labelled).filter(kept)
    options: dict[str, Any] = {"batch_size": 8, "on_error": "skip", "seed": 3, "collate_fn": collate}
    with hr.DataLoader(data, num_workers=0, **options) as loader:
        wanted = [told(loader), told(loader)]
    with hr.DataLoader(data, num_workers=2, workers=PipeExecutor(), **options) as loader:
        assert [told(loader), told(loader)] == wanted
        assert loader.stats().skipped == 2 * 3


def test_loader_reads_shards_with_workers_that_copy(tmp_path: Path) -> None:
    for shard in range(3):
        samples = [(f"{shard}{k:02}", {"cls": b"%d" % k, "txt": b"x" * k}) for k in range(20)]
        (tmp_path / f"{shard}.tar").write_bytes(tar(samples))
    data = hr.stream([str(tmp_path / f"{shard}.tar") for shard in range(3)]).map(lengths)
    with hr.DataLoader(data, num_workers=2, workers=PipeExecutor(), batch_size=7, memory_budget="64MiB") as loader:
        got = [pair for batch in loader for pair in zip(*(column.tolist() for column in batch), strict=True)]
    assert got == [(k, k) for _ in range(3) for k in range(20)]


def test_work_of_a_worker_that_was_killed_is_done_again() -> None:
    executor = PipeExecutor()
    with hr.DataLoader(Numbers(400).map(itself), batch_size=4, num_workers=2, workers=executor) as loader:
        got = []
        for number, batch in enumerate(loader):
            got += batch["n"].tolist()
            if number == 3:
                executor.workers[0].die()
        assert got == list(range(400))
        assert loader.stats().work.deaths == 1


def test_what_workers_cannot_share_is_refused_by_name() -> None:
    shared = torch.zeros(3).share_memory_()
    data = Numbers(4).map(lambda sample: sample["n"] + shared[0])
    with (
        hr.DataLoader(data, num_workers=1, workers=PipeExecutor()) as loader,
        pytest.raises(hr.errors.CannotCarryError, match="share nothing"),
    ):
        list(loader)


def test_executor_is_refused_where_it_would_start_nothing() -> None:
    with pytest.raises(hr.OptionError, match="needs num_workers above 0"):
        hr.DataLoader(Numbers(4), workers=PipeExecutor())
    with pytest.raises(hr.OptionError, match="from_map"):
        hr.DataLoader([1, 2], num_workers=1, workers=PipeExecutor())
    with pytest.raises(hr.OptionError, match="or an executor"):
        hr.DataLoader(Numbers(4), num_workers=1, workers=object())  # type: ignore[arg-type]
