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
from watching import Asking, Note, program, run, tried, unchanged


def read(loader: Any, note: Note, name: str, data: Any) -> None:
    for workers in (0, 1, 2):
        for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged)):
            note(name, workers, batch)


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
        return (
            k,
            self.me is self,
            self.parts[1]["whole"] is self,
            self.weak() is self,
            info is None or info.dataset is self,
        )

    data = Asking(ask)
    data.me, data.parts, data.weak = data, [data, {"whole": data}], weakref.ref(data)  # type: ignore[attr-defined]
    return data


@program
def things_that_data_sets_hold(loader: Any, note: Note) -> None:
    for make in (opened_file, locks, generators, itself):
        with ExitStack() as stack:
            read(loader, note, make.__name__, make(stack))


@program
def data_sets_of_every_kind(loader: Any, note: Note) -> None:
    inner = Asking(lambda self, k: (k, self.title), title="inner")
    for data in (Delegating(Delegating(inner)), Pickling()):
        read(loader, note, type(data).__name__, data)
    for plain in ("text", range(3), [1.5, 2.5], {0: "a", 1: "b"}, np.arange(6).reshape(3, 2), torch.eye(2)):
        read(loader, note, type(plain).__name__, plain)


class Lazy(Dataset[bytes]):
    """Opens its file when it is first asked."""

    file: Any = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = written("lazy.bin").open("rb", buffering=0)
        return os.pread(self.file.fileno(), 3, index)


@program
def file_that_workers_open_or_the_trainer_by_looking_at_a_sample(loader: Any, note: Note) -> None:
    data = Lazy()
    note(list(loader(data, 2, num_workers=2)), data.file is None)
    note(data[0], list(loader(data, 2, num_workers=2)), data.file.closed)
    data.file.close()


# Memory that the trainer and its workers share


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
        data = Cached(cache, filled)
        for epoch in range(2):
            data.fills = epoch == 0
            for batch in tried(loader(data, 2, num_workers=2)):
                note(make.__name__, epoch, batch)
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


def mapped(name: str, mode: Any) -> Any:
    np.arange(60, dtype=np.float32).tofile(name)
    return np.memmap(name, np.float32, mode, shape=(6, 10))


@program
def mapped_files_that_workers_write_to(loader: Any, note: Note) -> None:
    def write(self: Any, k: int) -> Any:
        self.held[k, 0] = -k
        return self.held[k] * 1

    held = mapped("rows", "r+")
    for batch in tried(loader(Asking(write, held=held), 2, num_workers=2)):
        note(batch)
    note(held * 1)


if __name__ == "__main__":
    run()
