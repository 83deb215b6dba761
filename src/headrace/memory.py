"""Memory that processes share: segments, and leases of parts of them.

A segment is a memfd: it has no name that could stay behind, and is charged to nobody's `/dev/shm`. Where memfd is
missing an unlinked temporary file takes its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from headrace.descriptors import ADVICE, SHORT

_numbers = itertools.count(1)
_LEAST_BYTES = 2**20
_SCALARS = frozenset((int, float, bool, complex, type(None)))  # no bytes to speak of
_TEXT = (bytes, bytearray, str)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_KEPT_BYTES = 256 * 2**20
LARGE_BYTES = 32 * 2**20
"""Of what is larger, each copy counts: it is made as late as can be, and given back at once."""


def mapped(fd: int, size: int) -> memoryview:
    """A segment's memory, writable; its pages are mapped now, in one go, and not by a fault each."""
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))


def mapped_privately(fd: int, size: int) -> memoryview:
    """A segment's memory, of which a page that is written to becomes this process's own; the others stay shared."""
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, and take them from the list."""
    while descriptors:
        os.close(descriptors.pop())


class Segment:
    """A piece of memory that can be mapped by every process that is handed its descriptor.

    Attributes:
        number: its name among the processes of one loader.
        size: in bytes.
        fd: the descriptor to hand on.
        view: all of it, writable.
    """

    __slots__ = ("__weakref__", "fd", "number", "size", "view")

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.view = mapped(fd, size)
        self.number, self.fd, self.size = number, fd, size

    @classmethod
    def create(cls, size: int, number: int | None = None) -> Segment:
        """A new segment of `size` bytes, all of them reserved now: a lack of memory shows here, not as a SIGBUS later.

        Args:
            number: by default the next one of this process.

        Raises:
            MemoryError: the machine does not have the bytes, or this process no descriptor for them.
        """
        try:
            fd = anonymous_file()
        except OSError as error:
            advice = f"; {ADVICE}" if error.errno in SHORT else ""
            raise MemoryError(f"{size} bytes of shared memory cannot be had: {error}{advice}") from error
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            if hasattr(fcntl, "F_ADD_SEALS"):
                with contextlib.suppress(OSError):  # a temporary file cannot be sealed
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(next(_numbers) if number is None else number, fd, size)
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"{size} bytes of shared memory cannot be had: {error}") from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when this process ends, `os` goes first
        if getattr(self, "fd", -1) >= 0:
            close(self.fd)

    def close(self) -> None:
        """Close the descriptor. The memory itself goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")


