"""Memory shared between processes, and limits of memory and of open files.

Memory comes in segments, and leases are parts of segments. A segment is a memfd. It has no name that could remain after
a crash, and does not count against `/dev/shm`. Without memfd an unlinked temporary file is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from headrace.errors import OptionError

SHORT = (errno.EMFILE, errno.ENFILE)
ADVICE = "raise the limit (`ulimit -n 4096` in the shell that starts this process)"
OF_A_LOADER = 20  # its loop, its memory for functions, its connection to the fork server
OF_A_WORKER = 3  # its socket, and its process
_FEWEST_READS, _FEWEST_SEGMENTS = 4, 4


def descriptor_limit() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 512
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def free_descriptors() -> int:
    try:
        is_open = sum(1 for _ in os.scandir("/proc/self/fd"))
    except OSError:
        is_open = 64
    return descriptor_limit() - is_open


def require_descriptors(workers: int, *, reads: bool) -> None:
    """Raise early if descriptors will not suffice.

    Args:
        reads: True if the loader fetches data, which takes connections and memory segments.

    Raises:
        OptionError: too few descriptors are free.
    """
    needed = OF_A_WORKER * workers + OF_A_LOADER + (_FEWEST_READS + _FEWEST_SEGMENTS if reads else 0)
    if needed > (room := free_descriptors()):
        raise OptionError(
            f"num_workers={workers} needs some {needed} file descriptors, and this process can open {max(room, 0)} "
            f"more of the {descriptor_limit()} that it may have: {ADVICE}, or have fewer workers"
        )


def reads_at_most(workers: int) -> int:
    """Return the maximum number of concurrent reads: half of what workers leave."""
    return max(_FEWEST_READS, _left_by(workers) // 2)


def segments_at_most(workers: int) -> int:
    """Return the maximum number of shared-memory segments: a quarter of what workers leave."""
    return max(_FEWEST_SEGMENTS, _left_by(workers) // 4)


def _left_by(workers: int) -> int:
    return free_descriptors() - OF_A_WORKER * workers - OF_A_LOADER


# Descriptors sent to workers along with a pickle, which refers to them by index.


class _Now(threading.local):
    sent: list[int] | None = None
    received: Sequence[int] = ()


_now = _Now()


@contextlib.contextmanager
def sending_descriptors(descriptors: list[int]) -> Iterator[None]:
    """Return a context of pickling for workers, which collects copies of pickled descriptors."""
    before, _now.sent = _now.sent, descriptors
    try:
        yield
    finally:
        _now.sent = before


def are_descriptors_sent() -> bool:
    return _now.sent is not None


def send_descriptor(fd: int) -> int:
    """Return the index by which a worker receives a descriptor. TypeError outside `sending_descriptors`."""
    if _now.sent is None:
        raise TypeError("an open file can be sent to workers alone")
    _now.sent.append(os.dup(fd))
    return len(_now.sent) - 1


@contextlib.contextmanager
def receiving_descriptors(descriptors: Sequence[int]) -> Iterator[None]:
    """Return a context of unpickling with these descriptors, which stay the caller's."""
    before, _now.received = _now.received, descriptors
    try:
        yield
    finally:
        _now.received = before


