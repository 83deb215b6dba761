"""Copies of batches to a device, concurrent with training.

A slab must not be filled again while it is being copied, even if the trainer drops its batch. The mover therefore keeps
a reference to the host batch, and so to the slab, until the last copy's event is done.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeGuard, TypeVar

import torch

from headrace.errors import OptionError

L = TypeVar("L")


class Event(Protocol):
    """A mark in a stream, after all work queued when it was recorded."""

    def query(self) -> bool:
        """True if all work before the mark is done."""
        ...

    def synchronize(self) -> None: ...


class Movable(Protocol):
    """A value that moves itself: any tensor, or a user's object."""

    def to(self, device: torch.device, /) -> object: ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Backend:
    """Operations of a device that a mover needs.

    This base class is for devices of torch without streams: a copy is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which copies go to headrace's stream."""
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a host tensor. Its memory is read until an event recorded later is done."""
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

    def record(self) -> Event:
        """Return an event that follows all copies started so far."""
        return _Done()

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Make this thread's current stream wait for `event`, without blocking the thread.

        The memory of `tensors` is not reused before that stream is done with them.
        """

    def move(self, value: Movable) -> object:
        """Return `value.to(device)` on this thread's current stream. No copy is pending on return."""
        return value.to(self.device)

    def register(self, memory: memoryview) -> bool:
        """Page-lock host memory, for asynchronous copies. Return True if that succeeded."""
        return False

    def unregister(self, memory: memoryview) -> None:
        """Undo `register`. No copy from this memory may be running."""

    def synchronize(self) -> None:
        """Block until all copies started so far are done."""


class Moving:
    """A batch that is being copied, from `Mover.start` to `Mover.finish`."""

    __slots__ = ("batch", "copies", "event", "has_later", "host")

    def __init__(self, host: object) -> None:
        self.host = host  # None once no copy reads it any more
        self.batch: object = None
        self.copies: list[torch.Tensor] = []
        self.event: Event | None = None
        self.has_later = False


class _Later:
    """A value that `finish` moves, on the trainer's stream.

    Its `to` makes copies that headrace cannot mark as used by that stream.
    """

    __slots__ = ("value",)

    def __init__(self, value: Movable) -> None:
        self.value = value


class Mover:
    """Moves batches to a device.

    `start` and `finish` may be called in different threads, and each in several. Host batches are released after their
    copies: by the next call of any method, by `drain` and `close`, and when the mover is collected.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: list[Moving] = []
        self._pages: dict[int, memoryview | None] = {}
        self._is_closed = False
        # Held while copies are started and while pages are unlocked: no copy may start from pages being unlocked.
        self._lock = threading.Lock()
        end = weakref.finalize(self, _abandon, backend, self._under_way, self._pages, os.getpid())
        end.atexit = False

    def start(self, batch: object) -> Moving:
        """Begin to copy every host tensor of a nested batch. Other values stay as they are.

        Objects with a `to` method and tensors that are not strided are moved by `finish`.
        """
        self.let_go()
        moving = Moving(batch)
        with self._lock:
            self._under_way.append(moving)  # before the first copy: if one fails, the others still read the host batch
            with self._backend.copying():
                try:
                    moving.batch = rebuilt(batch, _is_movable, partial(self._begin, moving))
                finally:
                    moving.event = self._backend.record()
        return moving

    def finish(self, moving: Moving) -> object:
        """Return the batch on the device, for this thread's current stream. To be called once.

        The stream waits for the copies; this thread does not.
        """
        batch, copies = moving.batch, moving.copies
        moving.batch, moving.copies = None, []  # only the trainer refers to the copies from here on
        assert moving.event is not None
        self._backend.receive(moving.event, copies)
        if moving.has_later:
            batch = rebuilt(batch, _is_later, lambda later: self._backend.move(later.value))
        self.let_go()
        return batch

    def let_go(self) -> None:
        """Release the host batches whose copies are done, and so their slabs. Does not block."""
        with self._lock:
            done = [moving for moving in self._under_way if moving.event is not None and moving.event.query()]
            for moving in done:
                self._under_way.remove(moving)
        for moving in done:
            moving.host = None  # without the lock: this runs finalizers

    def wait_for_all_but(self, count: int) -> None:
        """Wait until at most `count` (at least 1) batches are being copied."""
        self.let_go()
        with self._lock:
            excess = self._under_way[:-count]
        if excess and excess[-1].event is not None:
            excess[-1].event.synchronize()
            self.let_go()

    def drain(self) -> None:
        """Wait for all copies, and release their host batches. Takes a lock: not for finalizers."""
        done: list[Moving] = []
        try:
            with self._lock:
                done += self._under_way
                self._under_way.clear()
                self._backend.synchronize()
        finally:
            for moving in done:
                moving.host = None  # after an error too: a failed device copies nothing more

    def lock_pages(self, number: int, memory: memoryview) -> None:
        """Page-lock a slab and keep it mapped until `unlock_pages` or `close`. Idempotent.

        If page-locking fails, copies go through torch's pinned memory.
        """
        with self._lock:
            if not self._is_closed and number not in self._pages:
                self._pages[number] = memory if self._backend.register(memory) else None

    def unlock_pages(self, number: int) -> None:
        with self._lock:
            memory = self._pages.pop(number, None)
            if memory is not None:
                if self._under_way:
                    self._backend.synchronize()  # a collected loader takes its slabs away from running copies
                self._backend.unregister(memory)

    def unlocker(self) -> Callable[[int], None]:
        """Return `unlock_pages` for the owner of the slabs, without a reference to the mover.

        Otherwise there is a cycle: a copy keeps its slab, a slab its owner, and the mover the copy.
        """
        return partial(_unlock, weakref.ref(self))

    def close(self) -> None:
        """Drain, and unlock all pages permanently. Later batches go through torch's pinned memory."""
        self.drain()
        with self._lock:
            self._is_closed = True
            if self._pages:
                self._backend.synchronize()  # for copies started since
            _unlock_all(self._backend, self._pages)

    def _begin(self, moving: Moving, value: Movable) -> object:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            moving.has_later = True
            return _Later(value)
        if value.device.type != "cpu":
            return value
        moved = self._backend.copy(value)
        moving.copies.append(moved)
        return moved


