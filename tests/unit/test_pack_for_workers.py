"""Values for workers that pickle refuses or changes, and modules that are sent by value."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import linecache
import mmap
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from headrace._util.shared_memory import close_all
from headrace.errors import CannotCarryError
from headrace.torch_compat import serialize


def test_cached_function_is_sent_with_an_empty_cache() -> None:
    @functools.lru_cache(maxsize=7)
    def doubled(value: int) -> int:
        return 2 * value

    doubled(4)
    copy = serialize.copied(doubled)
    assert (copy(4), copy.cache_parameters()) == (8, {"maxsize": 7, "typed": False})
    assert copy.cache_info().misses == 1


def test_class_with_cached_properties_goes_by_value() -> None:
    class Lazy:
        @functools.cached_property
        def value(self) -> int:
            return 5

    assert serialize.copied(Lazy)().value == 5


class Kelvin(float, enum.Enum):
    ROOM = 20

    def __new__(cls, celsius: float) -> Any:
        member = float.__new__(cls, celsius + 273.15)
        member._value_ = celsius
        return member


class Planet(enum.Enum):
    EARTH = 1

    def __init__(self, moons: int) -> None:
        self.moons = moons


def test_flags_are_sent_after_their_inverse_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = enum.IntFlag("flags", "READ WRITE")
    monkeypatch.setattr(flags, "__module__", "__main__")  # so that it goes by value
    assert (~flags.READ).value == serialize.copied(~flags.READ).value


@pytest.mark.parametrize("member", [Kelvin.ROOM, Planet.EARTH])
def test_enumeration_whose_members_are_more_than_their_values_is_refused(
    member: enum.Enum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(member), "__module__", "__main__")  # so that it goes by value
    with pytest.raises(TypeError, match=r"more than its value|requires a 'float'"):
        serialize.copied(member)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    "part",
    [lambda array: array, lambda array: array[100:200:2], lambda array: np.asarray(array)[5:]],
    ids=["memmap", "slice", "plain array"],
)
def test_array_of_a_mapped_file_is_mapped_again(mode: Any, part: Callable[[Any], Any], tmp_path: Path) -> None:
    np.arange(300, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    array = part(np.memmap(tmp_path / "numbers.bin", np.int32, mode))
    copy = serialize.copied(array)
    assert type(copy) is type(array)
    assert copy.tolist() == array.tolist()
    assert copy.flags.writeable == (mode == "r+")
    np.arange(300, 600, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    assert copy[0] >= 300, "it is the file's memory"


def test_array_of_a_mapped_file_is_copied_when_the_file_is_gone_or_changes_are_private(tmp_path: Path) -> None:
    np.arange(3, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    private = np.memmap(tmp_path / "numbers.bin", np.int32, "c")
    private[0] = 7
    assert serialize.copied(private).tolist() == [7, 1, 2]
    gone = np.memmap(tmp_path / "numbers.bin", np.int32, "r")
    (tmp_path / "numbers.bin").unlink()
    assert serialize.copied(gone).tolist() == [0, 1, 2]


class Measured(np.ndarray):
    """An array with an attribute."""


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(2),
    lambda: torch.zeros(2).share_memory_(),
    lambda: torch.nn.Parameter(torch.zeros(2)),
    lambda: np.zeros(2).view(Measured),
], ids=["tensor", "shared tensor", "parameter", "array"])  # fmt: skip
def test_attributes_are_sent_with_tensors_and_arrays(make: Callable[[], Any]) -> None:
    plain, measured = make(), make()
    measured.unit = "m"
    first, second = serialize.copied([plain, measured])
    assert (type(second), second.unit, second.tolist()) == (type(measured), "m", [0, 0])
    assert not hasattr(first, "unit")


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=80)
    yield memory
    memory.close()
    memory.unlink()


@pytest.mark.process
@pytest.mark.may_leave(
    processes="resource_tracker",
    descriptors="/dev/shm/pym-|pipe:",
    mappings="pym-",
    reason="multiprocessing keeps them",
)
def test_array_over_memory_that_processes_share_is_an_error(shared: SharedMemory) -> None:
    def check(array: Any) -> None:
        for part in (array, array[::2], array.reshape(5, 2)):
            with pytest.raises(CannotCarryError, match="what a worker writes to it would be lost"):
                serialize.pack_for_workers([part], [])
        array.flags.writeable = False
        assert serialize.copied(array).tolist() == [0] * 10

    check(np.frombuffer(multiprocessing.RawArray("q", 10), np.int64))
    check(np.ndarray(10, np.int64, shared.buf))
    check(np.frombuffer(mmap.mmap(-1, 80), np.int64))


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a place that is not on the path: no worker could import it."""
    path = tmp_path / "plugin_of_a_user.py"
    path.write_text("def twice(x):\n    return 2 * x\n\n\nclass Pair(tuple):\n    pass\n")
    spec = importlib.util.spec_from_file_location("plugin_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["plugin_of_a_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    if "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["plugin_of_a_user"]


def sent(value: object) -> bytes:
    descriptors: list[int] = []
    try:
        return b"".join(bytes(part) for part in serialize.pack_for_workers(value, descriptors))
    finally:
        close_all(descriptors)


def test_module_that_workers_cannot_import_is_registered_in_cloudpickle(plugin: ModuleType) -> None:
    before = cloudpickle.dumps(plugin.twice)
    assert len(sent(plugin.twice)) > len(before), "it goes by value"
    assert "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value()
    assert len(serialize.pack_bytes(plugin.Pair)) > 100, "so do samples, once that is known"


CELL = """\
def double(x):
    # a comment, which only the source has
    def inner():
        return x["number"]
    return 2 * inner()
"""


def reduced_as_by(file: str | None) -> Callable[[CodeType], Any]:
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduced(code: CodeType) -> Any:
        make, arguments = reduce(code)
        return make, tuple(file or code.co_filename if k == 10 else value for k, value in enumerate(arguments))

    return reduced


@pytest.mark.parametrize("file", [None, "<dynamic-code>"])
def test_source_lines_of_a_cell_are_sent_with_its_functions(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    """The lines of a notebook's cell are in the trainer's `linecache` only."""
    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, reduced_as_by(file))
    cell = "<ipython-input-7-8a1b>"
    monkeypatch.setitem(linecache.cache, cell, (len(CELL), None, CELL.splitlines(keepends=True), cell))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, cell, "exec"), scope)
    descriptors: list[int] = []
    parts = serialize.pack_for_workers(scope["double"], descriptors)
    del linecache.cache[cell]  # as in a worker
    target = memoryview(bytearray(serialize.packed_size(parts)))
    double = serialize.unpack_in_worker(target, serialize.write(parts, target), descriptors)
    assert inspect.getsource(double) == CELL
    with pytest.raises(KeyError) as caught:
        double({})
    assert 'return x["number"]' in "".join(traceback.format_exception(caught.value))


def test_code_sent_by_value_keeps_its_file_name(plugin: ModuleType) -> None:
    def outer() -> object:
        return lambda: None

    sent(plugin.twice)
    for function in (plugin.twice, outer):
        came = serialize.unpack_bytes(serialize.pack_bytes(function))
        assert came is not function
        assert came.__code__ == function.__code__
        assert came.__code__.co_filename == function.__code__.co_filename
    assert came().__code__.co_filename == __file__
