"""Indexes of shards that were built, on disk at once: a build that is interrupted goes on from them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import anyio
import anyio.to_thread

from headrace.errors import OptionError
from headrace.formats.index.file import Entry
from headrace.formats.index.journal import Journal, journal_record, write_index

_PAUSE_S, _PAUSE_MOST_S = 0.02, 1.0


async def open_spool(path: Path, *, waits: bool = False) -> Spool:
    """The spool at `path`, which is this one's until it is closed.

    Args:
        waits: until nobody else has it.

    Raises:
        OptionError: another process, or another build in this one, has it.
        OSError: the disk refused it.
    """
    pause_s = _PAUSE_S
    while True:
        with anyio.CancelScope(shield=True):  # a spool that nobody gets would stay open
            spool = await anyio.to_thread.run_sync(_opened, path)
        if spool is not None:
            return spool
        if not waits:
            raise OptionError(
                f"another process builds this index (it holds {path}); wait for it, or write to another place"
            )
        await anyio.sleep(pause_s)  # a blocking call that waits for a lock could not be cancelled
        pause_s = min(2 * pause_s, _PAUSE_MOST_S)


class Spool:
    """The shards that were indexed.

    Attributes:
        entries: by name.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file, self._lock = path, file, threading.Lock()
        try:
            journal = Journal(self._file)
            self.entries = {entry.name: entry for entry in journal}
            self._end = journal.end
            self._file.truncate(journal.end)  # what was being written when the process was killed
        except BaseException:
            self._file.close()
            raise

    def add(self, entry: Entry, block: bytes) -> Entry:
        """Keep a shard's index; gives the entry with its place here."""
        record = journal_record(entry, block)
        with self._lock:  # of several shards at once
            self._file.write(record)
            self._file.flush()
            self._end += len(record)
            placed = replace(entry, start=self._end - len(block), length=len(block))
            self.entries[entry.name] = placed
        return placed

    def write_index(self, file: IO[bytes], names: Sequence[str]) -> int:
        """Write the index file of these shards, in this order; gives its bytes."""
        return write_index(file, [self.entries[name] for name in names], self._file)

    def remove(self) -> None:
        """It is not needed any more."""
        self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()  # and with it the lock


def _opened(path: Path) -> Spool | None:
    file = _locked(path)
    return None if file is None else Spool(path, file)


def _locked(path: Path) -> IO[bytes] | None:
    """The file, made if need be, for this caller alone until it is closed; None where another one has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.close()  # its owner has ended, and removed it, since it was opened: another one is the journal by now
