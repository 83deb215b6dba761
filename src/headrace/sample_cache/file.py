"""Samples in one file, by number, which several processes read and extend concurrently.

A file has a header, a table with an entry for each number, and the added pieces. Each piece is appended by one call,
which the system does not interleave with others, and its entry is written last. So an existing entry refers to a
complete piece, and a killed process leaves only unused bytes. The checksums of entries and pieces include the number
and the file's identity. Anything else is ignored.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace._util import file_limits as descriptors
from headrace._util.reads import crc32c_of
from headrace.types import Buffer

_MAGIC = b"HRkept01"
_HEAD = struct.Struct("<8s32sQ")  # magic and version; identity; number of samples
_ENTRY = struct.Struct("<QQII")  # start and size of the piece; its checksum; the entry's checksum


class NotAtOnceError(Exception): ...


class SampleFile:
    """A file of samples. Thread-safe.

    Its size may exceed the limit by the piece that each process is writing.

    Args:
        fd: A file prepared by `begin`. Owned and closed by this object.
        identity: 32 bytes that identify these samples.
        room: Returns the file's size limit, called if the last one is too low. It is also sent to workers.
        is_on_disk: True if reading may be slow.
    """

    def __init__(
        self, fd: int, identity: bytes, count: int, room: Callable[[int], int], *, is_on_disk: bool = False
    ) -> None:
        self._fd, self.identity, self.count, self._room = fd, identity, count, room
        self.is_on_disk = is_on_disk
        self._limit = 0  # last result of `room`
        # Opened again for its own file position, which gives the offset of an added piece.
        self._end = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._adding = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (descriptors.send(self._fd), self.identity, self.count, self._room)

    @staticmethod
    def begin(fd: int, identity: bytes, count: int) -> None:
        os.pwrite(fd, _HEAD.pack(_MAGIC, identity, count), 0)
        os.ftruncate(fd, table_end(count))

    @staticmethod
    def is_of(fd: int, identity: bytes, count: int) -> bool:
        """True if the file was created for these samples and has a complete table."""
        is_whole = os.fstat(fd).st_size >= table_end(count)
        return is_whole and os.pread(fd, _HEAD.size, 0) == _HEAD.pack(_MAGIC, identity, count)

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def has_room(self, nbytes: int) -> bool:
        if nbytes > self._limit:
            self._limit = self._room(nbytes)
        return nbytes <= self._limit

    def read(self, number: int, *, flags: int = 0) -> NDArray[np.uint8] | None:
        """Return the piece of a number; None if missing or damaged. `flags` are for `os.preadv`.

        Raises:
            NotAtOnceError: with RWF_NOWAIT, it would have to wait for a disk.
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
        except OSError:  # the disk is failing
            return None
        return data if crc32c_of(data.data) == checksum else None

    def add(self, number: int, data: Buffer) -> bool:
        """Store or replace the piece of a number. Return False if there is no room."""
        size = memoryview(data).nbytes
        if not self.has_room(self.nbytes + size):
            return False
        with self._adding:
            if os.write(self._end, data) != size:  # the disk is full
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at interpreter exit `os` is cleared first
        for fd in (self._fd, getattr(self, "_end", -1)):
            if fd >= 0:
                close(fd)


def table_end(count: int) -> int:
    return _HEAD.size + count * _ENTRY.size


def _received(number: int, identity: bytes, count: int, room: Callable[[int], int]) -> SampleFile:
    return SampleFile(descriptors.receive(number), identity, count, room)
