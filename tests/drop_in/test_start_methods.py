"""Workers are forked where torch's are; elsewhere a fork server has them, which takes lambdas and scripts' classes."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.stateful_data import Counted, identity
from process.waiting import run_script
from torch.utils.data import Dataset

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python's, where there are threads


class Asked(Dataset[Any]):
    """Each sample is the result of a function of the data set."""

    def __init__(self, ask: Callable[[Any], Any], **things: Any) -> None:
        self.ask = ask
        vars(self).update(things)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.ask(self)


def samples_of(dataset: Dataset[Any], **options: Any) -> list[Any]:
    return list(hr.DataLoader(dataset, None, num_workers=2, collate_fn=lambda sample: sample, **options))


SCRIPT = """
    import multiprocessing, threading
    import headrace as hr

    class Locked:
        lock = threading.Lock()
        def __len__(self):
            return 2
        def __getitem__(self, index):
            return index

    {before}
    try:
        print([batch.tolist() for batch in hr.DataLoader(Locked(), num_workers=1)])
    except hr.errors.CannotCarryError as error:
        print(str(error).partition(" cannot")[0])
"""


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_are_forked_where_torchs_would_be(method: str | None) -> None:
    before = f"multiprocessing.set_start_method({method!r})" if method else ""
    code, out, err = run_script(SCRIPT.format(before=before))
    assert code == 0, err
    would_fork = (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    assert out.strip() == ("[[0], [1]]" if would_fork else "type(dataset).lock (a _thread.lock)")


COUNTS_ITS_IMPORTS = """
import os
from multiprocessing import parent_process

with open(os.environ["HEADRACE_TEST_IMPORTS"], "a") as file:
    file.write(f"{__name__} {'trainer or fork server' if parent_process() is None else 'worker'}\\n")

def light(sample):
    return sample
"""

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

def locked(sample):
    # In a worker that imported this by itself the thread that holds the lock is there, and gives it up.
    STOP.set()
    with LOCK:
        return sample
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


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_module_that_starts_a_thread_is_imported_by_each_worker_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_IMPORTS", str(tmp_path / "imports"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "site-packages").mkdir()
    texts = {
        "site-packages/users_installed": COUNTS_ITS_IMPORTS,
        "users_first": COUNTS_ITS_IMPORTS,
        "users_threads": "import users_installed\n" + COUNTS_ITS_IMPORTS + STARTS_A_THREAD,
        "users_last": COUNTS_ITS_IMPORTS,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    first, threads, last = (importlib.import_module(f"users_{name}") for name in ("first", "threads", "last"))
    try:
        for _ in range(2):
            data = Through(first.light, threads.locked, last.light)
            assert [int(batch) for batch in hr.DataLoader(data, num_workers=2, timeout=60)] == [0, 1]
        lines = (tmp_path / "imports").read_text().splitlines()
        assert [line for line in lines if line.endswith(" worker")] == ["users_threads worker"] * 4
    finally:
        threads.STOP.set()
        threads.THREAD.join()
        for name in ("installed", "first", "threads", "last"):
            sys.modules.pop(f"users_{name}")


@pytest.mark.usefixtures("no_fork")
def test_what_cannot_be_sent_is_an_error_that_names_the_attribute(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:
        data = Asked(len, transforms=[None, {"log": file}])
        with pytest.raises(hr.errors.CannotCarryError, match=r"dataset\.transforms\[1\]\['log'\].*context=\"fork\""):
            iter(hr.DataLoader(data, num_workers=1))
    data = Asked(lambda self: self.lock.locked(), lock=threading.Lock())
    with pytest.raises(hr.errors.CannotCarryError, match=r"dataset\.lock \(a _thread\.lock\)"):
        iter(hr.DataLoader(data, num_workers=1))
    assert samples_of(data, multiprocessing_context="fork") == [False] * 4


def test_tensor_on_another_device_is_an_error_that_says_what_to_do() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # as far as can be seen here

    data = Asked(lambda self: torch.zeros(3).as_subclass(Elsewhere))
    with pytest.raises(TypeError, match=r"a tensor on cuda:0 cannot be sent to another process"):
        samples_of(data)


@pytest.mark.parametrize("options", [{}, {"economic": True}], ids=["fork", "economic"])
def test_functions_share_their_variables_in_a_worker(options: dict[str, Any]) -> None:
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

    with hr.DataLoader(Counting(), 4, num_workers=1, collate_fn=collate, worker_init_fn=begin, **options) as loader:
        assert list(loader) == [([11, 12, 13, 14], 14)]
    assert count == 0


def test_what_cannot_be_sent_is_named_where_the_loader_has_threads() -> None:
    """No fork is offered: it would not copy the thread of the engine."""
    lock = threading.Lock()
    loaders: dict[str, hr.DataLoader[Any]] = {
        "dataset.lock": hr.DataLoader(Asked(len, lock=lock), num_workers=1, economic=True),
        "collate_fn.<variable lock>": hr.DataLoader(
            hr.from_map([1]), num_workers=1, collate_fn=lambda samples: lock and samples
        ),
    }
    for name, loader in loaders.items():
        with loader, pytest.raises(hr.errors.CannotCarryError) as caught:
            next(iter(loader))
        assert str(caught.value).startswith(f"{name} (a _thread.lock) cannot be sent to a worker: cannot pickle")
        assert "multiprocessing_context" not in str(caught.value)


class Locked(int):
    """An index with an attribute that cannot be pickled."""

    def __init__(self, _: int) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("options", [{}, {"workers": "thread"}, {"economic": True}], ids=["fork", "thread", "economic"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_index_that_cannot_be_sent_is_named(batch_size: int | None, options: dict[str, Any]) -> None:
    sampler = [Locked(number) for number in range(4)]
    is_single = batch_size is None or "economic" in options
    with (
        hr.DataLoader(Asked(len), batch_size, sampler=sampler, num_workers=1, **options) as loader,
        pytest.raises(hr.errors.CannotCarryError) as caught,
    ):
        next(iter(loader))
    name = "sampler's index.lock" if is_single else "sampler's index[0].lock"
    assert str(caught.value).startswith(f"{name} (a _thread.lock) cannot be sent to a worker: cannot pickle")
    assert "numbers, texts or tuples" in str(caught.value)


def test_indices_of_batches_that_are_made_again_are_sent_as_the_others() -> None:
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
