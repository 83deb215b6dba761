"""An executor that shares no memory, written as one would who is not of the project."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import loaded
from builders.numbers import Made, Numbers
from builders.tars import tar
from full.contributed.documented import PipeExecutor

import headrace as hr
from headrace.testing import ExecutorContract
from headrace.workers.executor import Executor


@pytest.fixture(autouse=True)
def path_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of other programs find the modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


class TestPipes(ExecutorContract):
    def open_executor(self, count: int) -> Executor:
        return PipeExecutor()


def numbered(key: int) -> dict[str, Any]:
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


def texts(loader: Any) -> list[str]:
    torch.set_printoptions(threshold=100_000)
    return [str(batch) for batch in loader]


@pytest.mark.parametrize("collate", [None, list])
def test_loader_gives_the_same_batches_with_workers_that_copy(collate: Any) -> None:
    data = Made(numbered, 120).shuffle().map(labelled).filter(kept)
    options: dict[str, Any] = {"batch_size": 8, "errors": hr.Skip(), "seed": 3, "collate_fn": collate}
    with hr.DataLoader(data, num_workers=0, **options) as loader:
        wanted = [texts(loader), texts(loader)]
    with hr.DataLoader(data, num_workers=2, workers=PipeExecutor(), **options) as loader:
        assert [texts(loader), texts(loader)] == wanted
        assert loader.stats().skipped == 2 * 3


def test_loader_reads_shards_with_workers_that_copy(tmp_path: Path) -> None:
    paths = [tmp_path / f"{shard}.tar" for shard in range(3)]
    for path in paths:
        path.write_bytes(tar([(f"{path.stem}{k:02}", {"cls": b"%d" % k, "txt": b"x" * k}) for k in range(20)]))
    options: dict[str, Any] = {"num_workers": 2, "workers": PipeExecutor(), "memory_budget": "64MiB"}
    columns = loaded(hr.stream(list(map(str, paths))).map(lengths), batch_size=7, **options)
    got = [pair for batch in columns for pair in zip(*(column.tolist() for column in batch), strict=True)]
    assert got == [(k, k) for _ in range(3) for k in range(20)]


def test_work_of_a_killed_worker_is_repeated() -> None:
    executor = PipeExecutor()
    with hr.DataLoader(Made(numbered, 400).map(itself), batch_size=4, num_workers=2, workers=executor) as loader:
        got = []
        for number, batch in enumerate(loader):
            got += batch["n"].tolist()
            if number == 3:
                executor.links[0].process.kill()
        assert got == list(range(400))
        assert loader.stats().work.deaths == 1


def test_unshareable_data_is_refused_by_name() -> None:
    shared = torch.zeros(3).share_memory_()
    data = Numbers().map(lambda number: number + shared[0])
    with pytest.raises(hr.errors.CannotCarryError, match="share nothing"):
        loaded(data, num_workers=1, workers=PipeExecutor())


REFUSED: list[tuple[Any, int, Any, str]] = [
    (Numbers(), 0, PipeExecutor(), "needs num_workers above 0"),
    ([1, 2], 1, PipeExecutor(), "from_map"),
    (Numbers(), 1, object(), "or an executor"),
]


@pytest.mark.parametrize(("data", "workers", "executor", "text"), REFUSED)
def test_executor_is_refused_where_it_would_start_nothing(data: Any, workers: int, executor: Any, text: str) -> None:
    with pytest.raises(hr.OptionError, match=text):
        hr.DataLoader(data, num_workers=workers, workers=executor)
