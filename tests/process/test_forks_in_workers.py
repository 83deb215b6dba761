"""Functions of the user's that fork in a worker: a process that returns from one a second time answers nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process.waiting import is_running, run_script, wait_until
from torch.utils.data import Dataset, IterableDataset

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


class Forks(Dataset[Any]):
    """Its function returns in the child as well, with another value."""

    def __init__(self, folder: Path, size: int, ending: Callable[[], Any] | None = None) -> None:
        self.folder, self.size, self.ending = folder, size, ending

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        is_child = index % 5 == 2 and forked(self.folder, self.ending)
        return np.full(self.size, -1 if is_child else index)


class ForksAsItGoes(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT):
            yield -1 if index % 5 == 2 and forked(self.folder) else index


def only_originals(batches: Any, folder: Path, children: int = 5) -> None:
    """What the parents gave has come, all of it and nothing else; and of the children none is left."""
    assert [int(torch.as_tensor(sample).flatten()[0]) for batch in batches for sample in batch] == list(range(COUNT))
    wait_until(lambda: len(os.listdir(folder)) == children, "all were forked")
    for name in os.listdir(folder):
        with contextlib.suppress(ChildProcessError):  # those of `from_map` are children of this process
            os.waitpid(int(name), 0)
    wait_until(lambda: not any(is_running(int(name)) for name in os.listdir(folder)), "they have ended")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2000], ids=["small samples", "samples in slots"])
@pytest.mark.parametrize("regime", ["torch", "fork", "economic", "ours"])
def test_child_of_a_function_delivers_nothing(regime: str, size: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fork": {"multiprocessing_context": "fork"}, "economic": {"economic": True}}.get(
        regime, {}
    )
    data: Any = Forks(tmp_path, size)
    with hr.DataLoader(
        hr.from_map(data) if regime == "ours" else data, batch_size=4, num_workers=2, **options
    ) as loader:
        only_originals(loader, tmp_path)


def test_child_of_an_iterable_data_set_delivers_nothing(tmp_path: Path) -> None:
    only_originals(hr.DataLoader(ForksAsItGoes(tmp_path), batch_size=4, num_workers=1), tmp_path)


def test_child_of_a_step_delivers_nothing(tmp_path: Path) -> None:
    def step(x: int) -> int:
        return -1 if x % 5 == 2 and forked(tmp_path) else x

    with hr.DataLoader(hr.from_map(range(COUNT)).map(step), batch_size=4, num_workers=2) as loader:
        only_originals(loader, tmp_path)


@pytest.mark.parametrize("regime", ["torch", "ours"])
def test_child_of_a_collate_function_delivers_nothing(regime: str, tmp_path: Path) -> None:
    def collate(samples: list[int]) -> list[int]:
        return [-1] * len(samples) if forked(tmp_path) else samples

    data: Any = range(COUNT) if regime == "torch" else hr.from_map(range(COUNT))
    with hr.DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate) as loader:
        only_originals(loader, tmp_path, COUNT // 4)


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["torch", "ours"])
def test_child_of_a_function_in_a_thread_delivers_nothing(regime: str, tmp_path: Path) -> None:
    """In a script of its own: to fork it is to fork the trainer."""
    code, out, err = run_script(
        f"""
        from torch.utils.data import Dataset

        class Forks(Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, index):
                return -1 if index == 5 and os.fork() == 0 else index

        data = Forks() if {regime == "torch"} else hr.from_map(Forks())
        with hr.DataLoader(data, batch_size=4, num_workers=2, workers="thread") as loader:
            print([batch.tolist() for batch in loader])
        os.wait()
        """
    )
    assert (code, out) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]\n")
    assert err.count("it ends here, for a worker answers once") == 1


def leave_with_exception() -> None:
    raise ValueError("of the child")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [sys.exit, leave_with_exception], ids=["SystemExit", "an exception"])
@pytest.mark.parametrize("regime", ["torch", "ours"])
def test_child_that_leaves_the_function_otherwise_delivers_nothing(
    regime: str, ending: Callable[[], Any], tmp_path: Path
) -> None:
    data: Any = Forks(tmp_path, 1, ending)
    with hr.DataLoader(hr.from_map(data) if regime == "ours" else data, batch_size=4, num_workers=2) as loader:
        only_originals(loader, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "told"), [("return -1", "has returned from it"), ("1 / 0", "division by zero")])
def test_child_says_which_function_it_has_left(how: str, told: str) -> None:
    code, out, err = run_script(
        f"""
        from torch.utils.data import Dataset

        class Forks(Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, index):
                if index == 5 and os.fork() == 0:
                    {how}
                return index

        print([batch.tolist() for batch in hr.DataLoader(Forks(), batch_size=4, num_workers=2)])
        print([batch.tolist() for batch in hr.DataLoader(hr.from_map(Forks()), batch_size=4, num_workers=2)])
        """
    )
    assert (code, out) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]\n" * 2)
    assert [line.startswith("headrace: a process that was forked in ") for line in err.splitlines()] == [True, True]
    assert "Forks.__getitem__" in err.splitlines()[0], err
    assert err.count(told) == 2


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["torch", "ours"])
def test_child_that_ends_itself_is_nobodys_business(regime: str, tmp_path: Path) -> None:
    data: Any = Forks(tmp_path, 1, lambda: os._exit(0))
    with hr.DataLoader(hr.from_map(data) if regime == "ours" else data, batch_size=4, num_workers=2) as loader:
        only_originals(loader, tmp_path)
