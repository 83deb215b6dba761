"""Batches on their way to a device: copies that run beside the training, from memory that waits for them.

A slab that is being copied must not be filled again, whatever the trainer has done with its batch meanwhile. So the
mover holds the host's batch, and by that the slab, until the event behind the last copy is done.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeGuard, TypeVar

import torch

L = TypeVar("L")


class Event(Protocol):
    """A mark behind the work that a stream had been given when it was made."""

    def query(self) -> bool:
        """Whether all of that work is done."""
        ...

    def synchronize(self) -> None:
        """Block until all of that work is done."""
        ...


class Movable(Protocol):
    """What is moved by a method of its own: a tensor of any kind, or an object of the user's."""

    def to(self, device: torch.device, /) -> object: ...


class Backend(Protocol):
    """What a mover needs of a device: a stream of headrace's own, and pages that do not move."""

    def copying(self) -> AbstractContextManager[object]:
        """Within it copies go to headrace's stream."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor of the host's; its memory is read until an event recorded from now on is done."""
        ...

    def record(self) -> Event:
        """An event behind all copies begun so far."""
        ...

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        """Have this thread's current stream wait for `event`; `tensors` are in use until that stream is done with them.

        It does not block the thread.
        """
        ...

    def move(self, value: Movable) -> object:
        """What `value.to` makes of itself on this thread's current stream, and done with the host's memory."""
        ...

    def register(self, memory: memoryview) -> bool:
        """Page-lock memory of the host, so that copies from it need no thread; whether that could be done."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """Undo `register`; nothing is being copied from there."""
        ...

    def synchronize(self) -> None:
        """Block until all copies begun so far are done."""
        ...


class Moving:
    """A batch that is being copied: begun by `Mover.start`, had by `Mover.finish`."""

    __slots__ = ("batch", "copies", "event", "has_later", "host")

    def __init__(self, host: object) -> None:
        self.host = host  # None once no copy reads it any more
        self.batch: object = None
        self.copies: list[torch.Tensor] = []
        self.event: Event | None = None
        self.has_later = False


class _Later:
    """A value that is moved in `finish`.

    Its copies are not ours to mark as used by the trainer's stream, so they have to be made there.
    """

    __slots__ = ("value",)

    def __init__(self, value: Movable) -> None:
        self.value = value


class Mover:
    """Moves batches to a device.

    `start` and `finish` may be called in different threads, and each in several. Host batches whose copies are done are
    let go by the next call of any method, all of them by `drain` and `close`, and also when the mover is collected.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: list[Moving] = []
        self._pages: dict[int, memoryview | None] = {}
        self._is_closed = False
        # Held while copies are begun and pages unlocked: between these two nothing may be read from the pages.
        self._lock = threading.Lock()
        end = weakref.finalize(self, _abandon, backend, self._under_way, self._pages, os.getpid())
        end.atexit = False

    def start(self, batch: object) -> Moving:
        """Begin to copy every tensor of a nested batch that is in the host's memory; the rest of it stays as it is.

        Objects with a `to` of their own, and tensors that are not strided, are moved by `finish`.
        """
        self.let_go()
        moving = Moving(batch)
        with self._lock:
            self._under_way.append(moving)  # before the first copy: one of them may fail, and the others read on
            with self._backend.copying():
                try:
                    moving.batch = rebuilt(batch, _is_movable, partial(self._begin, moving))
                finally:
                    moving.event = self._backend.record()
        return moving

    def finish(self, moving: Moving) -> object:
        """The batch on the device, for work on this thread's current stream. To be called once.

        It waits for no copy: the stream does.
        """
        batch, copies = moving.batch, moving.copies
        moving.batch, moving.copies = None, []  # the trainer's from here on: what it drops is free
        assert moving.event is not None
        self._backend.receive(moving.event, copies)
        if moving.has_later:
            batch = rebuilt(batch, _is_later, lambda later: self._backend.move(later.value))
        self.let_go()
        return batch

    def let_go(self) -> None:
        """Let go of the host batches whose copies are done, so that their slabs are free. It does not block."""
        with self._lock:
            done = [moving for moving in self._under_way if moving.event is not None and moving.event.query()]
            for moving in done:
                self._under_way.remove(moving)
        for moving in done:
            moving.host = None  # without the lock: this runs finalizers

    def wait_for_all_but(self, count: int) -> None:
        """Wait until at most `count` (1 or more) batches are being copied."""
        self.let_go()
        with self._lock:
            excess = self._under_way[:-count]
        if excess and excess[-1].event is not None:
            excess[-1].event.synchronize()
            self.let_go()

    def drain(self) -> None:
        """Wait for all copies that were begun, and let go of their host batches. Not for finalizers: it locks."""
        done: list[Moving] = []
        try:
            with self._lock:
                done += self._under_way
                self._under_way.clear()
                self._backend.synchronize()
        finally:
            for moving in done:
                moving.host = None  # after an error, too: a device that has failed copies nothing more

    def lock_pages(self, number: int, memory: memoryview) -> None:
        """Have a slab's memory page-locked, if it is not yet, until `unlock_pages` or `close`.

        The mover keeps it mapped that long. Where it cannot be had, copies go by way of torch's pinned memory.

        Args:
            number: the slab's.
            memory: all of it.
        """
        with self._lock:
            if not self._is_closed and number not in self._pages:
                self._pages[number] = memory if self._backend.register(memory) else None

    def unlock_pages(self, number: int) -> None:
        """A slab is not used any more."""
        with self._lock:
            memory = self._pages.pop(number, None)
            if memory is not None:
                if self._under_way:
                    self._backend.synchronize()  # a loader that is collected takes its slabs away from running copies
                self._backend.unregister(memory)

    def unlocker(self) -> Callable[[int], None]:
        """`unlock_pages` for the owner of the slabs.

        It does not keep the mover alive: a copy keeps its slab, a slab its owner, and the mover keeps the copy.
        """
        return partial(_unlock, weakref.ref(self))

    def close(self) -> None:
        """Drain, and unlock all pages for good. Batches may still be moved, by way of torch's pinned memory."""
        self.drain()
        with self._lock:
            self._is_closed = True
            if self._pages:
                self._backend.synchronize()  # for what was begun since
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


