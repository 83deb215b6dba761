"""What data sets hold beside their data: what is opened when it is used, functions, members, objects that delegate."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import random
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
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


def unchanged(sample: Any) -> Any:
    return sample


def read(loader: Any, note: Note, data: Any, **options: Any) -> None:
    for workers in (0, 2):
        for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged, **options)):
            note(workers, batch)


# Opened when first used, by each worker


class Lazy(Dataset[bytes]):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> bytes:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        return os.pread(self.file.fileno(), 3, index)


@program
def file_that_workers_open_lazily(loader: Any, note: Note) -> None:
    Path("lazy.bin").write_bytes(bytes(range(20)))
    data = Lazy(Path("lazy.bin"))
    for batch in loader(data, 2, num_workers=2):
        note(batch)
    note(data.file is None)


@program
def file_in_memory(loader: Any, note: Note) -> None:
    def ask(self: Any, k: int) -> Any:
        self.file.seek(k)
        return self.file.read(2), self.text.getvalue()

    read(loader, note, Asking(ask, file=io.BytesIO(bytes(range(20))), text=io.StringIO("abc")))


@program
def database_that_workers_open_lazily(loader: Any, note: Note) -> None:
    with contextlib.closing(sqlite3.connect("rows.db")) as connection, connection:
        connection.execute("create table rows (k integer, text)")
        connection.executemany("insert into rows values (?, ?)", [(k, f"row {k}") for k in range(6)])

    class Rows(Dataset[Any]):
        connection: Any = None

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            if self.connection is None:
                self.connection = sqlite3.connect("rows.db")
            return self.connection.execute("select * from rows where k = ?", (index,)).fetchone()

    for batch in loader(Rows(), 3, num_workers=2):
        note(batch)


@program
def loggers(loader: Any, note: Note) -> None:
    logger = logging.getLogger("users.data")
    logger.setLevel(logging.ERROR)
    data = Asking(
        lambda self, _: (self.log.name, self.log.level, self.log is logging.getLogger("users.data")), log=logger
    )
    read(loader, note, data)


@program
def random_generators(loader: Any, note: Note) -> None:
    def ask(self: Any, k: int) -> Any:
        drawn = torch.rand(1, generator=self.torchs).item()
        return k, self.pythons.random(), self.numpys.random(), self.old.rand(), drawn

    for workers in (0, 2):
        data = Asking(
            ask,
            pythons=random.Random(3),
            numpys=np.random.default_rng(4),
            old=np.random.RandomState(5),
            torchs=torch.Generator().manual_seed(6),
        )
        for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged)):
            note(workers, batch)


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


@contextlib.contextmanager
def within(k: int) -> Iterator[int]:
    yield k + 1


LIMIT = 7
COUNTS = {"asked": 0}


def global_things(k: int) -> Any:
    COUNTS["asked"] += 1
    return k, LIMIT, COUNTS["asked"] > 0, len(COUNTS)


@program
def functions_of_every_kind(loader: Any, note: Note) -> None:
    offset = 10

    def local(k: int) -> int:
        return k + offset

    def recursive(k: int) -> int:
        return 1 if k < 2 else k * recursive(k - 1)

    def asking(k: int) -> Any:
        with within(k) as inner:
            return inner

    functions: list[Callable[[int], Any]] = [
        plus,
        lambda k: k - offset,
        local,
        recursive,
        asking,
        global_things,
        functools.partial(plus, b=5),
        functools.partial(local),
        remembered,
        kind_of,
        [3, 1, 2, 5, 6, 7].__getitem__,
        str,
        "a {}".format,
        lambda k: re.compile(r"\d").sub("x", f"a{k}"),
        lambda k: functools.reduce(plus, range(k + 1)),
        functools.wraps(plus)(lambda k: plus(k)),
    ]
    read(loader, note, Asking(lambda self, k: [function(k) for function in self.functions], functions=functions))


class Remembering(Dataset[Any]):
    """Members that keep what they have made."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 6

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def squared(self, k: int) -> int:
        return k * k

    @functools.cached_property
    def table(self) -> list[int]:
        self.made += 1
        return [10, 20, 30, 40, 50, 60]

    @functools.cache  # noqa: B019
    def named(self, k: int) -> str:
        return f"the {k}th"

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "any"

    @kind.register
    def _(self, value: int) -> str:
        return "int"

    @property
    def twice(self) -> int:
        return 2 * self.made

    @staticmethod
    def fixed(k: int) -> int:
        return k + 1

    @classmethod
    def of_class(cls, k: int) -> str:
        return f"{cls.__name__} {k}"

    def __getitem__(self, index: int) -> Any:
        return (
            self.squared(index),
            self.table[index],
            self.named(index),
            self.kind(index),
            self.kind("a"),
            self.twice,
            self.fixed(index),
            self.of_class(index),
        )


