"""Which memory of this process is mapped, shared with other processes or out of a file, and how a worker maps it too.

A fork would inherit these mappings. A clean worker is sent the descriptor of what lies behind them: of an open file of
this process, of the file by its name if that is still the same one, or of `/proc/self/map_files`, which Linux opens
for the privileged alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.errors import CannotCarryError
from headrace.lately import torch_is_loaded
from headrace.types import Buffer

_MAPS, _PAGES, _MAP_FILES, _OPEN = "/proc/self/maps", "/proc/self/pagemap", "/proc/self/map_files", "/proc/self/fd"
_OURS = b"/memfd:headrace"  # batches, whose places are filled again, and what a worker was sent: copied
_OF_NOBODY = "/dev/zero (deleted)"  # what `mmap(-1)` is called
_SENT_AT_MOST = 128  # descriptors of files that have a name; more of them go by their names
_ENTRIES = 2**20  # of the page map, that are read at once
_LINES = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) ([1-9]\d*) *(.*)$", re.MULTILINE)


class Named(NamedTuple):
    """A file that a worker opens by itself."""

    path: str
    device: int
    inode: int


class Mapped(NamedTuple):
    """Bytes that a worker maps, instead of having a copy of them.

    Attributes:
        source: the number of a descriptor among those that are sent.
        offset: where in the file the mapping begins.
        length: of the mapping.
        is_shared: what one process writes the others see.
        is_writable: the mapping itself is.
        start: where in the mapping the bytes begin.
        size: how many they are.
    """

    source: int | Named
    offset: int
    length: int
    is_shared: bool
    is_writable: bool
    start: int
    size: int


class _Region(NamedTuple):
    """A mapping of this process: what `/proc/self/maps` says of it."""

    start: int
    stop: int
    first: str  # its addresses in text; those of the first, where there are several in a row
    access: str
    offset: int
    device: str
    inode: int
    path: str

    @property
    def is_shared(self) -> bool:
        return self.access[3] == "s"

    @property
    def is_writable(self) -> bool:
        return self.access[1] == "w"


def _regions(text: bytes) -> list[_Region]:
    """Mappings with something behind them, in order; those that lie in a row, in memory and in the file, as one."""
    found: list[_Region] = []
    for line in _LINES.finditer(text):
        first, last, access, offset, device, inode, path = line.groups()
        if path.startswith(_OURS):
            continue
        region = _Region(
            int(first, 16),
            int(last, 16),
            f"{int(first, 16):x}-{int(last, 16):x}",
            access.decode(),
            int(offset, 16),
            device.decode(),
            int(inode),
            os.fsdecode(path.replace(b"\\012", b"\n")),
        )
        if found and _goes_on(found[-1], region):
            found[-1] = found[-1]._replace(stop=region.stop)
        else:
            found.append(region)
    return found


def _goes_on(before: _Region, region: _Region) -> bool:
    return (
        before.stop == region.start
        and before.offset + before.stop - before.start == region.offset
        and (before.access, before.device, before.inode) == (region.access, region.device, region.inode)
    )


def address_of(buffer: Buffer | mmap.mmap) -> int:
    """Where the bytes of a buffer begin."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def are_known() -> bool:
    """Whether this system says what is mapped."""
    return sys.platform == "linux" and Path(_MAPS).exists()


