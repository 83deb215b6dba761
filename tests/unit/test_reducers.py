"""Test what reaches workers that pickle refuses or changes."""

from __future__ import annotations

import functools
import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import CannotCarryError
from headrace.torch_compat import serialize


def test_function_with_a_memory_begins_with_an_empty_one() -> None:
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
def test_attributes_go_along(make: Callable[[], Any]) -> None:
    plain, measured = make(), make()
    measured.unit = "m"
    first, second = serialize.copied([plain, measured])
    assert (type(second), second.unit, second.tolist()) == (type(measured), "m", [0, 0])
    assert not hasattr(first, "unit")


def test_tensors_of_one_shared_storage_stay_so() -> None:
    whole = torch.zeros(10, dtype=torch.int64).share_memory_()
    one, other = serialize.copied((whole, whole[4:]))
    other[0] = 5
    assert whole[4] == one[4] == 5


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
