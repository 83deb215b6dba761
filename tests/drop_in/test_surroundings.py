"""What workers have around them: environment, modules that start threads, multiprocessing's own shared things."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import headrace as hr


def unchanged(sample: Any) -> Any:
    return sample


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes a module of the user's out of its text, and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(text: str) -> Any:
        name = f"users_module_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


COUNTS_ITS_IMPORTS = """
import os
from multiprocessing import parent_process

with open(os.environ["HEADRACE_TEST_IMPORTS"], "a") as file:
    file.write(f"{__name__} {'trainer or fork server' if parent_process() is None else 'worker'}\\n")

def light(sample):
    return sample
"""

ALSO_STARTS_A_THREAD = """
import threading
STOP = threading.Event()
threading.Thread(target=STOP.wait, daemon=True).start()
"""


class Through:
    """A data set with functions of several modules."""

    def __init__(self, *functions: Callable[[Any], Any]) -> None:
        self.functions = functions

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        for function in self.functions:
            index = function(index)
        return index


def imports_in_workers(path: Path) -> list[str]:
    return [line.partition(" ")[0] for line in path.read_text().splitlines() if line.endswith(" worker")]


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_module_that_starts_a_thread_has_no_other_imported_by_each_worker(
    written: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_IMPORTS", str(tmp_path / "imports"))
    earlier = written(COUNTS_ITS_IMPORTS)
    list(hr.DataLoader(Through(earlier.light), num_workers=1))  # by another loader, and is still there afterwards
    one, threads, other = (
        written(COUNTS_ITS_IMPORTS),
        written(COUNTS_ITS_IMPORTS + ALSO_STARTS_A_THREAD),
        written(COUNTS_ITS_IMPORTS),
    )
    try:
        data = Through(earlier.light, one.light, threads.light, other.light)
        for _ in range(2):
            assert [int(batch) for batch in hr.DataLoader(data, num_workers=2)] == [0, 1]
        assert imports_in_workers(tmp_path / "imports") == [threads.__name__] * 4, "two workers in each of two epochs"
    finally:
        threads.STOP.set()


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_what_a_module_with_a_thread_has_imported_is_imported_once_if_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_IMPORTS", str(tmp_path / "imports"))
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in (
        ("installed_heavy", COUNTS_ITS_IMPORTS),
        ("installed_with_thread", "import installed_heavy\n" + COUNTS_ITS_IMPORTS + ALSO_STARTS_A_THREAD),
    ):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    threads = importlib.import_module("installed_with_thread")
    try:
        for _ in range(2):
            assert [int(batch) for batch in hr.DataLoader(Through(threads.light), num_workers=2)] == [0, 1]
        assert imports_in_workers(tmp_path / "imports") == ["installed_with_thread"] * 4
    finally:
        threads.STOP.set()
        for name in ("installed_heavy", "installed_with_thread"):
            sys.modules.pop(name)


def seen_in_workers(name: str) -> bool:
    """Whether a module was there before the data set was."""
    return name in sys.modules


class Sees:
    """Unpickled before anything that follows it, it says whether a module is there."""

    def __reduce__(self) -> Any:
        return seen_in_workers, ("pyarrow",)


def test_pyarrow_is_there_before_workers_begin() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with_it = [Sees(), pyarrow.schema]

    class Shown:
        def __init__(self) -> None:
            self.seen = with_it

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> bool:
            return self.seen[0]

    assert list(hr.DataLoader(Shown(), None, num_workers=1, collate_fn=unchanged)) == [True]


READS_ENVIRONMENT = """
import os
FOUND = os.environ.get("HEADRACE_TEST_SETTING")

class Found:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return FOUND
"""


@pytest.mark.slow
def test_module_sees_the_trainers_environment_when_it_is_imported_for_workers(
    written: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(hr.DataLoader([1, 2], num_workers=1))  # the fork server stands, and has an older environment
    monkeypatch.setenv("HEADRACE_TEST_SETTING", "set since")
    found = written(READS_ENVIRONMENT).Found()
    assert list(hr.DataLoader(found, None, num_workers=1, collate_fn=unchanged)) == ["set since"] * 2


STARTS_A_THREAD = """
import threading

LOCK = threading.Lock()
HELD, STOP = threading.Event(), threading.Event()

def hold():
    with LOCK:
        HELD.set()
        STOP.wait()

THREAD = threading.Thread(target=hold, daemon=True)
THREAD.start()
HELD.wait()

