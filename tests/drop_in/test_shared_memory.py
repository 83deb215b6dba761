"""Memory that the user shares between processes is the same memory in workers: what one writes, all see."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from privileges import may_open_any_mapping, without_privileges
from process.waiting import run_script
from torch.utils.data import Dataset

import headrace as hr

COUNT = 8


privileged = pytest.mark.skipif(not may_open_any_mapping(), reason="only the privileged may open such memory again")


@pytest.fixture(scope="module", autouse=True)
def _memory_of_multiprocessing() -> None:
    """It keeps what it has reserved once, for the life of the process."""
    mp.RawArray("b", 2**20)


class Cached(Dataset[int]):
    """Samples that are made once, whoever makes them, and kept in shared memory from then on: 0 where one was made."""

    def __init__(self, cache: Any, **things: Any) -> None:
        self.cache = cache
        vars(self).update(things)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        kept = int(self.cache[index])
        if not kept:
            self.cache[index] = index + 1
        return kept


def of_array() -> Any:
    return mp.Array("q", COUNT)


def over_array() -> Any:
    return np.frombuffer(mp.Array("q", COUNT).get_obj(), np.int64)


def over_array_without_lock() -> Any:
    return np.frombuffer(mp.Array("q", COUNT, lock=False), np.int64)


def of_raw_array() -> Any:
    return mp.RawArray(ctypes.c_longlong, COUNT)


def over_raw_array() -> Any:
    return np.ctypeslib.as_array(mp.RawArray(ctypes.c_longlong, COUNT))


def tensor_over_raw_array() -> Any:
    return torch.frombuffer(mp.RawArray(ctypes.c_longlong, COUNT), dtype=torch.int64)


def over_anonymous_mapping() -> Any:
    return np.frombuffer(mmap.mmap(-1, 8 * COUNT), np.int64)


def tensor_over_anonymous_mapping() -> Any:
    return torch.frombuffer(mmap.mmap(-1, 8 * COUNT), dtype=torch.int64)


def view_of_anonymous_mapping() -> Any:
    return memoryview(mmap.mmap(-1, COUNT))


def shared_tensor() -> Any:
    return torch.zeros(COUNT, dtype=torch.int64).share_memory_()


def array_of_shared_tensor() -> Any:
    return torch.zeros(COUNT, dtype=torch.int64).share_memory_().numpy()


def part_of_shared_tensor() -> Any:
    return torch.zeros(3, 2 * COUNT, dtype=torch.int64).share_memory_()[1, ::2]


def tensor_of_array_of_shared_tensor() -> Any:
    return torch.from_numpy(torch.zeros(COUNT, dtype=torch.int64).share_memory_().numpy())


def parameter_over_shared_memory() -> Any:
    return torch.nn.Parameter(torch.zeros(COUNT, dtype=torch.int64).share_memory_(), requires_grad=False)


def every_other_of_an_array() -> Any:
    return np.frombuffer(mp.RawArray("q", 2 * COUNT + 5), np.int64)[5::2]


def backwards() -> Any:
    return np.frombuffer(mp.RawArray("q", COUNT), np.int64)[::-1]


def field_of_a_structured_array() -> Any:
    kind = np.dtype([("flag", "u1"), ("value", "<i8")])
    return np.frombuffer(mp.RawArray("b", kind.itemsize * COUNT), kind)["value"]


def column_in_fortran_order() -> Any:
    return np.ndarray((COUNT, 3), np.int64, mp.RawArray("q", 3 * COUNT), order="F")[:, 1]


def of_a_class_of_its_own() -> Any:
    class Marked(np.ndarray[Any, Any]):
        mark = ""

    array: Any = np.frombuffer(mp.RawArray("q", COUNT), np.int64).view(Marked)
    array.mark = "kept"
    return array


def ctypes_array_in_a_mapping() -> Any:
    return (ctypes.c_longlong * COUNT).from_buffer(torch.zeros(COUNT, dtype=torch.int64).share_memory_().numpy())


KINDS = [
    over_array,
    over_array_without_lock,
    of_raw_array,
    over_raw_array,
    tensor_over_raw_array,
    shared_tensor,
    array_of_shared_tensor,
    part_of_shared_tensor,
    tensor_of_array_of_shared_tensor,
    parameter_over_shared_memory,
    every_other_of_an_array,
    backwards,
    field_of_a_structured_array,
    column_in_fortran_order,
    of_a_class_of_its_own,
    ctypes_array_in_a_mapping,
    *(
        pytest.param(make, marks=privileged)
        for make in (of_array, over_anonymous_mapping, tensor_over_anonymous_mapping, view_of_anonymous_mapping)
    ),
]
STYLES: dict[str, dict[str, Any]] = {
    "default": {},
    "persistent": {"persistent_workers": True},
    "economic": {"economic": True},
}


def fill_and_read_again(cache: Any, **options: Any) -> None:
    """Workers fill in the first epoch what they read in the second; the trainer reads and writes it, too."""
    with hr.DataLoader(Cached(cache), batch_size=2, num_workers=2, **options) as loader:
        assert [value for batch in loader for value in batch.tolist()] == [0] * COUNT, "nothing was there yet"
        assert [int(value) for value in cache] == list(range(1, COUNT + 1)), "what workers wrote the trainer sees"
        assert [value for batch in loader for value in batch.tolist()] == list(range(1, COUNT + 1)), "and each other"
        for index in range(COUNT):
            cache[index] = 100 + index
        assert [value for batch in loader for value in batch.tolist()] == [100 + index for index in range(COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS)
def test_cache_in_shared_memory_is_filled_by_workers_and_read_by_them(make: Callable[[], Any]) -> None:
    fill_and_read_again(make(), persistent_workers=True)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("make", [over_array, array_of_shared_tensor, part_of_shared_tensor])
def test_cache_recipe_holds_in_every_style_of_workers(make: Callable[[], Any], style: str) -> None:
    fill_and_read_again(make(), **STYLES[style])


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=8 * COUNT)
    yield memory
    memory.unlink()
    gc.collect()  # of views that are still there
    memory.close()


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_cache_in_named_shared_memory_is_filled_and_read(shared: SharedMemory, style: str) -> None:
    fill_and_read_again(shared.buf[:COUNT], **STYLES[style])
    shared.buf[:] = bytes(shared.size)
    fill_and_read_again(np.ndarray(COUNT, np.int64, shared.buf), **STYLES[style])


def test_shared_memory_object_is_the_same_memory_though_its_name_is_gone_by_then() -> None:
    def add(self: Any) -> tuple[int, int]:
        self.memory.buf[0] += 1
        return self.memory.size, self.memory.buf[1]

    memory = SharedMemory(create=True, size=2)
    memory.buf[1] = 7
    memory.unlink()
    assert told(Asked(add, memory=memory)) == [(2, 7)] * COUNT
    assert memory.buf[0] >= COUNT // 2, "of two workers each may have overtaken the other"
    memory.close()


class Asked(Cached):
    """What a function says of the data set, once for each sample."""

    def __init__(self, ask: Callable[[Any], Any], **things: Any) -> None:
        super().__init__(None, ask=ask, **things)

    def __getitem__(self, index: int) -> Any:
        return vars(self)["ask"](self)


def told(dataset: Dataset[Any], **options: Any) -> list[Any]:
    """What workers say, without any collation."""
    options = {"num_workers": 2, **options}
    return list(hr.DataLoader(dataset, None, collate_fn=lambda sample: sample, **options))


def mappings_of(name: str) -> int:
    """How many mappings of this process have `name` in their lines."""
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_arrays_over_one_mapping_are_one_mapping_in_a_worker() -> None:
    def look(self: Any) -> tuple[int, int, bool]:
        self.first[0] = 5
        return mappings_of(self.name), int(self.parts[0][0]), np.shares_memory(self.first, self.parts[0])

    tensor = torch.zeros(100).share_memory_()
    name = next(
        line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/torch" in line
    )
    array = tensor.numpy()
    data = Asked(look, first=array, parts=[array[:50], array[10:60:2], array[::-1], memoryview(array)], name=name)
    assert set(told(data)) == {(1, 5, True)}


def test_tensors_over_one_storage_share_one_in_a_worker_and_know_that_it_is_shared() -> None:
    def look(self: Any) -> tuple[bool, bool, int]:
        same = self.whole.untyped_storage().data_ptr() == self.part.untyped_storage().data_ptr()
        return same, self.whole.is_shared() and self.part.is_shared(), self.part.storage_offset()

    whole = torch.zeros(10, 10).share_memory_()
    assert set(told(Asked(look, whole=whole, part=whole.T[3:]))) == {(True, True, 3)}


@pytest.mark.slow
@pytest.mark.may_leave(
    processes="torch_shm_manager", files="torch-shm-dir", descriptors="socket:", reason="torch keeps it while it lives"
)
def test_tensor_shared_by_a_file_stays_so_and_is_not_moved() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.zeros(COUNT, dtype=torch.int64).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    address = tensor.data_ptr()
    fill_and_read_again(tensor)
    assert tensor.data_ptr() == address


def test_batch_that_is_a_view_of_shared_memory_is_a_snapshot() -> None:
    def write(self: Any) -> Any:
        self.array[0] += 1
        return self.array, torch.from_numpy(self.array)

    array = over_array()
    batches = told(Asked(write, array=array), num_workers=1)
    array[0] = -1
    assert [int(part[0]) for batch in batches for part in batch] == [k for k in range(1, COUNT + 1) for _ in range(2)]


class Numbers(hr.AsyncDataset):
    def __len__(self) -> int:
        return COUNT

    async def aget(self, index: int) -> int:
        return index


@pytest.mark.slow
@pytest.mark.parametrize("make", [over_array, of_raw_array, part_of_shared_tensor, every_other_of_an_array])
def test_memory_that_functions_of_a_stream_capture_is_the_same_in_all_workers(make: Callable[[], Any]) -> None:
    cache = make()

    def kept(index: int) -> int:
        value = int(cache[index])
        if not value:
            cache[index] = index + 1
        return value

    with hr.DataLoader(Numbers().map(kept), batch_size=2, num_workers=2) as loader:
        assert [value for batch in loader for value in batch.tolist()] == [0] * COUNT
        assert [int(value) for value in cache] == list(range(1, COUNT + 1))
        assert [value for batch in loader for value in batch.tolist()] == list(range(1, COUNT + 1))


def test_memory_that_takes_the_place_of_other_is_used_from_the_next_epoch_on() -> None:
    caches = [torch.zeros(COUNT, dtype=torch.int64).share_memory_() for _ in range(3)]
    current = caches[0].numpy()

    def mark(index: int) -> int:
        current[index] += 1
        return index

    with hr.DataLoader(Numbers().map(mark), batch_size=2, num_workers=2) as loader:
        for cache in caches:
            current = cache.numpy()  # of one size with the last, at the same place in its mapping
            assert len(list(loader)) == COUNT // 2
            assert cache.tolist() == [1] * COUNT
    assert [cache.tolist() for cache in caches] == [[1] * COUNT] * 3


def test_memory_that_collate_fn_and_worker_init_fn_use_is_shared() -> None:
    begun, made = over_array(), shared_tensor()

    def init(number: int) -> None:
        begun[number] = 1

    def collate(samples: list[int]) -> list[int]:
        made[samples[0]] = 1
        return samples

    for options in ({}, {"economic": True}):
        begun[:] = made[:] = 0
        with hr.DataLoader(
            list(range(COUNT)), 2, num_workers=2, collate_fn=collate, worker_init_fn=init, **options
        ) as it:
            assert len(list(it)) == COUNT // 2
        assert begun.tolist() == [1, 1, *[0] * (COUNT - 2)]
        assert made.tolist() == [1, 0] * (COUNT // 2)


def test_many_shared_tensors_travel_and_their_descriptors_are_closed() -> None:
    def look(self: Any) -> tuple[int, int]:
        for number, tensor in enumerate(self.tensors):
            assert int(tensor[0]) == number
        return len(self.tensors), len(os.listdir("/proc/self/fd"))

    tensors = [torch.full((2,), number).share_memory_() for number in range(300)]
    for count, descriptors in told(Asked(look, tensors=tensors)):
        assert count == 300
        assert descriptors < 300 + 50, "one each, that torch keeps, and what the worker had"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader worker .* exited:RuntimeWarning")
@pytest.mark.parametrize("style", STYLES)
def test_worker_that_takes_the_place_of_another_has_the_same_memory(style: str) -> None:
    deaths = over_array()

    def die_once(index: int) -> int:
        deaths[index] += 1
        if index == 3 and deaths[index] == 1:
            os._exit(1)
        return int(deaths[index])

    class Data(Cached):
        def __getitem__(self, index: int) -> int:
            return die_once(index)

    with hr.DataLoader(Data(None), batch_size=None, num_workers=2, **STYLES[style]) as loader:
        values = [int(value) for value in loader]
    assert values[3] == 2, "the death that the one worker had counted, the other one saw"
    assert deaths[3] == 2


def test_mapping_itself_is_the_same_memory_and_goes_on_at_its_place(tmp_path: Path) -> None:
    def read_and_write(self: Any) -> tuple[bytes, int]:
        self.mapping[0] = 5
        return self.mapping.read(3), len(self.mapping)

    (tmp_path / "file").write_bytes(bytes(range(100)))
    with (tmp_path / "file").open("r+b") as file, mmap.mmap(file.fileno(), 50) as mapping:
        mapping.seek(10)
        assert told(Asked(read_and_write, mapping=mapping), num_workers=1)[:2] == [(b"\n\v\f", 50), (b"\r\16\17", 50)]
        assert mapping[0] == 5


class Handle:
    """As libraries write them: multiprocessing is told how its children get it."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, COUNT)
        self.fd = fd


