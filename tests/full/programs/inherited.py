"""Data sets in workers: open things, shared memory and mapped files."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from watching import Asking, Note, program, read, run, tried, unchanged


def read_samples(loader: Any, note: Note, data: Any) -> None:
    read(loader, note, data, None, workers=(0, 1, 2), collate_fn=unchanged)


# Files, connections, locks, generators: what is open, held or under way in the trainer


def written(name: str) -> Path:
    Path(name).write_bytes(bytes(range(20)))
    return Path(name)


def opened_file(stack: ExitStack) -> Any:
    file = stack.enter_context(written("open.bin").open("rb"))
    return Asking(lambda self, k: (os.pread(self.file.fileno(), 2, k), self.file.name), file=file)


def locks(_: ExitStack) -> Any:
    def ask(self: Any, k: int) -> Any:
        with self.lock, self.again, self.condition:
            return k, self.event.is_set(), hasattr(self.local, "missing")

    lock, again, condition = threading.Lock(), threading.RLock(), threading.Condition()
    return Asking(ask, lock=lock, again=again, condition=condition, event=threading.Event(), local=threading.local())


def generators(_: ExitStack) -> Any:
    def ask(self: Any, k: int) -> Any:
        return k, next(self.generator), next(self.list), next(self.cycle), next(self.zipped)

    numbers = (k for k in itertools.count(100))
    of_list, zipped = iter(list(range(50))), zip("abcdefg" * 9, range(50), strict=False)
    return Asking(ask, generator=numbers, list=of_list, cycle=itertools.cycle([1, 2]), zipped=zipped)


# Data sets


class Delegating(Dataset[Any]):
    """Gives what it has not from what it wraps, as many wrappers of data sets do."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __getitem__(self, index: int) -> Any:
        return self.wrapped[index], self.title

    def __len__(self) -> int:
        return len(self.wrapped)


class Pickling(Dataset[Any]):
    """A fork asks for no state: the lock is there."""

    def __init__(self) -> None:
        self.lock, self.kept = threading.Lock(), 5

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": 0}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return index, self.kept


def itself(_: ExitStack) -> Any:
    def ask(self: Any, k: int) -> Any:
        info = get_worker_info()
        found = (self.me, self.parts[1]["whole"], self.weak(), info.dataset if info else self)
        return k, [one is self for one in found]

    data = Asking(ask)
    data.me, data.parts, data.weak = data, [data, {"whole": data}], weakref.ref(data)  # type: ignore[attr-defined]
    return data


@program
def things_that_data_sets_hold(loader: Any, note: Note) -> None:
    for make in (opened_file, locks, generators, itself):
        with ExitStack() as stack:
            read_samples(loader, note, make(stack))


@program
def data_sets_of_every_kind(loader: Any, note: Note) -> None:
    inner = Asking(lambda self, k: (k, self.title), title="inner")
    plain = ("text", range(3), [1.5, 2.5], {0: "a", 1: "b"}, np.arange(6).reshape(3, 2), torch.eye(2))
    for data in (Delegating(Delegating(inner)), Pickling(), *plain):
        read_samples(loader, note, data)


def read_lazily(data: Any, index: int) -> bytes:
    """Opens the file for the first sample."""
    if data.file is None:
        data.file = written("lazy.bin").open("rb", buffering=0)
    return os.pread(data.file.fileno(), 3, index)


@program
def file_that_workers_open_or_the_trainer_by_looking_at_a_sample(loader: Any, note: Note) -> None:
    data: Any = Asking(read_lazily, file=None)
    note(list(loader(data, 2, num_workers=2)), data.file is None)
    note(data[0], list(loader(data, 2, num_workers=2)), data.file.closed)
    data.file.close()


# Memory that the trainer and its workers share


def cached(data: Any, index: int) -> tuple[float, int]:
    """Keep an object in memory that all workers share."""
    if data.fills:
        data.cache[index] = index + 0.5
        data.filled[index] = 1
    return float(data.cache[index]), int(data.filled[index])


def shared_tensors() -> tuple[Any, Any]:
    return torch.zeros(6).share_memory_(), torch.zeros(8, dtype=torch.uint8).share_memory_()[2:].numpy()


def multiprocessings_arrays() -> tuple[Any, Any]:
    return multiprocessing.Array(ctypes.c_double, 6), multiprocessing.Array(ctypes.c_ubyte, 6, lock=False)


def memory_of_the_trainers_own() -> tuple[Any, Any]:
    """Each worker writes to its copy."""
    return np.zeros(6), torch.zeros(6)


@program
def caches_in_memory_of_every_kind(loader: Any, note: Note) -> None:
    for make in (shared_tensors, multiprocessings_arrays, memory_of_the_trainers_own):
        cache, filled = make()
        data: Any = Asking(cached, cache=cache, filled=filled)
        for fills in (True, False):
            data.fills = fills
            read(loader, note, data, 2, workers=(2,))
        note([float(x) for x in cache], [int(x) for x in filled])


@program
def value_that_the_trainer_changes_for_persistent_workers(loader: Any, note: Note) -> None:
    """For example, the length of a curriculum."""
    epoch = multiprocessing.Value("i", 0)
    data = Asking(lambda self, k: (k, self.epoch.value), epoch=epoch)
    loading = loader(data, 3, num_workers=2, persistent_workers=True)
    for number in range(3):
        epoch.value = number
        for batch in tried(loading):
            note(number, batch)


# Files that are mapped


@program
def mapped_files_that_workers_write_to(loader: Any, note: Note) -> None:
    def write(self: Any, k: int) -> Any:
        self.held[k, 0] = -k
        return self.held[k] * 1

    np.arange(60, dtype=np.float32).tofile("rows")
    held = np.memmap("rows", np.float32, "r+", shape=(6, 10))
    read(loader, note, Asking(write, held=held), 2, workers=(2,))
    note(held * 1)


if __name__ == "__main__":
    run()
