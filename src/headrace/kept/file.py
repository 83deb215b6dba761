"""Samples in one file, by their numbers, which several processes read and add to at once.

A file has a head, a table with an entry for each number, and behind it what was added, one piece after the other. Each
is appended by one call, which the system does not mix with that of another process, and its entry is written last. So
an entry that is there is of a whole piece, and whoever is killed in between leaves bytes that nobody uses. Entries and
pieces have checksums, which are of the number and of the file's identity, too: whatever else is found there is nothing.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace import descriptors
from headrace.checksums import crc32c_of
from headrace.types import Buffer

_MAGIC = b"HRkept01"
_HEAD = struct.Struct("<8s32sQ")  # magic and version; identity; how many numbers there are
_ENTRY = struct.Struct("<QQII")  # where the piece begins; its bytes; its checksum; that of the entry


class NotAtOnceError(Exception):
    """What is asked for must come from a disk first."""


class SampleFile:
    """A file of samples. Its methods may be called by several threads.

    Its length may go beyond the limit by what each process writes at that moment.

    Args:
        fd: of the file, which `begin` was called for; it is this object's to close.
        identity: what tells these samples from all others: 32 bytes.
        count: how many numbers there are.
        room: says how many bytes the file may have, whenever that seems too little for those that it is given. It goes
            to workers too.
        is_on_disk: whether reading may take long.
    """

    def __init__(
        self, fd: int, identity: bytes, count: int, room: Callable[[int], int], *, is_on_disk: bool = False
    ) -> None:
        self._fd, self.identity, self.count, self._room = fd, identity, count, room
        self.is_on_disk = is_on_disk
        self._limit = 0  # what `room` has said last
        # Opened again: with a position of its own, which tells where a piece has gone.
        self._end = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._adding = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """For workers: the same file."""
        return _received, (descriptors.send(self._fd), self.identity, self.count, self._room)

    @staticmethod
    def begin(fd: int, identity: bytes, count: int) -> None:
        """Write the head of a new file, and make room for its table."""
        os.pwrite(fd, _HEAD.pack(_MAGIC, identity, count), 0)
        os.ftruncate(fd, table_end(count))

    @staticmethod
    def is_of(fd: int, identity: bytes, count: int) -> bool:
        """Whether a file was begun for these samples, and has a whole table."""
        is_whole = os.fstat(fd).st_size >= table_end(count)
        return is_whole and os.pread(fd, _HEAD.size, 0) == _HEAD.pack(_MAGIC, identity, count)

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return os.fstat(self._fd).st_size

    def has_room(self, nbytes: int) -> bool:
        """Whether the file may have so many bytes."""
        if nbytes > self._limit:
            self._limit = self._room(nbytes)
        return nbytes <= self._limit

    def read(self, number: int, *, flags: int = 0) -> NDArray[np.uint8] | None:
        """What was added under a number, as it was then; None: nothing, or it is damaged.

        Args:
            flags: of `os.preadv`. With RWF_NOWAIT it is not waited for a disk.

        Raises:
            NotAtOnceError: it would have to be waited for.
        """
        entry = self._entry(number)
        if entry is None:
            return None
        offset, size, checksum = entry
        if offset + size > self.nbytes:
            return None
        data = np.empty(size, np.uint8)
        try:
            if size and os.preadv(self._fd, [data.data], offset, flags) != size:
                raise BlockingIOError
        except BlockingIOError:
            if flags:
                raise NotAtOnceError from None
            return None
        except OSError:  # the disk is out of order
            return None
        return data if crc32c_of(data.data) == checksum else None

    def add(self, number: int, data: Buffer) -> bool:
        """Keep a piece under a number, in the place of any that is there; whether there is room for it.

        Raises:
            OSError: the disk is full or out of order.
        """
        size = memoryview(data).nbytes
        if not self.has_room(self.nbytes + size):
            return False
        with self._adding:
            if os.write(self._end, data) != size:  # the disk is full now
                return False
            offset = os.lseek(self._end, 0, os.SEEK_CUR) - size
        entry = self._packed(number, offset, size, crc32c_of(data))
        return os.pwrite(self._fd, entry, _HEAD.size + number * _ENTRY.size) == len(entry)

    def __contains__(self, number: int) -> bool:
        return self._entry(number) is not None

    def _entry(self, number: int) -> tuple[int, int, int] | None:
        try:
            packed = os.pread(self._fd, _ENTRY.size, _HEAD.size + number * _ENTRY.size)
        except OSError:
            return None
        if len(packed) != _ENTRY.size:
            return None
        offset, size, checksum, _ = _ENTRY.unpack(packed)
        return (offset, size, checksum) if packed == self._packed(number, offset, size, checksum) else None

    def _packed(self, number: int, offset: int, size: int, checksum: int) -> bytes:
        own = _ENTRY.pack(offset, size, checksum, 0)
        return own[:-4] + struct.pack("<I", crc32c_of(b"%d %b %b" % (number, own, self.identity)))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when this process ends, `os` goes first
        for fd in (self._fd, getattr(self, "_end", -1)):
            if fd >= 0:
                close(fd)


def table_end(count: int) -> int:
    """How long the file of so many samples is with nothing in it."""
    return _HEAD.size + count * _ENTRY.size


def _received(number: int, identity: bytes, count: int, room: Callable[[int], int]) -> SampleFile:
    return SampleFile(descriptors.receive(number), identity, count, room)
