"""What workers have of a data set: whatever it holds, memory that is shared with them, and files that are mapped."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import logging
import mmap
import multiprocessing
import os
import random
import socket
import sqlite3
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Generic, TypeVar

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


def temporary_file(stack: ExitStack) -> Any:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    file.write(b"0123456789")
    file.flush()
    Path(folder, "inside").write_text("there")
    return Asking(
        lambda self, k: (os.pread(file.fileno(), 2, k), Path(self.folder, "inside").read_text()), folder=folder
    )


def mapped_file(stack: ExitStack) -> Any:
    file = stack.enter_context(written("mapped.bin").open("rb"))
    area = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return Asking(lambda self, k: self.area[k : k + 2], area=area)


def opened_archive(stack: ExitStack) -> Any:
    archive = stack.enter_context(zipfile.ZipFile("open.zip", "w"))
    for k in range(6):
        archive.writestr(f"{k}.txt", f"the {k}th")
    return Asking(lambda self, k: self.archive.getinfo(f"{k}.txt").file_size, archive=archive)


def connection(stack: ExitStack) -> Any:
    rows = stack.enter_context(contextlib.closing(sqlite3.connect(":memory:")))
    rows.execute("create table rows (k integer)")
    rows.executemany("insert into rows values (?)", [(k,) for k in range(6)])
    return Asking(lambda self, k: self.rows.execute("select k from rows where k = ?", (k,)).fetchone(), rows=rows)


def socket_pair(stack: ExitStack) -> Any:
    one, other = (stack.enter_context(each) for each in socket.socketpair())
    return Asking(lambda self, _: (self.one.family.name, self.one.fileno() >= 0), one=one, other=other)


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


def random_generators(_: ExitStack) -> Any:
    def ask(self: Any, k: int) -> Any:
        drawn = torch.rand(1, generator=self.torchs).item()
        return k, self.pythons.random(), self.numpys.random(), self.old.rand(), drawn

    pythons, torchs = random.Random(3), torch.Generator().manual_seed(6)
    return Asking(ask, pythons=pythons, numpys=np.random.default_rng(4), old=np.random.RandomState(5), torchs=torchs)


def text_in_memory(_: ExitStack) -> Any:
    return Asking(lambda self, k: (self.file.getvalue()[k:], self.file.tell()), file=io.StringIO("what was written"))


def logger(_: ExitStack) -> Any:
    log = logging.getLogger("users.data")
    log.setLevel(logging.ERROR)
    return Asking(lambda self, _: (self.log.level, self.log is logging.getLogger("users.data")), log=log)


# Functions and classes


def plus(a: int, b: int = 1) -> int:
    return a + b


@functools.cache
def remembered(k: int) -> tuple[int, int]:
    return k, k * k


@functools.singledispatch
def kind_of(value: Any) -> str:
    return "any"


@kind_of.register
def _(value: int) -> str:
    return f"int {value}"


COUNTS = {"asked": 0}


def counted(k: int) -> Any:
    COUNTS["asked"] += 1
    return k, COUNTS["asked"] > 0, len(COUNTS)


def functions(_: ExitStack) -> Any:
    offset = 10

    def recursive(k: int) -> int:
        return 1 if k < 2 else k * recursive(k - 1)

    made: list[Callable[[int], Any]] = [
        *(plus, lambda k: k - offset, recursive, counted, functools.partial(plus, b=5), remembered, kind_of),
        *([3, 1, 2, 5, 6, 7].__getitem__, str, "a {}".format, functools.wraps(plus)(lambda k: plus(k))),
    ]
    return Asking(lambda self, k: [function(k) for function in self.functions], functions=made)


class Remembering(Dataset[Any]):
    """Members that keep what they have made."""

    made = 0

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def squared(self, k: int) -> int:
        return k * k

    @functools.cached_property
    def table(self) -> list[int]:
        self.made += 1
        return [10, 20, 30, 40, 50, 60]

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "any"

    @kind.register
    def _(self, value: int) -> str:
        return "int"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.squared(index), self.table[index], self.kind(index), self.kind("a"), self.made


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


T = TypeVar("T")


class Base(Dataset[T], Generic[T]):
    registry: dict[str, Any] = {}
    __slots__ = ("values",)

    def __init_subclass__(cls, **options: Any) -> None:
        Base.registry[cls.__name__] = options

    def __len__(self) -> int:
        return 3


class Derived(Base[int], colour="red"):
    def __getitem__(self, index: int) -> Any:
        return index, sorted(Base.registry.items()), type(self).__mro__[1].__name__, super().__len__()


class Pickling(Dataset[Any]):
    """A fork asks for no state: what it leaves out is there."""

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


def network(_: ExitStack) -> Any:
    torch.manual_seed(3)
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()

    def ask(self: Any, k: int) -> Any:
        with torch.no_grad():
            return self.layer(torch.ones(1, 2) * k).round(decimals=4), self.layer.training, self.module.sqrt(k)

    return Asking(ask, layer=layer, module=np)


HELD: list[Callable[[ExitStack], Any]] = [
    *(opened_file, temporary_file, mapped_file, opened_archive, connection, socket_pair, locks, generators),
    *(random_generators, text_in_memory, logger, functions, itself, network),
]


@program
def things_that_data_sets_hold(loader: Any, note: Note) -> None:
    for make in HELD:
        with ExitStack() as stack:
            read(loader, note, make.__name__, make(stack))


@program
def data_sets_of_every_kind(loader: Any, note: Note) -> None:
    inner = Asking(lambda self, k: (k, self.title), title="inner")
    for data in (Remembering(), Delegating(Delegating(inner)), Derived(), Pickling()):
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


def shared_memory_of_python(stack: ExitStack) -> tuple[Any, Any]:
    memory = shared_memory.SharedMemory(create=True, size=64)
    stack.callback(memory.unlink)  # it is closed with the arrays
    return np.ndarray((6,), np.float32, memory.buf), np.ndarray((6,), np.uint8, memory.buf, 40)


def shared_tensors(_: ExitStack) -> tuple[Any, Any]:
    return torch.zeros(6).share_memory_(), torch.zeros(8, dtype=torch.uint8).share_memory_()[2:].numpy()


def multiprocessings_arrays(_: ExitStack) -> tuple[Any, Any]:
    return multiprocessing.Array(ctypes.c_double, 6), multiprocessing.Array(ctypes.c_ubyte, 6, lock=False)


def arrays_and_tensors_over_multiprocessings(_: ExitStack) -> tuple[Any, Any]:
    floats, raw = multiprocessing.Array(ctypes.c_double, 6), multiprocessing.RawArray(ctypes.c_ubyte, 6)
    return np.frombuffer(floats.get_obj()), torch.frombuffer(raw, dtype=torch.uint8)


def anonymous_map(_: ExitStack) -> tuple[Any, Any]:
    area = mmap.mmap(-1, 64)
    return np.frombuffer(area, np.float32, 6), np.frombuffer(area, np.uint8, 6, 40)


def memory_of_the_trainers_own(_: ExitStack) -> tuple[Any, Any]:
    """Each worker writes to its copy."""
    return np.zeros(6), torch.zeros(6)


CACHES: list[Callable[[ExitStack], tuple[Any, Any]]] = [
    *(shared_memory_of_python, shared_tensors, multiprocessings_arrays, arrays_and_tensors_over_multiprocessings),
    *(anonymous_map, memory_of_the_trainers_own),
]


@program
def caches_in_memory_of_every_kind(loader: Any, note: Note) -> None:
    for make in CACHES:
        with ExitStack() as stack:
            cache, filled = make(stack)
            data = Cached(cache, filled)
            for epoch in range(2):
                data.fills = epoch == 0
                for batch in tried(loader(data, 2, num_workers=2)):
                    note(make.__name__, epoch, batch)
            note([float(x) for x in cache], [int(x) for x in filled])
            del data, cache, filled


@program
def what_multiprocessing_shares(loader: Any, note: Note) -> None:
    context = multiprocessing.get_context()
    queue, feeding = context.SimpleQueue(), context.Queue()
    reading, writing = context.Pipe(duplex=False)

    def ask(self: Any, k: int) -> int:
        with self.total.get_lock():
            self.total.value += k
        with self.lock, self.semaphore, self.condition:
            self.raw.value = max(self.raw.value, k)
        if k < 2:
            self.barrier.wait(60)
        self.event.set()
        self.queue.put(k)
        self.feeding.put(k)
        if k == 5:
            self.line.send(k)
        return k

    data = Asking(
        ask,
        total=context.Value("i", 0),
        raw=context.Value("i", 0, lock=False),
        lock=context.Lock(),
        semaphore=context.BoundedSemaphore(1),
        condition=context.Condition(),
        barrier=context.Barrier(2),
        event=context.Event(),
        queue=queue,
        feeding=feeding,
        line=writing,
    )
    note(list(tried(loader(data, num_workers=2))))
    note(data.total.value, data.raw.value, data.event.is_set(), reading.recv())  # type: ignore[attr-defined]
    note(sorted(queue.get() for _ in range(6)), sorted(feeding.get(timeout=30) for _ in range(6)))
    feeding.close()
    feeding.join_thread()
    for end in (queue, reading, writing):
        end.close()


@program
def value_that_the_trainer_changes_for_persistent_workers(loader: Any, note: Note) -> None:
    """The length of a curriculum, say."""
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


def loaded(name: str) -> Any:
    torch.save({"rows": torch.arange(60.0).reshape(6, 10)}, name)
    return torch.load(name, mmap=True)["rows"]


MAPPED: dict[str, Callable[[str], Any]] = {
    "itself": lambda name: mapped(name, "r+"),
    "turned": lambda name: mapped(name, "r+").T[:6],
    "as an array": lambda name: np.asarray(mapped(name, "r+")),
    "as a tensor": lambda name: torch.from_numpy(mapped(name, "r+")),
    "copied on write": lambda name: mapped(name, "c"),
    "loaded by torch": loaded,
}


@program
def mapped_files_that_workers_write_to(loader: Any, note: Note) -> None:
    def write(self: Any, k: int) -> Any:
        self.held[k, 0] = -k
        return self.held[k] * 1

    for name, make in MAPPED.items():
        held = make(name)
        for batch in tried(loader(Asking(write, held=held), 2, num_workers=2)):
            note(name, batch)
        note(name, held * 1)


if __name__ == "__main__":
    run()
