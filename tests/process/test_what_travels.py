"""Values of functions of streams in workers of the fork server."""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from builders.numbers import Made, Numbers, later
from drop_in import acting
from process.waiting import output_of

import headrace as hr


def made_in_workers(function: Callable[[int], Any], count: int = 4, **options: Any) -> list[Any]:
    options = {"batch_size": 1, "num_workers": 2, "collate_fn": lambda samples: samples[0], "timeout": 60, **options}
    with hr.DataLoader(hr.from_map(range(count)).map(function), **options) as loader:
        return list(loader)


# Equal values.


def test_local_classes_and_functions_are_in_workers_what_they_are_in_the_trainer() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    @dataclasses.dataclass
    class Box:
        content: Any

    def recursive(k: int) -> int:
        return 1 if k < 2 else k * recursive(k - 1)

    value = Pair(Box(recursive), namedtuple("Old", "a b")(1, 2))  # noqa: PYI024 (it is another kind)

    def ask(_: int) -> Any:
        is_itself = logging.getLogger("users.data") is logger
        return value.left.content(5), value.right.b, type(value).__name__, repr(value.right), is_itself

    logger = logging.getLogger("users.data")
    assert made_in_workers(ask, 1) == [(120, 2, "Pair", "Old(a=1, b=2)", True)]


def test_arrays_are_sent_once_and_are_each_workers_own() -> None:
    array, tensor = np.zeros(100_000), torch.zeros(100_000)

    def write(_: int) -> float:
        array[0] += 1
        tensor[0] += 1
        return float(array[0]) - float(tensor[0])

    assert made_in_workers(write) == [0.0] * 4
    assert array[0] == tensor[0] == 0


SCRIPT = """
    import enum, pickle
    from collections import namedtuple
    from dataclasses import dataclass
    from typing import NamedTuple

    print("once")
    SHIFT = 10

    class Pair(NamedTuple):
        image: torch.Tensor
        label: int

    Old = namedtuple("Old", "a b")

    @dataclass
    class Batch:
        numbers: list
        worker: int

    class MyError(Exception):
        def __init__(self, code, detail):
            super().__init__(code, detail)
            self.code = code

    class Squares(hr.AsyncDataset):
        def __len__(self):
            return 8
        async def aget(self, index):
            return Old(index, index * index)

    def shifted(sample):
        assert type(sample) is Old
        return Pair(torch.full((3,), sample.b + SHIFT), sample.a)

    def to_batch(samples):
        assert all(type(sample) is Pair for sample in samples)
        return Batch([int(sample.image[0]) for sample in samples], os.getpid())

    def fail(sample):
        raise MyError(3, "three")

    class Colour(enum.Enum):
        RED = 1

    def to_colour(sample):
        assert pickle.loads(pickle.dumps(Colour.RED)) is Colour.RED
        return Colour(sample)

    for _ in range(2):
        with hr.DataLoader(Squares().map(shifted), batch_size=4, num_workers=2) as loader:
            for batch in loader:
                print(type(batch) is Pair, batch.image[:, 0].tolist(), batch.label.tolist())
    with hr.DataLoader(Squares().map(shifted), batch_size=4, num_workers=2, collate_fn=to_batch) as loader:
        for batch in loader:
            print(type(batch) is Batch, batch.numbers, batch.worker != os.getpid())
    with hr.DataLoader(Squares().map(fail), batch_size=4, num_workers=2) as loader:
        try:
            next(iter(loader))
        except MyError as error:
            print("MyError", error.code, error.args)
    with hr.DataLoader(hr.from_map([1]).map(to_colour), None, num_workers=1) as loader:
        print(next(iter(loader)) is Colour.RED)
"""


def test_functions_and_classes_of_a_script_travel_without_a_main_guard() -> None:
    assert output_of(SCRIPT).splitlines() == [
        "once",
        *["True [10, 11, 14, 19] [0, 1, 2, 3]", "True [26, 35, 46, 59] [4, 5, 6, 7]"] * 2,
        "True [10, 11, 14, 19] True",
        "True [26, 35, 46, 59] True",
        "MyError 3 (3, 'three')",
        "True",
    ]


