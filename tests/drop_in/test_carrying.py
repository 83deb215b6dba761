"""What travels to workers, and how: files are mapped again, shared tensors stay shared, modules are imported once."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.asked import Asked, told
from drop_in.stateful_data import Counted, identity
from torch.utils.data import Dataset

import headrace as hr


def resident_bytes(name: str) -> int:
    """Of this process, bytes of mappings whose line names `name`."""
    sizes, counts = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            counts = name in line
        elif counts and line.startswith("Private_Dirty:"):
            sizes.append(int(line.split()[1]) * 1024)
    return sum(sizes)


@pytest.mark.slow
def test_arrays_of_the_data_set_are_mapped_and_not_copied_by_workers() -> None:
    data = Asked(
        lambda self: (float(self.array[7]), float(self.tensor[7]), resident_bytes("memfd:headrace")),
        array=np.arange(2_000_000, dtype=np.float64),
        tensor=torch.arange(2_000_000, dtype=torch.float64),
    )
    for array, tensor, private in told(data):
        assert (array, tensor) == (7.0, 7.0)
        assert private < 1_000_000, "the 32 MB lie in shared memory, and no page of them is the worker's own"


def test_array_that_a_worker_writes_to_is_its_own_from_then_on() -> None:
    def write(self: Any) -> tuple[float, float]:
        self.array[0] += 1
        self.tensor[0] += 1
        return float(self.array[0]), float(self.tensor[0])

    data = Asked(write, array=np.zeros(100_000), tensor=torch.zeros(100_000))
    assert told(data) == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0)], "two workers, two samples each"
    assert (float(data.array[0]), float(data.tensor[0])) == (0.0, 0.0)


def test_mapped_file_is_mapped_again_by_workers(tmp_path: Path) -> None:
    np.arange(3_000, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.int32, "r")
    data = Asked(
        lambda self: (
            self.part[:2].tolist(),
            str(self.part.filename),
            "tokens.bin" in Path("/proc/self/maps").read_text(),
        ),
        part=tokens[1_000:2_000:2],
    )
    assert told(data) == [([1_000, 1_002], str(tmp_path / "tokens.bin"), True)] * 4


def test_mapped_file_that_is_gone_travels_as_an_array(tmp_path: Path) -> None:
    np.arange(100, dtype=np.int32).tofile(tmp_path / "gone.bin")
    data = Asked(lambda self: int(self.array[42]), array=np.memmap(tmp_path / "gone.bin", np.int32, "r"))
    (tmp_path / "gone.bin").unlink()
    assert told(data) == [42] * 4


def test_shared_tensor_stays_shared_with_the_trainer_and_between_workers() -> None:
    def count(self: Any) -> int:
        self.counts[self.view.storage_offset()] += 1
        return int(self.view[0]) > 0

    counts = torch.zeros(10, dtype=torch.int64).share_memory_()
    data = Asked(count, counts=counts, view=counts[3:])
    assert all(told(data))
    assert counts[3] >= 2, "workers wrote to the trainer's own memory, each at least one of its two"


def test_class_of_the_script_can_be_pickled_by_name_in_a_worker() -> None:
    # As torch's own graph of DataPipes does, and the user's code may.
    data = Asked(lambda self: type(pickle.loads(pickle.dumps(Asked(print)))) is type(self))
    assert told(data) == [True] * 4


def test_open_file_is_an_error_that_names_the_attribute(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:
        data = Asked(len, transforms=[None, {"log": file}])
        with pytest.raises(
            TypeError, match=r"dataset\.transforms\[1\]\['log'\].*multiprocessing_context=\"fork\""
        ) as caught:
            iter(hr.DataLoader(data, num_workers=1, fallback="error"))
    assert isinstance(caught.value, hr.CannotCarryError)


def test_lock_is_carried_by_the_context_that_the_error_offers() -> None:
    data = Asked(lambda self: self.lock.locked(), lock=threading.Lock())
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.lock \(a _thread\.lock\)"):
        iter(hr.DataLoader(data, num_workers=1, fallback="error"))
    assert told(data, multiprocessing_context="fork") == [False] * 4


def test_tensor_on_another_device_is_an_error_that_says_what_to_do() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # as far as can be seen here

    data = Asked(lambda self: torch.zeros(3).as_subclass(Elsewhere))
    with pytest.raises(TypeError, match=r"a tensor on cuda:0 cannot be sent to another process"):
        told(data)


MODULE = """
import os
IMPORTED_BY = os.getpid()
VALUE = {value}

class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return IMPORTED_BY, os.getpid(), VALUE
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Writes the user's module, and gives it as a new import would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "users_numbers.py"

    def write(value: int) -> Any:
        path.write_text(MODULE.format(value=value))
        os.utime(path, ns=(value * 10**9, value * 10**9))
        importlib.invalidate_caches()
        sys.modules.pop("users_numbers", None)
        return importlib.import_module("users_numbers")

    yield write
    sys.modules.pop("users_numbers", None)