def anonymous_file() -> int:
    """A descriptor of a file in memory that has no name; where there is no such thing, of a temporary one."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, path = tempfile.mkstemp(prefix="headrace-")
    Path(path).unlink()
    return fd


class Lease:
    """Bytes [offset, offset + size) of a segment, held by as many parties as have retained it."""

    __slots__ = ("_give_back", "holders", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int, give_back: Callable[[Lease], None]) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        self.holders = 1
        self._give_back = give_back

    @property
    def view(self) -> memoryview:
        """The leased bytes, writable."""
        return self.segment.view[self.offset : self.offset + self.size]

    def retain(self) -> Lease:
        """One more party holds the lease."""
        self.holders += 1
        return self

    def release(self) -> None:
        """One party less; with the last one the bytes may be used for something else."""
        self.holders -= 1
        if self.holders == 0:
            self._give_back(self)


class Claim:
    """Bytes of a budget that are held outside the arena, by as many parties as have retained the claim.

    Args:
        count: called with each change of `nbytes`, in bytes.
    """

    __slots__ = ("_count", "holders", "nbytes")

    def __init__(self, nbytes: int, count: Callable[[int], None]) -> None:
        self.nbytes = 0
        self.holders = 1
        self._count = count
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """So many bytes more are held, unless nobody holds the claim any more."""
        if self.holders:
            self.nbytes += nbytes
            self._count(nbytes)

    def retain(self) -> Claim:
        """One more party holds the claim."""
        self.holders += 1
        return self

    def release(self) -> None:
        """One party less; with the last one the bytes may be held by somebody else."""
        self.holders -= 1
        if self.holders == 0:
            self._count(-self.nbytes)


def bytes_in(value: object, deep: int = 4) -> int:
    """About how many bytes a Python object holds: arrays, tensors, bytes and text, also in containers."""
    parts: Collection[object] = ()
    if type(value) is tuple or type(value) is list:
        parts = value
    elif isinstance(value, _TEXT):
        return len(value)
    elif isinstance(nbytes := getattr(value, "nbytes", None), int):
        return nbytes
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    if not deep or _SCALARS.issuperset(map(type, parts)):
        return 0
    return sum([bytes_in(part, deep - 1) for part in parts if type(part) not in _SCALARS])


class Arena:
    """Where inputs live: leases are cut from segments one by one; a segment is used again once all of its have ended.

    One thread uses an arena. `forget` is called with the number of a segment that is gone, so that workers unmap it.
    `budget` is what its user means to hold at most, in bytes; it is not enforced here. `room` tells how much of it is
    left: a new segment is no larger than that, unless a single lease is.
    """

    SEGMENT_BYTES = 16 * 2**20
    SPARE_SEGMENTS = 8
    ALIGNMENT = 64

    def __init__(
        self,
        forget: Callable[[int], None] = lambda _: None,
        budget: int | None = None,
        room: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        # A segment is held until the last of its leases ends: of a small budget each must be a small part.
        self._size = self.SEGMENT_BYTES if budget is None else min(self.SEGMENT_BYTES, max(_LEAST_BYTES, budget // 16))
        self.leased_bytes = 0
        self.segment_bytes = 0
        self._forget, self._room = forget, room
        self._open: Segment | None = None
        self._filled = 0
        self._live: dict[int, int] = {}
        self._segments: dict[int, Segment] = {}
        self._spare: list[Segment] = []

    @property
    def spare_bytes(self) -> int:
        """Bytes of segments that nothing lies in; leases to come are cut from them first."""
        return len(self._spare) * self._size

    def lease(self, size: int) -> Lease:
        """`size` bytes of shared memory, held once.

        Raises:
            MemoryError: the machine does not have the bytes.
        """
        segment, offset = self._place(size)
        self._live[segment.number] += 1
        self.leased_bytes += size
        return Lease(segment, offset, size, self._take_back)

    def trim(self, lease: Lease, size: int) -> None:
        """Keep only the first `size` bytes of a lease: a read turned out shorter than the room made for it."""
        self.leased_bytes -= lease.size - size
        if lease.segment is self._open and lease.offset + _aligned(lease.size) == self._filled:
            self._filled = lease.offset + _aligned(size)
        lease.size = size

    @property
    def count(self) -> int:
        """How many segments something lies in; each has a descriptor."""
        return len(self._segments) - len(self._spare)

    def shrink(self, size: int) -> None:
        """Let spare segments go until no more than `size` bytes are held, as far as that can be."""
        while self._spare and self.segment_bytes > size:
            self._discard(self._spare.pop())

    def close(self) -> None:
        """Close every segment; views that are still alive keep their memory."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._spare.clear()
        self._open = None
        self.segment_bytes = 0

    def _place(self, size: int) -> tuple[Segment, int]:
        if size > self._size:
            while self._spare:
                self._discard(self._spare.pop())
            return self._new(size), 0
        if self._open is None or self._filled + size > self._open.size:
            full = self._open
            self._open = self._spare.pop() if self._spare else self._new(max(size, min(self._size, self._room())))
            self._filled = 0
            if full is not None and not self._live[full.number]:
                self._retire(full)
        offset = self._filled
        self._filled += _aligned(size)
        return self._open, offset

    def _new(self, size: int) -> Segment:
        segment = Segment.create(max(size, 1))
        self._segments[segment.number] = segment
        self._live[segment.number] = 0
        self.segment_bytes += segment.size
        return segment

    def _take_back(self, lease: Lease) -> None:
        self.leased_bytes -= lease.size
        segment = lease.segment
        if segment.number not in self._segments:
            return  # the arena was closed before
        self._live[segment.number] -= 1
        if self._live[segment.number]:
            return
        if segment is self._open:
            self._filled = 0
        else:
            self._retire(segment)

    def _retire(self, segment: Segment) -> None:
        if segment.size == self._size and len(self._spare) < self.SPARE_SEGMENTS:
            self._spare.append(segment)
        else:
            self._discard(segment)

    def _discard(self, segment: Segment) -> None:
        del self._segments[segment.number], self._live[segment.number]
        self.segment_bytes -= segment.size
        segment.close()
        self._forget(segment.number)


def _aligned(size: int) -> int:
    return -(-size // Arena.ALIGNMENT) * Arena.ALIGNMENT


def keep_freed_memory() -> None:
    """Have what is freed be used again, and not given back to the system with each batch.

    glibc maps each large array anew, and every page of it then costs a fault and is cleared: more than half of the time
    in which a collate_fn stacks 38 MB.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Give to the system what `keep_freed_memory` has kept; who needs as much again waits for it to be cleared."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
