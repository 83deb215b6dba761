"""The worker's side of mappings: the descriptors that came with a pickle, while it is unpickled."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.torch_compat.mappings import Mapped, Named

if TYPE_CHECKING:
    import torch

_now = threading.local()


class Received:
    """What a worker maps; each mapping once, for all that lies in it.

    Args:
        descriptors: what `Mapped.source` counts; they stay the caller's, and may be closed once all is mapped.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._maps: dict[tuple[object, ...], memoryview] = {}

    @contextlib.contextmanager
    def unpacking(self) -> Iterator[None]:
        """While this lasts, `duplicate` and `shared_storage` mean these."""
        before = getattr(_now, "received", None)
        _now.received = self
        try:
            yield
        finally:
            _now.received = before

    def memory(self, mapped: Mapped) -> memoryview:
        """The bytes that were to be mapped."""
        key = mapped[:5]
        if key not in self._maps:
            self._maps[key] = memoryview(self.mapping(mapped._replace(start=0, size=mapped.length)))
        return self._maps[key][mapped.start : mapped.start + mapped.size]

    def mapping(self, mapped: Mapped) -> mmap.mmap:
        """A mapping of one's own, of bytes that begin with a page."""
        flags = mmap.MAP_SHARED if mapped.is_shared else mmap.MAP_PRIVATE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if mapped.is_writable else 0)
        with self.opened(mapped.source, needs_writing=mapped.is_shared and mapped.is_writable) as fd:
            return mmap.mmap(fd, mapped.size, flags=flags, prot=access, offset=mapped.offset + mapped.start)

    @contextlib.contextmanager
    def opened(self, source: int | Named, *, needs_writing: bool) -> Iterator[int]:
        """A descriptor of a source.

        Raises:
            FileNotFoundError: a file that came by its name is another one by now.
        """
        if isinstance(source, int):
            yield self._descriptors[source]
            return
        fd = os.open(source.path, (os.O_RDWR if needs_writing else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (source.device, source.inode):
                raise FileNotFoundError(f"{source.path} was replaced after the trainer had mapped it")
            yield fd
        finally:
            os.close(fd)


def duplicate(number: int) -> int:
    """A descriptor of one's own, of those that came with what is being unpickled."""
    received: Received = _now.received
    with received.opened(number, needs_writing=False) as fd:
        return os.dup(fd)


def mapping(mapped: Mapped, position: int) -> mmap.mmap:
    """The user's own mapping, at the place where it is read on."""
    received: Received = _now.received
    made = received.mapping(mapped)
    made.seek(position)
    return made


def shared_storage(source: int | Named, size: int) -> torch.UntypedStorage:
    """Memory that torch knows to be shared."""
    import torch

    received: Received = _now.received
    new: Any = torch.UntypedStorage
    with received.opened(source, needs_writing=True) as fd:
        storage: torch.UntypedStorage = new._new_shared_fd_cpu(fd, size)
    return storage
