"""Values of functions of streams in workers of the fork server."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from process.waiting import run_script

import headrace as hr


def made_in_workers(function: Callable[[int], Any], count: int = 4, **options: Any) -> list[Any]:
    options = {"batch_size": 1, "num_workers": 2, "collate_fn": lambda samples: samples[0], "timeout": 60, **options}
    with hr.DataLoader(hr.from_map(range(count)).map(function), **options) as loader:
        return list(loader)


# Equal values. Each answer is asked for in a worker and in the trainer.

T = TypeVar("T")


class Base(Generic[T]):
    registry: dict[str, Any] = {}

    def __init_subclass__(cls) -> None:
        Base.registry[cls.__name__] = cls


class Derived(Base[int]):
    __slots__ = ("value",)

    @functools.cached_property
    def table(self) -> list[int]:
        return [1, 2]

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "any"

    @kind.register
    def _(self, value: int) -> str:
        return "int"


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Holding:
    def __init__(self, **things: Any) -> None:
        vars(self).update(things)

    def __call__(self, value: Any) -> Any:
        return value


def in_circles() -> Any:
    made = Holding(parts=[])
    made.parts.append(made)
    return made


def local_things() -> Any:
    class Pair(NamedTuple):
        left: Any
        right: Any

    @dataclasses.dataclass
    class Box:
        content: Any

    def recursive(k: int) -> int:
        return 1 if k < 2 else k * recursive(k - 1)

    return Pair(Box(recursive), namedtuple("Old", "a b")(1, 2))  # noqa: PYI024 (it is another kind)


VALUES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "local classes": (local_things(), lambda it: (it.left.content(5), it.right.b, type(it).__name__, repr(it.right))),
    "class": (Derived(), lambda it: (it.table, it.kind(1), it.kind("a"), Base.registry["Derived"] is type(it))),
    "enumeration": (Colour.RED, lambda it: (it is Colour.RED, it is Colour.BLUE, list(Colour.__members__))),
    "circle": (in_circles(), lambda it: it.parts[0] is it),
    "logger": (logging.getLogger("users.data"), lambda it: it is logging.getLogger("users.data")),
    "module": (np.random, lambda it: it is np.random),
    "picklable by name there": (Colour, lambda it: pickle.loads(pickle.dumps(it.RED)) is it.RED),
}


def test_values_are_in_workers_what_they_are_in_the_trainer() -> None:
    names = list(VALUES)
    with hr.DataLoader(
        hr.from_map(names).map(lambda name: VALUES[name][1](VALUES[name][0])), 1, num_workers=2, collate_fn=list
    ) as loader:
        answers = dict(zip(names, [batch[0] for batch in loader], strict=True))
    assert answers == {name: ask(value) for name, (value, ask) in VALUES.items()}


def test_arrays_are_sent_once_and_are_each_workers_own() -> None:
    array, tensor = np.zeros(100_000), torch.zeros(100_000)

    def write(_: int) -> float:
        array[0] += 1
        tensor[0] += 1
        return float(array[0]) - float(tensor[0])

    assert made_in_workers(write) == [0.0] * 4
    assert array[0] == tensor[0] == 0


SCRIPT = """
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
"""


def test_functions_and_classes_of_a_script_travel_without_a_main_guard() -> None:
    code, out, err = run_script(SCRIPT)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "once",
        *["True [10, 11, 14, 19] [0, 1, 2, 3]", "True [26, 35, 46, 59] [4, 5, 6, 7]"] * 2,
        "True [10, 11, 14, 19] True",
        "True [26, 35, 46, 59] True",
        "MyError 3 (3, 'three')",
    ]


def test_functions_of_a_module_that_workers_cannot_import_go_by_value(tmp_path: Path) -> None:
    """A module that was loaded from a file beside the path, as test runners and plug-in systems do."""
    file = tmp_path / "beside_the_path.py"
    file.write_text("FACTOR = 3\n\ndef helped(x):\n    return FACTOR * x\n\ndef times(x):\n    return helped(x) + 1\n")
    spec = importlib.util.spec_from_file_location("beside_the_path", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["beside_the_path"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        assert made_in_workers(module.times) == [1, 4, 7, 10]
    finally:
        del sys.modules["beside_the_path"]


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


@pytest.mark.parametrize("place", ["map", "filter", "collate_fn", "worker_init_fn"])
def test_error_says_in_which_function_it_is(place: str) -> None:
    lock = threading.Lock()

    def function(x: Any) -> Any:
        return x, lock

    data: Any = hr.from_map(range(8))
    is_step = place in ("map", "filter")
    loader = hr.DataLoader(
        getattr(data, place)(function) if is_step else data, 4, num_workers=2, **({} if is_step else {place: function})
    )
    with loader, pytest.raises(hr.errors.CannotCarryError, match=r"pickle.*lock") as caught:
        next(iter(loader))
    assert any("stage" in note for note in caught.value.__notes__)


# Around them: environment, folder, modules that are imported for them.


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


def test_workers_find_environment_path_and_folder_as_they_are_now(
    written: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in_workers(abs)  # the fork server stands, and has an older environment
    monkeypatch.setenv("HEADRACE_TEST_SETTING", "set since")
    module = written("import os\nFOUND = os.environ.get('HEADRACE_TEST_SETTING')\ndef found(_):\n    return FOUND\n")
    assert made_in_workers(module.found) == ["set since"] * 4
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert made_in_workers(lambda _: os.getcwd()) == [str(gone)] * 4  # noqa: PTH109
    gone.rmdir()
    assert made_in_workers(abs) == [0, 1, 2, 3]
