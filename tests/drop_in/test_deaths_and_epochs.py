"""Persistent workers that have died: an epoch of theirs may fail, and the next one has workers again."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drop_in.acting import batches_of
from drop_in.reading import read_all
from process.waiting import is_running, wait_until
from torch.utils.data import Dataset, IterableDataset

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")


class Dies(Dataset[int]):
    """Ends each process in which it begins, as long as a file is there."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __len__(self) -> int:
        return 16

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, index: int) -> int:
        return index


class Counts(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_later_epochs_have_workers_when_they_died_before_their_first_batch(tmp_path: Path) -> None:
    flag = tmp_path / "dies"
    flag.touch()
    loader = hr.DataLoader(Dies(flag), batch_size=4, num_workers=2, persistent_workers=True)
    with pytest.raises(hr.errors.WorkerDiedError):
        list(loader)
    with pytest.raises(hr.errors.WorkerDiedError):  # the fault is still there
        list(loader)
    flag.unlink()
    for _ in range(2):
        assert read_all(iter(loader)) == batches_of(4, count=16)
    del loader


class SecondDiesThrice(Dataset[int]):
    """Kills the second process that loads it, its replacement, and, once `end` exists, the replacement of that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 16

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        start = next(n for n in itertools.count(1) if self._is_first_at(n))
        if start == 4:
            wait_until((self.folder / "end").exists, "the second epoch runs")
        if 2 <= start <= 4:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first_at(self, start: int) -> bool:
        try:
            (self.folder / str(start)).mkdir()
        except FileExistsError:
            return False
        return True

    def __getitem__(self, index: int) -> int:
        wait_until((self.folder / "4").exists, "two processes have ended")
        return index


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_deaths_of_an_earlier_epoch_do_not_count(tmp_path: Path) -> None:
    loader = hr.DataLoader(
        SecondDiesThrice(tmp_path), batch_size=4, num_workers=2, persistent_workers=True, in_order=False
    )
    next(iter(loader))  # of the worker that lives; by then, two in the place of the other one have ended
    again = iter(loader)
    (tmp_path / "end").touch()
    assert sorted(read_all(again)) == batches_of(4, count=16)
    del again, loader


@pytest.mark.slow
@pytest.mark.parametrize("data", [range(16), Counts()], ids=["by index", "iterable"])
@pytest.mark.parametrize("context", [None, "fork"])
def test_later_epochs_have_workers_when_they_died_between_two(data: Any, context: str | None) -> None:
    loader = hr.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    for _ in range(3):
        iterator = iter(loader)
        assert read_all(iterator) == batches_of(4, count=16)
        pid = iterator._workers[0].pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_running(pid), "the worker has ended")
    del iterator, loader


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
@pytest.mark.parametrize("data", [range(16), Counts()], ids=["by index", "iterable"])
def test_later_epochs_have_workers_when_the_fork_server_died_between_two(data: Any) -> None:
    loader = hr.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        iterator = iter(loader)
        assert read_all(iterator) == batches_of(4, count=16)
        pid = iterator._workers[0].pid
        iterator._pool._starter._fork_server.process.kill()
        wait_until(lambda pid=pid: not is_running(pid), "the worker has ended with the fork server")
    del iterator, loader


@pytest.mark.slow
def test_next_epoch_is_whole_when_a_worker_died_in_one_that_was_left() -> None:
    loader = hr.DataLoader(range(64), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    assert read_all(iter(loader)) == batches_of(4, count=64)
    del iterator, loader


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_epoch_goes_on_with_another_fork_server_when_one_is_killed() -> None:
    iterator = iter(hr.DataLoader(range(400), batch_size=4, num_workers=2))
    got = [next(iterator).tolist()]
    iterator._pool._starter._fork_server.process.kill()
    assert got + read_all(iterator) == batches_of(4, count=400)
    del iterator
