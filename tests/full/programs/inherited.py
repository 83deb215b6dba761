"""What data sets hold that only a fork inherits: open files, locks, connections, and what goes on."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import sqlite3
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def unchanged(sample: Any) -> Any:
    return sample


def read(loader: Any, note: Note, data: Any) -> None:
    for workers in (0, 2):
        for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged)):
            note(workers, batch)


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
def file_that_the_trainer_has_opened_by_looking_at_a_sample(loader: Any, note: Note) -> None:
    Path("looked.bin").write_bytes(bytes(range(20)))
    data = Lazy(Path("looked.bin"))
    note(data[0])
    for batch in loader(data, 2, num_workers=2):
        note(batch)
    note(data.file.closed)
    data.file.close()


@program
def file_that_is_open(loader: Any, note: Note) -> None:
    Path("open.bin").write_bytes(bytes(range(20)))
    with Path("open.bin").open("rb") as file:
        read(loader, note, Asking(lambda self, k: (os.pread(self.file.fileno(), 2, k), self.file.name), file=file))


@program
def temporary_file(loader: Any, note: Note) -> None:
    with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
        file.write(b"0123456789")
        file.flush()
        Path(folder, "inside").write_text("there")
        data = Asking(
            lambda self, k: (os.pread(self.file.fileno(), 2, k), Path(self.folder, "inside").read_text()),
            file=file,
            folder=folder,
        )
        read(loader, note, data)


@program
def mapped_file_of_mmap(loader: Any, note: Note) -> None:
    Path("mapped.bin").write_bytes(bytes(range(20)))
    with Path("mapped.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        read(loader, note, Asking(lambda self, k: self.mapped[k : k + 2], mapped=mapped))


@program
def archive_that_is_open(loader: Any, note: Note) -> None:
    with zipfile.ZipFile("open.zip", "w") as archive:
        for k in range(6):
            archive.writestr(f"{k}.txt", f"the {k}th")
    with zipfile.ZipFile("open.zip") as archive:
        for workers in (0, 1):  # two would read by one position
            data = Asking(lambda self, k: self.archive.read(f"{k}.txt"), archive=archive)
            for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged)):
                note(workers, batch)


@program
def connection_that_is_open(loader: Any, note: Note) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table rows (k integer)")
        connection.executemany("insert into rows values (?)", [(k,) for k in range(6)])
        data = Asking(lambda self, k: self.db.execute("select k from rows where k = ?", (k,)).fetchone(), db=connection)
        read(loader, note, data)


@program
def sockets(loader: Any, note: Note) -> None:
    one, other = socket.socketpair()
    with one, other:
        read(loader, note, Asking(lambda self, _: (self.line.family.name, self.line.fileno() >= 0), line=one))


@program
def locks(loader: Any, note: Note) -> None:
    def ask(self: Any, k: int) -> Any:
        with self.lock, self.again, self.condition:
            return k, self.event.is_set(), self.local.__class__.__name__

    data = Asking(
        ask,
        lock=threading.Lock(),
        again=threading.RLock(),
        condition=threading.Condition(),
        event=threading.Event(),
        local=threading.local(),
    )
    read(loader, note, data)


@program
def generators_and_iterators(loader: Any, note: Note) -> None:
    def counting() -> Iterator[int]:
        yield from itertools.count(100)

    def ask(self: Any, k: int) -> Any:
        return k, next(self.generator), next(self.list), next(self.cycle), next(self.zipped)

    for workers in (0, 2):
        data = Asking(
            ask,
            generator=counting(),
            list=iter([5, 6, 7, 8, 9, 10, 11]),
            cycle=itertools.cycle([1, 2]),
            zipped=zip("abcdefg", range(9), strict=False),
        )
        for batch in tried(loader(data, None, num_workers=workers, collate_fn=unchanged)):
            note(workers, batch)


if __name__ == "__main__":
    run()