def test_module_of_the_data_set_is_imported_once_and_not_by_each_worker(module: Callable[[int], Any]) -> None:
    numbers = module(1).Numbers()
    importers, workers = zip(*[(by, pid) for _ in range(2) for by, pid, _ in told(numbers)], strict=True)
    assert len(set(workers)) == 4, "two for each of two epochs"
    assert len(set(importers)) == 1
    assert not set(importers) & {os.getpid(), *workers}


@pytest.mark.slow
def test_module_that_was_changed_is_imported_anew(module: Callable[[int], Any]) -> None:
    assert {value for _, _, value in told(module(1).Numbers())} == {1}
    assert {value for _, _, value in told(module(2).Numbers())} == {2}


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
def test_fork_server_serves_a_next_loader_after_its_last_user_has_gone() -> None:
    data = Asked(lambda self: os.getppid())
    (first,) = set(told(data))
    (second,) = set(told(data))
    assert first == second


def test_class_is_in_the_trainer_what_it_was_when_batches_of_it_come_back() -> None:
    level = 1
    made = []

    class Base:
        def __init_subclass__(cls) -> None:
            made.append(cls.__name__)

    class Batch(Base):
        count = 0

        def __init__(self, samples: list[Any]) -> None:
            self.samples = samples

        def level(self) -> int:
            return level

    method = Batch.level
    iterator = iter(hr.DataLoader([1, 2, 3, 4], 2, num_workers=1, collate_fn=Batch))
    level, Batch.count = 5, 7
    for batch in iterator:
        assert type(batch) is Batch
        assert (batch.level(), Batch.count, made) == (5, 7, ["Batch"])
    assert Batch.level is method, "what comes back is a copy of what has gone out"


def test_functions_that_travel_together_share_their_variables() -> None:
    """In each worker, as after a fork: data set, collate_fn and worker_init_fn."""
    count = 0

    class Counting(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            nonlocal count
            count += 1
            return count

    def begin(_: int) -> None:
        nonlocal count
        count += 10

    def collate(samples: list[int]) -> tuple[list[int], int]:
        return samples, count

    for options in ({}, {"multiprocessing_context": "fork"}, {"economic": True}):
        loader = hr.DataLoader(Counting(), 4, num_workers=1, collate_fn=collate, worker_init_fn=begin, **options)
        assert list(loader) == [([11, 12, 13, 14], 14)]
        loader.close()
    assert count == 0


def test_what_cannot_be_carried_is_named_where_workers_are_the_loaders() -> None:
    """And no fork is offered: there is a thread beside the trainer's, which a fork would not copy."""
    lock = threading.Lock()
    loaders: dict[str, hr.DataLoader[Any]] = {
        "dataset.lock": hr.DataLoader(Asked(len, lock=lock), num_workers=1, economic=True),
        "collate_fn.<variable lock>": hr.DataLoader(
            hr.from_map([1]), num_workers=1, collate_fn=lambda samples: lock and samples
        ),
    }
    for name, loader in loaders.items():
        with loader, pytest.raises(hr.CannotCarryError) as caught:
            next(iter(loader))
        assert str(caught.value).startswith(f"{name} (a _thread.lock) cannot be sent to a worker: cannot pickle")
        assert "multiprocessing_context" not in str(caught.value)


class Locked(int):
    """An index with an attribute that cannot be pickled."""

    def __init__(self, _: int) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "options",
    [{}, {"multiprocessing_context": "fork"}, {"workers": "thread"}, {"economic": True}],
    ids=["fork server", "fork", "thread", "economic"],
)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_index_that_cannot_be_carried_is_named(batch_size: int | None, options: dict[str, Any]) -> None:
    sampler = [Locked(number) for number in range(4)]
    is_single = batch_size is None or "economic" in options
    with (
        hr.DataLoader(Asked(len), batch_size, sampler=sampler, num_workers=1, **options) as loader,
        pytest.raises(hr.CannotCarryError) as caught,
    ):
        next(iter(loader))
    name = "sampler's index.lock" if is_single else "sampler's index[0].lock"
    assert str(caught.value).startswith(f"{name} (a _thread.lock) cannot be sent to a worker: cannot pickle")
    assert "numbers, texts or tuples" in str(caught.value)


def test_indices_of_batches_that_are_made_again_are_carried_as_the_others() -> None:
    class Own(int):
        """Only this function knows it."""

    def make() -> hr.DataLoader[Any]:
        sampler = [Own(number) for number in range(6)]
        return hr.DataLoader(
            Counted(6), None, sampler=sampler, num_workers=1, collate_fn=identity, snapshot_every_n_steps=3
        )

    with make() as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert list(loader) == [(5, 6)]