class CodedError(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def refuse(_: Any) -> Any:
    raise CodedError(code=4)


@pytest.mark.parametrize("place", ["worker_init_fn", "collate_fn"])
def test_error_of_other_functions_keeps_its_type_and_attributes(place: str) -> None:
    options: dict[str, Any] = {place: refuse}
    with hr.DataLoader(Numbers(8), 4, num_workers=2, **options) as loader, pytest.raises(CodedError) as caught:
        next(iter(loader))
    assert (str(caught.value), caught.value.code) == ("code 4", 4)


# Shared values: what a worker writes, all see.


def test_shared_tensors_are_one_memory_for_all() -> None:
    counts = [torch.zeros(1).share_memory_() for _ in range(150)]
    whole = torch.zeros(10, dtype=torch.int64).share_memory_()
    part = whole[4:]

    def count(k: int) -> bool:
        counts[k] += 1
        part[k % 6] = 1
        return bool(whole[4 + k % 6])

    assert made_in_workers(count, 150) == [True] * 150
    assert all(float(count) == 1.0 for count in counts)
    assert whole.tolist() == [0] * 4 + [1] * 6


@pytest.mark.may_leave(processes="resource_tracker", descriptors="pipe:", reason="multiprocessing keeps them")
def test_shared_memory_of_python_outlives_the_workers_that_used_it() -> None:
    def read(index: int, name: str) -> int:
        attached = SharedMemory(name)
        try:
            return attached.buf[index]
        finally:
            attached.close()

    memory = SharedMemory(create=True, size=4)
    try:
        memory.buf[:4] = bytes([5, 6, 7, 8])
        for _ in range(2):
            assert made_in_workers(functools.partial(read, name=memory.name)) == [5, 6, 7, 8]
    finally:
        memory.close()
        memory.unlink()


def test_proxy_of_a_manager_can_be_used_in_workers() -> None:
    with multiprocessing.Manager() as manager:
        counts = manager.dict()
        made_in_workers(lambda index: counts.update({index: 2 * index}))
        assert dict(counts) == {0: 0, 1: 2, 2: 4, 3: 6}


# Refusals.


LOCK = threading.Lock()


def with_a_lock() -> Callable[[Any], Any]:
    lock = LOCK
    return lambda x: (x, lock)


# The data, options, and the name of the lock.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "map": (lambda: hr.from_map(range(8)).map(with_a_lock()), {}, "lock"),
    "filter": (lambda: hr.from_map(range(8)).filter(with_a_lock()), {}, "lock"),
    "collate_fn": (lambda: hr.from_map(range(8)), {"collate_fn": with_a_lock()}, "collate_fn.<variable lock>"),
    "worker_init_fn": (lambda: hr.from_map(range(8)), {"worker_init_fn": with_a_lock()}, "worker_init_fn"),
    "data set": (lambda: torch_made(lock=LOCK), {"economic": True}, "dataset.lock"),
}


def torch_made(**attributes: Any) -> acting.Made:
    data = acting.Made(int)
    vars(data).update(attributes)
    return data


@pytest.mark.parametrize("place", REFUSED)
def test_lock_that_cannot_be_sent_is_named_and_no_fork_is_offered(place: str) -> None:
    """A fork would not copy the thread of the engine."""
    make, options, name = REFUSED[place]
    loader = hr.DataLoader(make(), 4, num_workers=2, **options)
    with (
        loader,
        pytest.raises(hr.errors.CannotCarryError, match=r"cannot be sent to a worker: cannot pickle.*lock") as caught,
    ):
        next(iter(loader))
    assert name in str(caught.value).partition(" (a _thread.lock)")[0]
    assert "multiprocessing_context" not in str(caught.value)
    assert place == "data set" or any("stage" in note for note in caught.value.__notes__)


def next_error(iterator: Any) -> str:
    """The text and the notes of the error that comes next."""
    with pytest.raises(Exception, match=r"\w") as raised:
        next(iterator)
    return "\n".join([f"{type(raised.value).__name__}: {raised.value}", *getattr(raised.value, "__notes__", ())])


def with_lock(x: int) -> Any:
    return threading.Lock() if x == 5 else x


# Data with a lock for sample 5, options, and texts of the error.
UNSENDABLE: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "fetch": (lambda: Made(with_lock, 12), {}, ("TypeError", "stage: fetch", "type lock")),
    "fetch, filter": (
        lambda: Made(with_lock, 12).filter(lambda x: True),
        {},
        ("TypeError", "stage: fetch", "type lock"),
    ),
    "batch": (lambda: Numbers(12).map(with_lock), {}, ("CollateError",)),
    "samples": (lambda: Numbers(12).map(with_lock).filter(lambda x: True).map(later), {}, ("with_lock", "type lock")),
    "collate": (
        lambda: Numbers(12).map(with_lock),
        {"collate_fn": lambda samples: samples},
        ("stage: collate", "batch 1", "type list"),
    ),
}


@pytest.mark.parametrize("place", UNSENDABLE)
def test_result_that_cannot_be_pickled_is_an_error_at_its_place_that_names_stage_and_type(place: str) -> None:
    make, options, texts = UNSENDABLE[place]
    with hr.DataLoader(make(), batch_size=4, num_workers=2, timeout=10, **options) as loader:
        iterator = iter(loader)
        assert list(next(iterator)) == [0, 1, 2, 3]
        told = next_error(iterator)
        assert list(next(iterator)) == [8, 9, 10, 11]
    assert all(text in told for text in ("lock", *texts)), told


# Around them: environment, folder, modules that are imported for them.


def test_workers_have_the_current_environment_path_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_in_workers(abs)  # the fork server stands, and has an older environment
    monkeypatch.setenv("HEADRACE_TEST_SETTING", "set since")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import os\nFOUND = os.environ.get('HEADRACE_TEST_SETTING')\ndef found(_):\n    return FOUND\n"
    (tmp_path / "users_module.py").write_text(text)
    assert made_in_workers(importlib.import_module("users_module").found) == ["set since"] * 4
    del sys.modules["users_module"]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert made_in_workers(lambda _: os.getcwd()) == [str(gone)] * 4  # noqa: PTH109
    gone.rmdir()
    assert made_in_workers(abs) == [0, 1, 2, 3]
