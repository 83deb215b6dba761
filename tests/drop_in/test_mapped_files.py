"""Files that are mapped are mapped again by workers: nothing is copied, and what is written reaches the file."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.asked import Asked, told
from privileges import without_privileges

import headrace as hr
from headrace.torch_compat import serialize

COUNT = 100_000  # of 8 bytes each: many pages
BEGIN = np.arange(COUNT, dtype=np.int64)


def is_mapped(path: str) -> bool:
    return any(line.endswith(f" {path}") for line in Path("/proc/self/maps").read_text().splitlines())


def saved(path: Path) -> Any:
    torch.save({"numbers": torch.from_numpy(BEGIN.copy())}, path)
    return torch.load(path, mmap=True)["numbers"]


def raw(path: Path) -> Path:
    BEGIN.tofile(path)
    return path


def mapping(path: Path, access: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


READ: dict[str, Callable[[Path], Any]] = {
    "torch.load": saved,
    "torch.from_file": lambda path: torch.from_file(str(raw(path)), size=COUNT, dtype=torch.int64),
    "memmap": lambda path: np.memmap(raw(path), np.int64, "r"),
    "memmap that keeps changes to itself": lambda path: np.memmap(raw(path), np.int64, "c"),
    "asarray of a memmap": lambda path: np.asarray(np.memmap(raw(path), np.int64, "r")),
    "view of a memmap": lambda path: np.memmap(raw(path), np.int64, "r").view(np.ndarray),
    "part of a view of a memmap": lambda path: np.memmap(raw(path), np.int64, "r").view("u1")[:].view(np.int64)[:],
    "tensor of a memmap": lambda path: torch.from_numpy(np.memmap(raw(path), np.int64, "r+")),
    "frombuffer of a mapping": lambda path: np.frombuffer(mapping(raw(path), mmap.ACCESS_READ), np.int64),
    "memory of a mapping": lambda path: memoryview(mapping(raw(path), mmap.ACCESS_READ)).cast("q"),
    "npy": lambda path: (np.save(path.with_suffix(".npy"), BEGIN), np.load(path.with_suffix(".npy"), mmap_mode="r"))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_file_is_mapped_and_not_copied(make: Callable[[Path], Any], tmp_path: Path) -> None:
    def look(self: Any) -> tuple[bool, int, bool]:
        path = next(line.split()[5] for line in self.maps() if self.folder in line)
        return is_mapped(path), int(self.numbers[70_000]), len(self.numbers) == COUNT

    def maps() -> list[str]:
        return [*Path("/proc/self/maps").read_text().splitlines(), "0 0 0 0 0 nothing/" + str(tmp_path)]

    data = Asked(look, numbers=make(tmp_path / "numbers.bin"), maps=maps, folder=str(tmp_path))
    assert set(told(data)) == {(True, 70_000, True)}


WRITTEN: dict[str, Callable[[Path], Any]] = {
    "memmap": lambda path: np.memmap(path, np.int64, "r+"),
    "asarray of a memmap": lambda path: np.asarray(np.memmap(path, np.int64, "r+")),
    "tensor of a memmap": lambda path: torch.from_numpy(np.memmap(path, np.int64, "r+")),
    "part of a memmap": lambda path: np.memmap(path, np.int64, "r+", offset=mmap.ALLOCATIONGRANULARITY + 8)[::2][::-1],
    "torch.from_file": lambda path: torch.from_file(str(path), shared=True, size=COUNT, dtype=torch.int64),
    "frombuffer of a mapping": lambda path: np.frombuffer(mapping(path, mmap.ACCESS_WRITE), np.int64),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", WRITTEN.values(), ids=WRITTEN)
def test_what_workers_write_to_a_mapped_file_reaches_it(make: Callable[[Path], Any], tmp_path: Path) -> None:
    def write(self: Any) -> None:
        self.numbers[-1] = -7
        if isinstance(self.numbers, np.memmap):
            self.numbers.flush()

    numbers = make(raw(tmp_path / "numbers.bin"))
    told(Asked(write, numbers=numbers))
    assert int(numbers[-1]) == -7
    assert (np.fromfile(tmp_path / "numbers.bin", np.int64) == -7).sum() == 1


def test_memmap_is_one_in_a_worker_too(tmp_path: Path) -> None:
    def look(self: Any) -> tuple[Any, ...]:
        part = self.part
        return type(part), part.filename, part.mode, part.flags.writeable, part._mmap is part.base, part[:2].tolist()

    path = raw(tmp_path / "numbers.bin")
    for mode in ("r", "r+"):
        data = Asked(look, part=np.memmap(path, np.int64, mode)[5_000:6_000:3])
        assert set(map(str, told(data))) == {str((np.memmap, path, mode, mode == "r+", True, [5_000, 5_003]))}


def test_changes_that_are_the_trainers_own_travel_as_a_copy(tmp_path: Path) -> None:
    def look(self: Any) -> tuple[list[int], list[int], list[int]]:
        return tuple([int(value) for value in part[:2]] for part in (self.loaded, self.kept, self.later))

    loaded = saved(tmp_path / "numbers.pt")
    loaded[1] = -1
    kept = np.memmap(raw(tmp_path / "numbers.bin"), np.int64, "c")
    kept[0] = -2
    data = Asked(look, loaded=loaded, kept=kept[:10], later=kept[50_000:])
    assert told(data) == [([0, -1], [-2, 1], [50_000, 50_001])] * 4


def test_private_mapping_in_a_worker_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    def write(self: Any) -> int:
        self.loaded[3] = self.kept[3] = -1
        return int(self.loaded[3] + self.kept[3])

    data = Asked(write, loaded=saved(tmp_path / "a.pt"), kept=np.memmap(raw(tmp_path / "b"), np.int64, "c"))
    assert told(data) == [-2] * 4
    assert torch.load(tmp_path / "a.pt")["numbers"][3] == 3
    assert np.fromfile(tmp_path / "b", np.int64)[3] == 3


@pytest.mark.parametrize("is_replaced", [False, True])
def test_file_that_is_not_there_any_more_is_the_one_that_was_mapped(is_replaced: bool, tmp_path: Path) -> None:
    path = raw(tmp_path / "numbers.bin")
    read = np.memmap(path, np.int64, "r")
    private = torch.from_file(str(path), size=COUNT, dtype=torch.int64)
    path.unlink()
    if is_replaced:
        np.full(COUNT, -1).tofile(path)
    data = Asked(lambda self: (int(self.read[42]), int(self.private[42])), read=read, private=private)
    assert told(data) == [(42, 42)] * 4


def test_replaced_file_that_nothing_leads_to_is_an_error_where_it_was_shared(tmp_path: Path) -> None:
    path = raw(tmp_path / "numbers.bin")
    numbers = torch.from_file(str(path), shared=True, size=COUNT, dtype=torch.int64)
    np.full(COUNT, -1).tofile(tmp_path / "other")
    (tmp_path / "other").rename(path)
    with without_privileges(), pytest.raises(hr.CannotCarryError, match=r"dataset\.numbers \(a torch.Tensor\)"):
        told(Asked(lambda self: int(self.numbers[42]), numbers=numbers), fallback="error")


def test_replaced_file_that_nothing_leads_to_travels_as_a_copy_where_it_was_private(tmp_path: Path) -> None:
    path = raw(tmp_path / "numbers.bin")
    numbers = torch.from_file(str(path), size=COUNT, dtype=torch.int64)
    np.full(COUNT, -1).tofile(tmp_path / "other")
    (tmp_path / "other").rename(path)
    with without_privileges():
        assert told(Asked(lambda self: int(self.numbers[42]), numbers=numbers)) == [42] * 4


def test_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    numbers = np.memmap(raw(tmp_path / "numbers.bin"), np.int64, "r")
    with (tmp_path / "numbers.bin").open("r+b") as file:
        file.truncate(8 * 1024)
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.numbers .*become shorter"):
        told(Asked(lambda self: int(self.numbers[0]), numbers=numbers), fallback="error")


def test_more_mapped_files_than_descriptors_are_sent_go_by_their_names(tmp_path: Path) -> None:
    files = []
    for number in range(200):
        np.full(4, number).tofile(tmp_path / f"{number}.bin")
        files.append(torch.from_file(str(tmp_path / f"{number}.bin"), size=4, dtype=torch.int64))
    numbers = list(range(200))
    assert told(Asked(lambda self: [int(file[0]) for file in self.files], files=files)) == [numbers] * 4


def test_file_of_a_name_with_spaces_and_line_breaks_is_mapped(tmp_path: Path) -> None:
    path = raw(tmp_path / "a name (deleted)\nof two lines \\012 ")
    numbers = torch.from_file(str(path), shared=True, size=COUNT, dtype=torch.int64)
    told(Asked(lambda self: self.numbers.fill_(5), numbers=numbers))
    assert set(np.fromfile(path, np.int64)) == {5}


@pytest.fixture
def _nothing_is_known_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that does not say what is mapped."""
    monkeypatch.setattr(serialize, "mappings_are_known", lambda: False)


@pytest.mark.usefixtures("_nothing_is_known_of_mappings")
def test_memmaps_and_shared_tensors_are_mapped_where_the_system_does_not_say_what_is(tmp_path: Path) -> None:
    def write(self: Any) -> tuple[int, bool, bool]:
        self.numbers[1] = self.shared[1] = -1
        return int(self.other[2]), self.shared.is_shared(), is_mapped(str(self.numbers.filename))

    shared = torch.zeros(4).share_memory_()
    numbers = np.memmap(raw(tmp_path / "numbers.bin"), np.int64, "r+")
    data = Asked(write, numbers=numbers[:10], shared=shared, part=shared[1:], other=np.arange(3))
    assert told(data) == [(2, True, True)] * 4
    assert (int(numbers[1]), int(shared[1])) == (-1, -1)