def reduced_handle(handle: Handle) -> Any:
    return made_handle, (reduction.DupFd(handle.fd),)


def made_handle(duplicate: Any) -> Handle:
    return Handle(duplicate.detach())


def test_what_a_library_registers_for_children_of_multiprocessing_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reduction.ForkingPickler._extra_reducers, Handle, reduced_handle)
    fd = os.memfd_create("of the test")
    os.ftruncate(fd, COUNT)
    handle = Handle(fd)
    fill_and_read_again(memoryview(handle.memory))
    handle.memory[:] = bytes(COUNT)

    def add(self: Any) -> None:
        self.handle.memory[0] += 1

    told(Asked(add, handle=handle), num_workers=1)
    assert handle.memory[0] == COUNT
    os.close(fd)


def test_ctypes_array_of_one_process_is_copied() -> None:
    array = (ctypes.c_int * 2 * 3)()
    array[2][1] = 7
    assert told(Asked(lambda self: self.array[2][1], array=array)) == [7] * COUNT


@pytest.mark.slow
def test_more_descriptors_than_may_be_on_their_way_are_sent_one_after_the_other() -> None:
    code, out, err = run_script(f"""
        import resource
        import sys
        import warnings
        sys.path.append({str(Path(__file__).parents[1])!r})
        from privileges import without_privileges

        class Data(torch.utils.data.Dataset):
            def __init__(self):
                self.tensors = [torch.full((1,), k).share_memory_() for k in range(100)]
            def __len__(self):
                return 16
            def __getitem__(self, index):
                return sum(int(tensor) for tensor in self.tensors)

        warnings.simplefilter("ignore")  # so many workers on so few processors
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
        with without_privileges():
            for options in (dict(), dict(economic=True)):
                data = Data()
                print(sum(int(batch.sum()) for batch in hr.DataLoader(data, 2, num_workers=6, **options)))
                del data
    """)
    assert (code, err) == (0, "")
    assert out.split() == [str(16 * 4950)] * 2


