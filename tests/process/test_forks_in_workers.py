"""Functions of the user's that fork in a worker: a process that returns from one a second time answers nothing."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.acting import Made
from process.waiting import is_running, wait_until
from torch.utils.data import IterableDataset

import headrace as hr

COUNT = 24


def forked(folder: Path, ending: Callable[[], Any] | None = None) -> bool:
    """Fork; whether this is the child, whose id is a file's name in the folder by now."""
    child = os.fork()
    if child == 0:
        Path(folder, str(os.getpid())).touch()
        if ending is not None:
            ending()
    return child == 0


def forks(folder: Path, size: int = 1, ending: Callable[[], Any] | None = None) -> Made:
    """Samples of a function that returns in the child as well, with another value."""

    def make(index: int) -> Any:
        is_child = index % 5 == 2 and forked(folder, ending)
        return np.full(size, -1 if is_child else index)

    return Made(make, COUNT)


class ForksAsItGoes(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield -1 if index % 5 == 2 and forked(self.folder) else index


def only_originals(batches: Any, folder: Path, children: int = 5) -> None:
    assert [int(torch.as_tensor(sample).flatten()[0]) for batch in batches for sample in batch] == list(range(COUNT))
    wait_until(lambda: len(os.listdir(folder)) == children, "all were forked")
    wait_until(lambda: not any(is_running(int(name)) for name in os.listdir(folder)), "they have ended")


SLOTS = 2000  # numbers in a sample
PLACES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "small samples": (forks, {}),
    "samples in slots": (lambda folder: forks(folder, SLOTS), {}),
    "economic": (forks, {"economic": True}),
    "economic, in slots": (lambda folder: forks(folder, SLOTS), {"economic": True}),
    "iterable": (ForksAsItGoes, {"num_workers": 1}),
    "step": (lambda folder: hr.from_map(range(COUNT)).map(forks(folder).make), {}),
    "step, in slots": (lambda folder: hr.from_map(range(COUNT)).map(forks(folder, SLOTS).make), {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_child_of_a_data_set_or_step_delivers_nothing(place: str, tmp_path: Path) -> None:
    make, options = PLACES[place]
    with hr.DataLoader(make(tmp_path), **{"batch_size": 4, "num_workers": 2, **options}) as loader:
        only_originals(loader, tmp_path)


@pytest.mark.parametrize("make", [lambda: range(COUNT), lambda: hr.from_map(range(COUNT))], ids=["torch", "ours"])
def test_child_of_a_collate_function_delivers_nothing(make: Callable[[], Any], tmp_path: Path) -> None:
    def collate(samples: list[int]) -> list[int]:
        return [-1] * len(samples) if forked(tmp_path) else samples

    with hr.DataLoader(make(), batch_size=4, num_workers=2, collate_fn=collate) as loader:
        only_originals(loader, tmp_path, COUNT // 4)


def leave_with_exception() -> None:
    raise ValueError("of the child")


@pytest.mark.parametrize(
    "ending", [sys.exit, leave_with_exception, partial(os._exit, 0)], ids=["exit", "exception", "end"]
)
def test_child_that_leaves_a_function_otherwise_delivers_nothing(ending: Callable[[], Any], tmp_path: Path) -> None:
    with hr.DataLoader(forks(tmp_path, 1, ending), batch_size=4, num_workers=2) as loader:
        only_originals(loader, tmp_path)
