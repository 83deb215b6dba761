"""What becomes of batches between their arrival and `next`: nothing, or they are pinned, or copied to a device."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import anyio
import torch

from headrace.deliver.backends import mover_to
from headrace.deliver.device import Mover, Moving
from headrace.deliver.pinning import PinThread

_DEPTH_BATCHES = 2  # one is pinned or copied while the trainer works on the one before

Open = Callable[[], Any]
"""Gives a batch in the host's memory, or raises the exception that has come in its place."""


class Ahead:
    """Batches that have arrived, in the order in which the trainer gets them. Each is opened when it is taken.

    Attributes:
        depth: how many may be put and not yet taken.
    """

    depth = 1

    def __init__(self) -> None:
        self._waiting: deque[Open] = deque()

    def put(self, batch: Open) -> None:
        """One more has arrived."""
        self._waiting.append(batch)

    def take(self, timeout_s: float | None) -> Open:
        """The oldest; at least one was put that was not taken.

        Raises:
            anyio.WouldBlock: it is not ready after so many seconds (None: wait as long as it takes).
        """
        del timeout_s
        return self._waiting.popleft()

    def fileno(self) -> int:
        """What to wait on where `take` would block."""
        return -1

    def lock_pages(self, number: int, memory: memoryview) -> None:
        """A slab is about to be read."""

    def unlock_pages(self, number: int) -> None:
        """A slab is not used any more."""

    def drain(self) -> None:
        """Wait until no slab is read any more."""

    def close(self) -> None:
        """Let go of everything. From any thread, also inside a collection of garbage."""
        self._waiting.clear()


class PinStage(Ahead):
    """Batches are copied into page-locked memory, by a thread that begins with the first one.

    Args:
        pin: gives the copy.
        device_index: the device for which memory is page-locked.
    """

    depth = _DEPTH_BATCHES

    def __init__(self, pin: Callable[[object], object], device_index: int | None) -> None:
        super().__init__()
        self._pin, self._device_index = pin, device_index
        self._arrived: queue.SimpleQueue[Open | None] = queue.SimpleQueue()
        self._thread: PinThread | None = None

    def put(self, batch: Open) -> None:
        if self._thread is None:
            take = partial(_opened, self._arrived)
            self._thread = PinThread(take, self._pin, self.depth, self._device_index)
        self._arrived.put(batch)

    def take(self, timeout_s: float | None) -> Open:
        assert self._thread is not None
        try:
            batch = self._thread.try_next() if timeout_s == 0 else self._thread.next(timeout_s)
        except anyio.WouldBlock:
            raise
        except Exception as error:
            return partial(_raise, error)
        return lambda: batch

    def fileno(self) -> int:
        assert self._thread is not None
        return self._thread.fileno()

    def close(self) -> None:
        self._arrived.put(None)
        if self._thread is not None:
            self._thread.close()


class DeviceStage(Ahead):
    """Batches are copied to a device, from slabs whose pages are locked.

    Args:
        mover: begins and ends the copies.
    """

    depth = _DEPTH_BATCHES

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self._mover = mover
        self.lock_pages, self.unlock_pages = mover.lock_pages, mover.unlocker()  # type: ignore[method-assign, assignment]

    def put(self, batch: Open) -> None:
        self._mover.wait_for_all_but(self.depth)  # else too few slabs are left, and the batch is copied out of its own
        try:
            moving: Moving = self._mover.start(batch())
        except Exception as error:
            self._waiting.append(partial(_raise, error))
        else:
            self._waiting.append(partial(self._mover.finish, moving))

    def drain(self) -> None:
        self._mover.drain()


def mover_of(device: Any) -> Mover | None:
    """What moves batches to a device, if they are to be moved; to be called in the trainer's thread.

    Raises:
        OptionError: the device cannot be used here.
    """
    return None if device is None else mover_to(device)


def ahead_of(mover: Mover | None, *, pin_memory: bool) -> Ahead:
    """What is done to the batches of one iterator; to be called in the trainer's thread."""
    if mover is not None:
        return DeviceStage(mover)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if not pin_memory or device is None or device.type == "mps":
        return Ahead()
    from torch.utils.data._utils.pin_memory import pin_memory as pin

    return PinStage(partial(pin, device=device.type), torch.accelerator.current_device_index())


def _opened(arrived: queue.SimpleQueue[Open | None]) -> object:
    batch = arrived.get()
    if batch is None:
        raise StopIteration
    return batch()


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # its traceback has this frame: what they hold would wait for a garbage collection