def test_threads_with_copies_of_a_data_set_share_its_memory() -> None:
    class Stateful(Cached):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    cache = over_array()
    list(hr.DataLoader(Stateful(cache), batch_size=2, num_workers=2, workers="thread"))
    assert cache.tolist() == list(range(1, COUNT + 1))


def test_array_of_a_class_keeps_its_class_and_attributes() -> None:
    def look(self: Any) -> tuple[str, str, bool]:
        return type(self.array).__name__, self.array.mark, self.array.flags.writeable

    array = of_a_class_of_its_own()
    array.flags.writeable = False
    assert set(told(Asked(look, array=array))) == {("Marked", "kept", False)}


def test_masked_array_over_shared_memory_is_an_error_by_name() -> None:
    array = np.ma.MaskedArray(over_array(), mask=[False] * COUNT)
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.array \(a numpy\.ma.*MaskedArray\)"):
        told(Asked(len, array=array), fallback="error")


@pytest.mark.parametrize("make", [over_anonymous_mapping, tensor_over_anonymous_mapping, view_of_anonymous_mapping])
def test_memory_that_cannot_be_opened_again_is_an_error_by_name(make: Callable[[], Any]) -> None:
    data = Asked(len, parts=[None, {"numbers": make()}])
    with without_privileges():
        assert not may_open_any_mapping()
        with pytest.raises(hr.CannotCarryError, match=r"dataset\.parts\[1\]\['numbers'\] \(a .*processes share"):
            told(data, fallback="error")


def test_memory_that_cannot_be_opened_again_is_an_error_in_a_stream() -> None:
    array = over_anonymous_mapping()

    def first(index: int) -> int:
        return int(array[index])

    told_by_name = r"map\(first\)\.<variable array> \(a numpy\.ndarray\).* processes share"
    with without_privileges(), hr.DataLoader(Numbers().map(first), batch_size=2, num_workers=2) as loader:
        with pytest.raises(hr.CannotCarryError, match=told_by_name):
            list(loader)


def test_anonymous_memory_of_one_process_is_copied_as_ever() -> None:
    array = np.frombuffer(mmap.mmap(-1, 800, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int64)
    array[5] = 5
    with without_privileges():
        assert told(Asked(lambda self: int(self.array[5]), array=array)) == [5] * COUNT