class Waiting:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        # In a worker that imported this by itself the thread that holds the lock is there, and gives it up.
        STOP.set()
        with LOCK:
            return index
"""


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_module_that_starts_a_thread_does_not_leave_its_locks_held_in_workers(written: Callable[[str], Any]) -> None:
    module = written(STARTS_A_THREAD)
    try:
        for _ in range(2):
            assert sorted(hr.DataLoader(module.Waiting(), None, num_workers=2, timeout=60)) == [0, 1, 2, 3]
    finally:
        module.STOP.set()
        module.THREAD.join()


def test_shared_memory_of_the_users_outlives_the_workers_that_used_it() -> None:
    class Shared(Dataset[int]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            memory = shared_memory.SharedMemory(self.name)
            try:
                return memory.buf[index]
            finally:
                memory.close()

    memory = shared_memory.SharedMemory(create=True, size=4)
    try:
        memory.buf[:4] = bytes([5, 6, 7, 8])
        for _ in range(3):
            assert [int(b) for b in hr.DataLoader(Shared(memory.name), num_workers=2)] == [5, 6, 7, 8]
    finally:
        memory.close()
        memory.unlink()


def test_proxy_of_a_manager_can_be_used_in_workers() -> None:
    class Counting(Dataset[int]):
        def __init__(self, counts: Any) -> None:
            self.counts = counts

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            self.counts[index] = index * 2
            return index

    with multiprocessing.Manager() as manager:
        counts = manager.dict()
        assert len(list(hr.DataLoader(Counting(counts), num_workers=2))) == 4
        assert dict(counts) == {0: 0, 1: 2, 2: 4, 3: 6}


def test_many_shared_tensors_stay_shared() -> None:
    class Many(Dataset[int]):
        def __init__(self) -> None:
            self.counts = [torch.zeros(1).share_memory_() for _ in range(150)]

        def __len__(self) -> int:
            return 150

        def __getitem__(self, index: int) -> int:
            self.counts[index] += 1
            return index

    many = Many()
    list(hr.DataLoader(many, batch_size=50, num_workers=2))
    assert all(float(count) == 1.0 for count in many.counts)


def test_workers_run_where_the_trainers_folder_is_gone(tmp_path: Path) -> None:
    before = Path.cwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    list(hr.DataLoader([1, 2], num_workers=1))  # the fork server stands, in a folder that is there
    os.chdir(gone)
    gone.rmdir()
    try:
        assert [int(batch) for batch in hr.DataLoader([1, 2, 3], num_workers=1)] == [1, 2, 3]
    finally:
        os.chdir(before)


def test_batch_keeps_the_order_of_its_dimensions_in_memory() -> None:
    def stack(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples).to(memory_format=torch.channels_last)

    data = [torch.rand(3, 40, 40) for _ in range(8)]
    for batch in hr.DataLoader(data, batch_size=4, num_workers=1, collate_fn=stack):
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch, torch.stack([data[k] for k in range(4)])) or torch.equal(batch, torch.stack(data[4:]))


def test_getitems_may_give_more_samples_than_keys() -> None:
    class Doubling(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise NotImplementedError

        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [np.full(2000, key, np.float32) for key in keys for _ in range(2)]

    for size in (2, 4):
        first, *_ = hr.DataLoader(Doubling(), batch_size=size, num_workers=1)
        assert first[:, 0].tolist() == [float(key) for key in range(size) for _ in range(2)]


def test_iterable_data_set_that_fails_to_begin_may_begin_the_next_epoch() -> None:
    class Late(IterableDataset[int]):
        def __init__(self) -> None:
            self.tries = 0

        def __iter__(self) -> Iterator[int]:
            self.tries += 1
            if self.tries == 1:
                raise OSError("not yet")
            return iter(range(3))

    loader = hr.DataLoader(Late(), None, num_workers=1, persistent_workers=True)
    with pytest.raises(OSError, match="not yet"):
        list(loader)
    assert list(loader) == [0, 1, 2]


def test_places_are_used_again_when_epochs_are_left_early() -> None:
    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((20_000,), float(index))

    loader = hr.DataLoader(Rows(), batch_size=4, num_workers=2, prefetch_factor=4, persistent_workers=True)
    most = []
    for _ in range(12):
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        most.append(len(iterator._pool.places.segments))  # type: ignore[attr-defined]
    assert max(most) <= 2 * 2 * 4 + 4, "what is under way, twice while the older epoch ends, and what the trainer has"