class Mappings:
    """What is mapped in this process, while something is pickled.

    Args:
        descriptors: of what workers are to map are put here; they are the caller's to close.
    """

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors
        self._sources: dict[tuple[str, int, bool], tuple[int | Named | None, int]] = {}
        self._answers: list[tuple[int, int, Mapped | None]] = []
        self._open: list[tuple[int, str, str, int]] | None = None
        self._text: bytes | None = None  # of the list of mappings, as soon as somebody asks
        self._regions: list[_Region] = []
        self._stops: list[int] = []

    def find(self, address: int, size: int) -> Mapped | None:
        """How a worker gets the bytes at an address; None: as a copy.

        Raises:
            CannotCarryError: other processes share them, and there is no way to share them with a worker.
        """
        answer = self._find(address, size)
        self._answers.append((address, size, answer))
        return answer

    def is_current(self) -> bool:
        """Whether what `find` has said still holds: what is pickled may map something while it is."""
        before = self._text
        if before is None:
            return True
        self._read()
        return before == self._text or all(self._find(at, size) == answer for at, size, answer in self._answers)

    def find_held(self, address: int, size: int) -> Mapped | None:
        """As `find`, of bytes that nobody lets go of."""
        return self._find(address, size)

    def _read(self) -> None:
        text = Path(_MAPS).read_bytes()
        if text != self._text:
            self._text, self._regions = text, _regions(text)
            self._stops = [region.stop for region in self._regions]

    def _find(self, address: int, size: int) -> Mapped | None:
        if self._text is None:
            self._read()
        at = bisect_right(self._stops, address)
        if not size or at == len(self._stops) or self._regions[at].start >= address + size:
            return None
        region = self._regions[at]
        if not region.is_shared and _has_changed(address, size):
            return None
        if address < region.start or address + size > region.stop:
            if region.is_shared:
                raise CannotCarryError(f"it lies in memory that processes share, and beyond its end ({region.path})")
            return None
        key = region.device, region.inode, region.is_shared and region.is_writable
        if key not in self._sources:
            self._sources[key] = self._source(region, address)
        source, file_size = self._sources[key]
        if source is None:
            return None
        mapped = Mapped(
            source,
            region.offset,
            min(region.stop - region.start, file_size - region.offset),
            region.is_shared,
            region.is_writable,
            address - region.start,
            size,
        )
        if mapped.start + size > mapped.length:
            raise CannotCarryError(f"it lies in a mapped file that has become shorter since ({region.path})")
        return mapped

    def _source(self, region: _Region, address: int) -> tuple[int | Named | None, int]:
        """What a worker maps, and of how many bytes the file is; None: it gets a copy."""
        if region.is_shared and _is_of_a_device(region, address):
            return None, 0
        try:
            for fd in self._candidates(region):
                if _is_behind(fd, region):
                    return self._kept(fd, region)
                os.close(fd)
        except OSError:  # no descriptors are left
            if region.is_shared:
                raise
        if region.is_shared:
            raise CannotCarryError(
                f"it lies in memory that processes share ({region.path or 'without a name'}), "
                "and this process may not open that once more for a worker"
            )
        return None, 0

    def _kept(self, fd: int, region: _Region) -> tuple[int | Named, int]:
        behind = os.fstat(fd)
        if len(self._descriptors) >= _SENT_AT_MOST:
            named = _status(region.path)
            if named is not None and (named.st_dev, named.st_ino) == (behind.st_dev, behind.st_ino):
                os.close(fd)
                return Named(region.path, named.st_dev, named.st_ino), behind.st_size
        self._descriptors.append(fd)
        return len(self._descriptors) - 1, behind.st_size

    def _candidates(self, region: _Region) -> Iterator[int]:
        """Descriptors, the taker's to close, of what may lie behind a mapping."""
        needs_writing = region.is_shared and region.is_writable
        flags = (os.O_RDWR if needs_writing else os.O_RDONLY) | os.O_CLOEXEC
        status = _status(region.path)
        if status is not None and stat.S_ISREG(status.st_mode):  # to open other things may do something
            yield from _opened(region.path, flags)
        if self._open is None:
            self._open = list(_open_files())
        for fd, name, device, inode in self._open:
            if (device, inode) == (region.device, region.inode) or name == region.path:
                with contextlib.suppress(OSError):  # closed since
                    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
                    if mode == os.O_RDWR or (mode == os.O_RDONLY and not needs_writing):
                        yield fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        yield from _opened(f"{_MAP_FILES}/{region.first}", flags)


def _opened(path: str, flags: int) -> Iterator[int]:
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return
    yield fd


def _status(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat() if path.startswith("/") else None
    except (OSError, ValueError):
        return None


def _open_files() -> Iterator[tuple[int, str, str, int]]:
    """The files that this process has open: descriptor, name, device and inode."""
    for link in Path(_OPEN).iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            status = os.fstat(int(link.name))
            if stat.S_ISREG(status.st_mode):
                yield int(link.name), str(link.readlink()), _device(status), status.st_ino


def _is_behind(fd: int, region: _Region) -> bool:
    """Whether it is this file that was mapped, and not another one of that name."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return False
    if (_device(status), status.st_ino) == (region.device, region.inode):
        return True
    # Overlays and subvolumes have other numbers in the list of mappings: what are they if this one is mapped?
    try:
        with mmap.mmap(fd, 1, prot=mmap.PROT_READ) as probe:
            address = address_of(probe)
            mapped = next((one for one in _regions(Path(_MAPS).read_bytes()) if one.start <= address < one.stop), None)
    except (OSError, ValueError):
        return False
    return mapped is not None and (mapped.device, mapped.inode) == (region.device, region.inode)


def _device(status: os.stat_result) -> str:
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"


def _is_of_a_device(region: _Region, address: int) -> bool:
    """Whether it is shared with a device rather than with processes: page-locked memory, a driver's own."""
    status = _status(region.path)
    if not region.path.startswith("/") or (status is not None and not stat.S_ISREG(status.st_mode)):
        return True
    if region.path != _OF_NOBODY or not torch_is_loaded():
        return False
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    there = (ctypes.c_char * 1).from_address(address)
    return torch.frombuffer(there, dtype=torch.uint8).is_pinned()


def _has_changed(address: int, size: int) -> bool:
    """Whether a page of a private mapping has been written to, and is not the file's any more."""
    first, stop = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    try:
        with Path(_PAGES).open("rb", buffering=0) as pages:
            for at in range(first, stop, _ENTRIES):
                count = min(_ENTRIES, stop - at)
                entries = np.frombuffer(os.pread(pages.fileno(), 8 * count, 8 * at), np.uint64)
                has_page, is_of_file = entries >> np.uint64(62) != 0, entries >> np.uint64(61) & np.uint64(1) != 0
                if len(entries) < count or bool((has_page & ~is_of_file).any()):
                    return True
    except OSError:  # nobody can tell
        return True
    return False