def _is_movable(value: object) -> TypeGuard[Movable]:
    return isinstance(value, torch.Tensor) or (not isinstance(value, type) and callable(getattr(value, "to", None)))


def _is_later(value: object) -> TypeGuard[_Later]:
    return isinstance(value, _Later)


def _abandon(backend: Backend, under_way: list[Moving], pages: dict[int, memoryview | None], pid: int) -> None:
    """Release everything after the mover was collected. Its last copies may still read slabs."""
    if os.getpid() == pid and (under_way or pages):  # a forked process has no copies, and cannot use the device
        with contextlib.suppress(RuntimeError):
            backend.synchronize()
        _unlock_all(backend, pages)
    under_way.clear()


def _unlock(mover: weakref.ref[Mover], number: int) -> None:
    living = mover()
    if living is not None:  # else all its pages are unlocked already
        living.unlock_pages(number)


def _unlock_all(backend: Backend, pages: dict[int, memoryview | None]) -> None:
    for memory in pages.values():
        if memory is not None:
            backend.unregister(memory)
    pages.clear()


def rebuilt(batch: object, is_leaf: Callable[[object], TypeGuard[L]], change: Callable[[L], object]) -> object:
    """Return a nested batch with other leaves.

    Containers are rebuilt as torch's `pin_memory` does. Mutable ones are shallow copies, which keeps the attributes of
    subclasses. Others are rebuilt by their type, or become a plain dict or list if that fails.

    Args:
        is_leaf: Checked for every value before its contents. A leaf's contents are not visited.
        change: Returns the replacement of a leaf. All other values stay; strings and bytes are not entered.
    """
    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, (str, bytes, bytearray, memoryview)):
        return batch
    if isinstance(batch, Mapping):
        named = {key: rebuilt(value, is_leaf, change) for key, value in batch.items()}
        return _refilled(batch, named, named.items())
    if isinstance(batch, tuple):
        parts = [rebuilt(value, is_leaf, change) for value in batch]
        make: Callable[..., object] = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    if isinstance(batch, Sequence):
        listed = [rebuilt(value, is_leaf, change) for value in batch]
        return _refilled(batch, listed, enumerate(listed))
    return batch


def _refilled(batch: Any, parts: Any, places: Iterable[tuple[Any, object]]) -> object:
    """Return a container of the batch's type with other parts, or `parts` if that fails."""
    try:
        if isinstance(batch, MutableMapping | MutableSequence):
            clone = copy.copy(batch)
            for place, part in places:
                clone[place] = part
            return clone
        return type(batch)(parts)
    except TypeError:
        return parts


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


def mover_to(device: torch.device | str | int) -> Mover | None:
    """Return a mover to a device. None for the host, where batches are already.

    Args:
        device: An index, or a type without an index, refers to this thread's current accelerator.

    Raises:
        OptionError: there is no such device here.
    """
    try:
        target = torch.device(device)
        if target.type == "cpu":
            return None
        if target.type == "cuda":
            return Mover(CudaBackend(target))
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).partition("\n")[0]
        raise OptionError(f"device={device!r} cannot be used here: {reason}") from error
    return Mover(Backend(target))


class CudaBackend(Backend):
    """An NVIDIA GPU, or an AMD GPU by the same API. Without an index, the current device.

    Raises:
        RuntimeError, AssertionError: torch cannot use the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.empty(0, device=device).device)  # with its index
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def copying(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        if not source.is_pinned():  # not in a slab, or the slab's pages could not be locked
            source = torch.empty_like(source, pin_memory=True).copy_(source)  # pin_memory() refuses expanded ones
        return source.to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)

    def record(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            tensor.record_stream(stream)

    def register(self, memory: memoryview) -> bool:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostRegister(_address(memory), memory.nbytes, _PORTABLE)) == 0:
                return True
            self._forget_error()
            return False

    def unregister(self, memory: memoryview) -> None:
        with torch.cuda.device(self.device):  # else a thread without a device would initialize device 0
            if int(_cudart().cudaHostUnregister(_address(memory))):
                self._forget_error()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _forget_error(self) -> None:
        """Clear a failed registration's error. CUDA would report it with this thread's next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device).add_(1)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
