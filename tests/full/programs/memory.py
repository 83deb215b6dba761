"""Memory that the trainer and its workers share, and files that are mapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from watching import Note, program, run, tried


class Asking(Dataset[Any]):
    """What a function says of the data set and the index, as it is."""

    def __init__(self, ask: Callable[..., Any], **things: Any) -> None:
        self.ask = ask
        vars(self).update(things)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.ask(self, index)


class Cached(Dataset[float]):
    """The recipe: what was made once is kept in memory that all workers share."""

    def __init__(self, cache: Any, filled: Any) -> None:
        self.cache, self.filled, self.fills = cache, filled, True

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        if self.fills:
            self.cache[index] = index + 0.5
            self.filled[index] = 1
        return float(self.cache[index]), int(self.filled[index])  # type: ignore[return-value]


def fill_and_read(loader: Any, note: Note, cache: Any, filled: Any) -> None:
    data = Cached(cache, filled)
    for epoch in range(3):
        data.fills = epoch == 0
        for batch in tried(loader(data, 2, num_workers=2)):
            note(epoch, batch)
    note([float(x) for x in cache], [int(x) for x in filled])


@program
def cache_in_arrays_of_multiprocessing(loader: Any, note: Note) -> None:
    floats, bytes_ = multiprocessing.Array(ctypes.c_double, 6), multiprocessing.Array(ctypes.c_ubyte, 6, lock=False)
    fill_and_read(loader, note, floats, bytes_)


@program
def cache_in_numpy_over_arrays_of_multiprocessing(loader: Any, note: Note) -> None:
    floats, raw = multiprocessing.Array(ctypes.c_double, 6), multiprocessing.RawArray(ctypes.c_ubyte, 6)
    fill_and_read(loader, note, np.frombuffer(floats.get_obj()), np.ctypeslib.as_array(raw))


@program
def cache_in_tensors_over_arrays_of_multiprocessing(loader: Any, note: Note) -> None:
    floats, raw = multiprocessing.RawArray(ctypes.c_float, 6), multiprocessing.RawArray(ctypes.c_ubyte, 6)
    cache = torch.from_numpy(np.ctypeslib.as_array(floats))
    fill_and_read(loader, note, cache, torch.frombuffer(raw, dtype=torch.uint8))


@program
def cache_in_shared_tensors_and_their_arrays(loader: Any, note: Note) -> None:
    cache, filled = torch.zeros(6).share_memory_(), torch.zeros(6, dtype=torch.uint8).share_memory_()
    fill_and_read(loader, note, cache, filled)
    cache, filled = torch.zeros(6).share_memory_(), torch.zeros(6, dtype=torch.uint8).share_memory_()
    fill_and_read(loader, note, cache.numpy(), filled[:].numpy())


@program
def cache_in_shared_memory_of_python(loader: Any, note: Note) -> None:
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        cache = np.ndarray((6,), np.float32, memory.buf)
        filled = np.ndarray((6,), np.uint8, memory.buf, 40)
        cache[:] = filled[:] = 0
        fill_and_read(loader, note, cache, filled)
        del cache, filled
    finally:
        with contextlib.suppress(BufferError):
            memory.close()
        memory.unlink()


@program
def cache_in_an_anonymous_map(loader: Any, note: Note) -> None:
    area = mmap.mmap(-1, 64)
    fill_and_read(loader, note, np.frombuffer(area, np.float32, 6), np.frombuffer(area, np.uint8, 6, 40))


@program
def array_of_the_trainers_that_workers_write_to(loader: Any, note: Note) -> None:
    def write(self: Any, k: int) -> Any:
        self.array[k] += 1
        self.tensor[k] += 1
        return float(self.array[k]), float(self.tensor[k])

    data = Asking(write, array=np.zeros(6), tensor=torch.zeros(6))
    for epoch in range(2):
        for batch in loader(data, 2, num_workers=2):
            note(epoch, batch)
    note(data.array, data.tensor)  # type: ignore[attr-defined]


@program
def values_and_locks_of_multiprocessing(loader: Any, note: Note) -> None:
    def count(self: Any, k: int) -> int:
        with self.total.get_lock():
            self.total.value += k
        with self.lock, self.again:
            self.raw.value = max(self.raw.value, k)
        self.event.set()
        return k

    data = Asking(
        count,
        total=multiprocessing.Value("i", 0),
        raw=multiprocessing.Value("i", 0, lock=False),
        lock=multiprocessing.Lock(),
        again=multiprocessing.RLock(),
        event=multiprocessing.Event(),
    )
    for batch in tried(loader(data, 2, num_workers=2)):
        note(batch)
    note(data.total.value, data.raw.value, data.event.is_set())  # type: ignore[attr-defined]


@program
def barriers_and_semaphores_of_multiprocessing(loader: Any, note: Note) -> None:
    def meet(self: Any, k: int) -> int:
        with self.semaphore, self.condition:
            self.condition.notify_all()
        if k < 2:
            self.barrier.wait(60)
        return k

    context = multiprocessing.get_context()
    data = Asking(
        meet, barrier=context.Barrier(2), semaphore=context.BoundedSemaphore(1), condition=context.Condition()
    )
    for batch in tried(loader(data, num_workers=2)):
        note(batch)


@program
def queues_and_pipes_of_multiprocessing(loader: Any, note: Note) -> None:
    def put(self: Any, k: int) -> int:
        self.queue.put(("from a worker", k))
        return k

    queue = multiprocessing.SimpleQueue()
    for batch in tried(loader(Asking(put, queue=queue), 2, num_workers=2)):
        note(batch)
    note(sorted(queue.get() for _ in range(6)) if not queue.empty() else "nothing came")
    queue.close()
    reading, writing = multiprocessing.Pipe(duplex=False)
    for batch in tried(loader(Asking(lambda self, k: self.line.send(k) or k, line=writing), num_workers=1)):
        note(batch)
    note([reading.recv() for _ in range(6)] if reading.poll() else "nothing came")
    reading.close()
    writing.close()


@program
def queue_with_a_feeder(loader: Any, note: Note) -> None:
    def put(self: Any, k: int) -> int:
        self.queue.put(k)
        return k

    queue = multiprocessing.Queue()
    for batch in tried(loader(Asking(put, queue=queue), 2, num_workers=2)):
        note(batch)
    note(sorted(queue.get(timeout=30) for _ in range(6)))
    queue.close()
    queue.join_thread()


@program
def worker_that_is_told_of_epochs(loader: Any, note: Note) -> None:
    """A value that the trainer changes is seen by persistent workers, the length of a curriculum say."""
    epoch = multiprocessing.Value("i", 0)
    data = Asking(lambda self, k: (k, self.epoch.value), epoch=epoch)
    loading = loader(data, 3, num_workers=2, persistent_workers=True)
    for number in range(3):
        epoch.value = number
        for batch in tried(loading):
            note(number, batch)


def mapped(name: str, mode: Any) -> Any:
    np.arange(60, dtype=np.float32).tofile(name)
    return np.memmap(name, np.float32, mode, shape=(6, 10))


@program
def mapped_files_of_numpy(loader: Any, note: Note) -> None:
    made: dict[str, Callable[[Any], Any]] = {
        "itself": lambda m: m,
        "rows": lambda m: m[::2],
        "turned": lambda m: m.T,
        "as an array": np.asarray,
        "as a view": lambda m: m.view(np.int32),
        "as a tensor": torch.from_numpy,
        "as a tensor's rows": lambda m: torch.from_numpy(m)[1:4],
        "of a buffer": lambda m: np.frombuffer(m.base, np.float32).reshape(6, 10),
    }
    for number, (name, make) in enumerate(made.items()):
        held = make(mapped(f"rows-{number}", "r+"))
        for batch in tried(loader(Asking(lambda self, k: self.held[k % len(self.held)], held=held), 2, num_workers=2)):
            note(name, batch)


@program
def mapped_files_that_workers_write_to(loader: Any, note: Note) -> None:
    def write(self: Any, k: int) -> float:
        self.held[k, 0] = -k
        return float(self.held[k, 1])

    made: dict[str, Callable[[Any], Any]] = {"itself": lambda m: m, "array": np.asarray, "tensor": torch.from_numpy}
    for name, make in made.items():
        file = mapped(f"written-{name}", "r+")
        for batch in tried(loader(Asking(write, held=make(file)), 2, num_workers=2)):
            note(name, batch)
        note(name, np.fromfile(f"written-{name}", np.float32).reshape(6, 10)[:, 0])
    own = mapped("copied-on-write", "c")
    for batch in tried(loader(Asking(write, held=own), 2, num_workers=1)):
        note("copied on write", batch)
    note(np.fromfile("copied-on-write", np.float32)[:10], own[0])


@program
def files_that_torch_maps(loader: Any, note: Note) -> None:
    torch.save({"rows": torch.arange(60.0).reshape(6, 10)}, "saved.pt")
    np.arange(60, dtype=np.float32).tofile("raw")
    held = {
        "loaded": torch.load("saved.pt", mmap=True)["rows"],
        "from a file": torch.from_file("raw", size=60, dtype=torch.float32).reshape(6, 10),
        "shared": torch.from_file("raw", shared=True, size=60, dtype=torch.float32).reshape(6, 10),
        "loaded by numpy": np.load(saved("rows.npy"), mmap_mode="r"),
    }
    for name, rows in held.items():
        for batch in tried(loader(Asking(lambda self, k: self.rows[k] * 2, rows=rows), 2, num_workers=2)):
            note(name, batch)


def saved(name: str) -> Path:
    np.save(name, np.arange(60).reshape(6, 10))
    return Path(name)


@program
def large_arrays_that_all_workers_read(loader: Any, note: Note) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(6, -1)
    data = Asking(lambda self, k: (self.array[k, :3], self.tensor[k, -3:], self.part[0, 0]), array=array)
    data.tensor, data.part = torch.from_numpy(array), array[2:]  # type: ignore[attr-defined]
    for batch in loader(data, 2, num_workers=2):
        note(batch)
    note("one memory in the trainer", np.shares_memory(data.array, data.tensor.numpy()))  # type: ignore[attr-defined]


if __name__ == "__main__":
    run()