def receive_descriptor(number: int) -> int:
    return os.dup(_now.received[number])


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory, or the lowest limit of the control groups of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the possible limit files of each control group of the process and of its parents.

    A container sees its own group as the root or, in the namespace of the host, by its full path.
    """
    groups = [("", "/"), ("memory", "/")]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                groups.append(("memory" if controllers else "", path))
    for controller, path in groups:
        mounted = root / "sys/fs/cgroup" / controller
        name = "memory.limit_in_bytes" if controller else "memory.max"
        inside = PurePosixPath("/", path).relative_to("/")
        for group in (inside, *inside.parents):
            yield mounted / group / name


_numbers = itertools.count(1)
_ALIGNMENT = 64
_LEAST_BYTES = 2**20
_SCALARS = frozenset((int, float, bool, complex, type(None)))  # counted as 0 bytes
_TEXT = (bytes, bytearray, str)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_KEPT_BYTES = 256 * 2**20
LARGE_BYTES = 32 * 2**20
"""Larger objects are copied as late as possible, and their memory is freed immediately."""


def mapped(fd: int, size: int) -> memoryview:
    """Map a segment, writable. Populates all pages now, which avoids a fault per page."""
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))


def mapped_privately(fd: int, size: int) -> memoryview:
    """Map a segment copy-on-write: a page that is written to becomes private."""
    return memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class Segment:
    """Memory that any process with its descriptor can map. `number` is unique per loader."""

    __slots__ = ("__weakref__", "fd", "number", "size", "view")

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.view = mapped(fd, size)
        self.number, self.fd, self.size = number, fd, size

    @classmethod
    def create(cls, size: int, number: int | None = None) -> Segment:
        """Create a segment of `size` bytes, all reserved now, so that no SIGBUS follows later.

        Raises:
            MemoryError: the machine lacks the memory, or this process a descriptor.
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` is cleared first
        if getattr(self, "fd", -1) >= 0:
            close(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")


def anonymous_file() -> int:
    """Create an unnamed memory file, or an unlinked temporary file. Returns the descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, path = tempfile.mkstemp(prefix="headrace-")
    Path(path).unlink()
    return fd


class Lease:
    """Bytes [offset, offset + size) of a segment, with a reference count."""

    __slots__ = ("_give_back", "holders", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int, give_back: Callable[[Lease], None]) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        self.holders = 1
        self._give_back = give_back

    @property
    def view(self) -> memoryview:
        return self.segment.view[self.offset : self.offset + self.size]

    def retain(self) -> Lease:
        self.holders += 1
        return self

    def release(self) -> None:
        """Drop a reference. With the last one the bytes may be reused."""
        self.holders -= 1
        if self.holders == 0:
            self._give_back(self)


class PublishedPlaces:
    """Places of values in a piece of memory, at its end, for a reader that does not wait for the writer.

    Words of 8 bytes: the length of each entry and its numbers; at the very end the attempt and the number of entries.
    """

    NBYTES = 16384

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[-self.NBYTES :].cast("q")
        self._end = 0

    def begin(self, attempt: int) -> None:
        """Forget the entries of earlier attempts."""
        self._words[-1] = 0
        self._words[-2] = attempt

    def has_room(self, entry: Sequence[int]) -> bool:
        return self._end + 1 + len(entry) < len(self._words) - 1

    def add(self, entry: Sequence[int]) -> None:
        start, self._end = self._end, self._end + 1 + len(entry)
        self._words[start : self._end] = array("q", [len(entry), *entry])
        self._words[-1] += 1  # last: the entry is complete

    def count(self, attempt: int) -> int:
        return self._words[-1] if self._words[-2] == attempt else 0

    def read(self, count: int) -> list[tuple[int, ...]]:
        """Return the first entries."""
        entries, at = list[tuple[int, ...]](), 0
        for _ in range(count):
            start, at = at + 1, at + 1 + self._words[at]
            entries.append(tuple(self._words[start:at]))
        return entries


def end_of(pieces: Iterable[Sequence[int]]) -> int:
    """Return where the last of some values ends. Each is a flat tuple of (offset, size), or empty."""
    return max((sum(each[-2:]) for each in pieces if each), default=0)


class Claim:
    """Bytes of a budget held outside the arena. `count` is called with each change in bytes."""

    __slots__ = ("_count", "holders", "nbytes")

    def __init__(self, nbytes: int, count: Callable[[int], None]) -> None:
        self.nbytes = 0
        self.holders = 1
        self._count = count
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Add bytes to the claim, unless it was released."""
        if self.holders:
            self.nbytes += nbytes
            self._count(nbytes)

    def retain(self) -> Claim:
        self.holders += 1
        return self

    def release(self) -> None:
        """Drop a reference. With the last one the bytes return to the budget."""
        self.holders -= 1
        if self.holders == 0:
            self._count(-self.nbytes)


def bytes_in(value: object, deep: int = 4) -> int:
    """Estimate the bytes of arrays, tensors, bytes and text in `value`, up to `deep` containers."""
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
    """Allocates input memory: leases are cut from segments one after the other.

    A segment is reused when all of its leases have ended. To be used by one thread.

    Args:
        forget: Called with the number of each discarded segment, so that workers unmap it.
        budget: Bytes that the user of the arena intends to hold at most. Not enforced here.
        room: Returns the bytes left in the budget. A new segment is not larger, unless a single lease is.
    """

    SEGMENT_BYTES = 16 * 2**20
    SPARE_SEGMENTS = 8

    def __init__(
        self,
        forget: Callable[[int], None] = lambda _: None,
        budget: int | None = None,
        room: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        # A segment is held until its last lease ends, so each must be a small part of the budget.
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
        """Bytes of segments without leases. New leases are cut from these first."""
        return len(self._spare) * self._size

    def lease(self, size: int) -> Lease:
        """Return a lease of `size` bytes, or raise MemoryError if the machine lacks them."""
        segment, offset = self._place(size)
        self._live[segment.number] += 1
        self.leased_bytes += size
        return Lease(segment, offset, size, self._take_back)

    def trim(self, lease: Lease, size: int) -> None:
        self.leased_bytes -= lease.size - size
        if lease.segment is self._open and lease.offset + aligned(lease.size) == self._filled:
            self._filled = lease.offset + aligned(size)
        lease.size = size

    @property
    def count(self) -> int:
        """Number of segments with leases. Each has a descriptor."""
        return len(self._segments) - len(self._spare)

    def shrink(self, size: int) -> None:
        """Discard spare segments until at most `size` bytes are held, as far as possible."""
        while self._spare and self.segment_bytes > size:
            self._discard(self._spare.pop())

    def close(self) -> None:
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
        self._filled += aligned(size)
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


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory instead of returning it to the system.

    glibc maps each large array again, and each of its pages then costs a fault and is cleared. This took more than half
    of the time of a collate_fn that stacks 38 MB.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Return the memory kept by `keep_freed_memory` to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
