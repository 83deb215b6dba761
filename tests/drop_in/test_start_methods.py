"""Workers are forked where torch's are; elsewhere a fork server has them, which takes lambdas and scripts' classes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.asked import Asked, told
from drop_in.stateful_data import Counted, identity
from process.waiting import run_script
from torch.utils.data import Dataset

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python's, where there are threads


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
    except hr.CannotCarryError as error:
        print(str(error).partition(" cannot")[0])
"""


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_are_forked_where_torchs_would_be(method: str | None) -> None:
    before = f"multiprocessing.set_start_method({method!r})" if method else ""
    code, out, err = run_script(SCRIPT.format(before=before))
    assert code == 0, err
    would_fork = (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    assert out.strip() == ("[[0], [1]]" if would_fork else "type(dataset).lock (a _thread.lock)")


CLASSES = """
    import enum, threading

    class Color(enum.Enum):
        RED = 1

    class Sample:
        lock = threading.Lock()  # no process can be sent it

        def __init__(self, color):
            self.color = color

    class MyError(Exception):
        pass

    class Data:
        def __len__(self):
            return 2

        def __getitem__(self, color):
            if color is not Color.RED:
                raise MyError(color, Color.RED)
            return Sample(color)

    class Local(Sample):
        pass

    loader = hr.DataLoader(
        Data(), batch_size=None, sampler=[Color.RED, Color], num_workers=1,
        collate_fn=lambda sample: [sample, Local(sample.color)], multiprocessing_context="fork"
    )
    batches = iter(loader)
    sample, local = next(batches)
    assert type(sample) is Sample and type(local) is Local and isinstance(local, Sample)
    assert sample.color is Color.RED
    try:
        next(batches)
    except MyError as error:
        kind, member = error.__cause__.args
        assert kind is Color and member is Color.RED
    else:
        raise AssertionError
    print("the same")
"""


def test_forked_workers_have_the_classes_of_the_script_and_no_copies() -> None:
    code, out, err = run_script(CLASSES)
    assert (code, out.strip()) == (0, "the same"), err


class Cached(Dataset[int]):
    """Computes each sample once, in whichever worker comes to it first."""

    def __init__(self) -> None:
        self.cache = torch.zeros(10, dtype=torch.int64).share_memory_()
        self.view = self.cache[:5]

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> int:
        if not self.cache[index]:
            self.cache[index] = index + 1
        return int(self.cache[index]) + (int(self.view[index]) - index - 1 if index < 5 else 0)


@pytest.mark.parametrize("method", ["fork", "fork server"])
def test_shared_tensor_is_the_same_memory_in_all_workers(method: str, request: pytest.FixtureRequest) -> None:
    if method == "fork server":
        request.getfixturevalue("no_fork")
    data = Cached()
    assert torch.cat(list(hr.DataLoader(data, 5, num_workers=2))).tolist() == [*range(1, 11)]
    assert data.cache.tolist() == [*range(1, 11)]


@pytest.mark.usefixtures("no_fork")
def test_arrays_of_the_data_set_are_sent_once_and_are_each_workers_own() -> None:
    def write(self: Any) -> tuple[float, float]:
        self.array[0] += 1
        self.tensor[0] += 1
        return float(self.array[0]), float(self.tensor[0])

    data = Asked(write, array=np.zeros(100_000), tensor=torch.zeros(100_000))
    assert told(data) == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0)], "two workers, two samples each"
    assert (float(data.array[0]), float(data.tensor[0])) == (0.0, 0.0)


@pytest.mark.usefixtures("no_fork")
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


@pytest.mark.usefixtures("no_fork")
def test_class_of_the_script_can_be_pickled_by_name_in_a_worker() -> None:
    # As torch's own graph of DataPipes does, and the user's code may.
    data = Asked(lambda self: type(pickle.loads(pickle.dumps(Asked(print)))) is type(self))
    assert told(data) == [True] * 4


@pytest.mark.usefixtures("no_fork")
def test_what_cannot_be_sent_is_an_error_that_names_the_attribute(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:
        data = Asked(len, transforms=[None, {"log": file}])
        with pytest.raises(hr.CannotCarryError, match=r"dataset\.transforms\[1\]\['log'\].*context=\"fork\""):
            iter(hr.DataLoader(data, num_workers=1))
    data = Asked(lambda self: self.lock.locked(), lock=threading.Lock())
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.lock \(a _thread\.lock\)"):
        iter(hr.DataLoader(data, num_workers=1))
    assert told(data, multiprocessing_context="fork") == [False] * 4


@pytest.mark.usefixtures("no_fork")
def test_lock_of_multiprocessing_is_an_error_that_names_it() -> None:
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.lock \(a multiprocessing\.synchronize\.Lock\)"):
        iter(hr.DataLoader(Asked(len, lock=multiprocessing.get_context("spawn").Lock()), num_workers=1))


def test_tensor_on_another_device_is_an_error_that_says_what_to_do() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # as far as can be seen here

    data = Asked(lambda self: torch.zeros(3).as_subclass(Elsewhere))
    with pytest.raises(TypeError, match=r"a tensor on cuda:0 cannot be sent to another process"):
        told(data)


def test_class_is_in_the_trainer_what_it_was_when_batches_of_it_come_back() -> None:
    class Batch:
        count = 0

        def __init__(self, samples: list[Any]) -> None:
            self.samples = samples

    iterator = iter(hr.DataLoader([1, 2, 3, 4], 2, num_workers=1, collate_fn=Batch))
    Batch.count = 7
    for batch in iterator:
        assert type(batch) is Batch
        assert Batch.count == 7, "what comes back is a copy of what has gone out"


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
        with loader, pytest.raises(hr.CannotCarryError) as caught:
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
        pytest.raises(hr.CannotCarryError) as caught,
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