@program
def members_that_remember(loader: Any, note: Note) -> None:
    data = Remembering()
    read(loader, note, data)
    note(data.made, data[0])
    read(loader, note, data)


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


@program
def wrapper_that_delegates_what_it_has_not(loader: Any, note: Note) -> None:
    inner = Asking(lambda self, k: (k, self.title), title="inner")
    read(loader, note, Delegating(inner))
    read(loader, note, Delegating(Delegating(inner)))


class Slotted(Dataset[Any]):
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [5, 6, 7]
        self.more = 1

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.values[index], self.more


T = TypeVar("T")


class Base(Dataset[T], Generic[T]):
    registry: dict[str, Any] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        Base.registry[cls.__name__] = options

    def __len__(self) -> int:
        return 3


class Derived(Base[int], colour="red"):
    def __getitem__(self, index: int) -> Any:
        return index, sorted(Base.registry.items()), type(self).__mro__[1].__name__, super().__len__()


class Kept(Dataset[Any]):
    """Leaves out what it can make again."""

    def __init__(self) -> None:
        self.lock, self.kept = threading.Lock(), 5

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return index, self.kept


@program
def classes_of_every_kind(loader: Any, note: Note) -> None:
    class Local(Asking):
        limit = 3

        def __len__(self) -> int:
            return self.limit

    class Meta(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            made = super().__call__(*args, **options)
            made.marked = cls.__name__
            return made

    class Marked(metaclass=Meta):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return index, self.marked

    for data in (Slotted(), Derived(), Kept(), Local(lambda self, k: (k, self.limit)), Marked()):
        read(loader, note, data)
    for data in ("text", range(3), [1.5, 2.5], {0: "a", 1: "b"}, np.arange(6).reshape(3, 2), torch.eye(2)):
        read(loader, note, data)


class Selfish(Dataset[Any]):
    """Is part of itself."""

    def __init__(self) -> None:
        self.me = self
        self.parts = [self, {"whole": self}]
        self.child = Asking(lambda child, k: k, parent=self)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.me is self, self.parts[1]["whole"] is self, self.child.parent is self, self.child[index]  # type: ignore[attr-defined]


@program
def data_sets_that_are_part_of_themselves(loader: Any, note: Note) -> None:
    read(loader, note, Selfish())
    read(loader, note, Asking(lambda self, k: (k, get_worker_info() is None or get_worker_info().dataset is self)))


@program
def weak_references(loader: Any, note: Note) -> None:
    target = Kept()
    data = Asking(lambda self, k: (k, self.weak() is self.target), target=target, weak=weakref.ref(target))
    read(loader, note, data)


@program
def modules_as_attributes(loader: Any, note: Note) -> None:
    data = Asking(
        lambda self, k: (self.m.sqrt(k + 0.0) if hasattr(self.m, "sqrt") else 0, self.np.int8(k)), m=np, np=np
    )
    read(loader, note, data)


@program
def network_as_a_part(loader: Any, note: Note) -> None:
    torch.manual_seed(3)
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()

    def ask(self: Any, k: int) -> Any:
        with torch.no_grad():
            return self.layer(torch.ones(1, 2) * k).round(decimals=4), self.layer.training

    read(loader, note, Asking(ask, layer=layer))


class Lines(IterableDataset[Any]):
    """Holds its file, as an iterable one, shared by all workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        with self.path.open() as file:
            for number, line in enumerate(file):
                if worker is None or number % worker.num_workers == worker.id:
                    yield line.strip()


@program
def lines_of_a_file(loader: Any, note: Note) -> None:
    Path("lines.txt").write_text("".join(f"line {k}\n" for k in range(7)))
    for workers in (0, 2):
        for batch in loader(Lines(Path("lines.txt")), 2, num_workers=workers):
            note(workers, batch)


if __name__ == "__main__":
    run()