class StillMover(Mover):
    """The mover of those who stay on the host: a batch is handed over as it came."""

    def start(self, batch: object) -> Moving:
        moving = Moving(None)
        moving.batch = batch
        return moving

    def finish(self, moving: Moving) -> object:
        batch, moving.batch = moving.batch, None
        return batch


def _is_movable(value: object) -> TypeGuard[Movable]:
    return isinstance(value, torch.Tensor) or (not isinstance(value, type) and callable(getattr(value, "to", None)))


def _is_later(value: object) -> TypeGuard[_Later]:
    return isinstance(value, _Later)


def _abandon(backend: Backend, under_way: list[Moving], pages: dict[int, memoryview | None], pid: int) -> None:
    """The mover is gone: its copies still read the slabs, for some milliseconds."""
    if os.getpid() == pid and (under_way or pages):  # a forked process has no copies, and can ask no device
        with contextlib.suppress(RuntimeError):
            backend.synchronize()
        _unlock_all(backend, pages)
    under_way.clear()


def _unlock(mover: weakref.ref[Mover], number: int) -> None:
    living = mover()
    if living is not None:  # else all of its pages are unlocked
        living.unlock_pages(number)


def _unlock_all(backend: Backend, pages: dict[int, memoryview | None]) -> None:
    for memory in pages.values():
        if memory is not None:
            backend.unregister(memory)
    pages.clear()


def rebuilt(batch: object, is_leaf: Callable[[object], TypeGuard[L]], change: Callable[[L], object]) -> object:
    """The same containers with other leaves.

    Containers are rebuilt as torch's `pin_memory` does: mutable ones from a shallow copy, so that what a subclass has
    beside its contents stays; others by a call of their type, or as a plain dict or list where that fails.

    Args:
        is_leaf: asked of every value before its contents are; what it accepts is changed and not looked into.
        change: gives what takes a leaf's place. All other values stay, strings and bytes as a whole.
    """
    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, (str, bytes, bytearray, memoryview)):
        return batch
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: rebuilt(value, is_leaf, change) for key, value in batch.items()})
    if isinstance(batch, tuple):
        parts = [rebuilt(value, is_leaf, change) for value in batch]
        make: Callable[..., object] = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    if isinstance(batch, Sequence):
        return _sequence(batch, [rebuilt(value, is_leaf, change) for value in batch])
    return batch


def _mapping(batch: Mapping[object, object], parts: dict[object, object]) -> object:
    try:
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)
            clone.update(parts)
            return clone
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def _sequence(batch: Sequence[object], parts: list[object]) -> object:
    try:
        if isinstance(batch, MutableSequence):
            clone = copy.copy(batch)
            for place, part in enumerate(parts):
                clone[place] = part
            return clone
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts
