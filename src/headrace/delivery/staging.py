"""Stages between the arrival of a batch and `next`: none, pinning, or a copy to a device."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import torch

if TYPE_CHECKING:
    from headrace.delivery.device import Mover, Moving
    from headrace.delivery.pinning import PinThread

_DEPTH_BATCHES = 2  # one is pinned or copied while the trainer works on the previous one

Open = Callable[[], Any]
"""Returns a batch in host memory, or raises the error that replaces it."""


class Ahead:
    """Arrived batches in the trainer's order. This base class opens each when it is taken.

    Attributes:
        depth: Maximum number of batches that were put and not yet taken.
    """

    depth = 1

    def __init__(self) -> None:
        self._waiting: deque[Open] = deque()

    def put(self, batch: Open) -> None:
        self._waiting.append(batch)

    def take(self, timeout_s: float | None) -> Open:
        """Remove and return the oldest batch. At least one must be waiting.

        Raises:
            anyio.WouldBlock: the batch is not ready after `timeout_s` seconds. None waits without limit.
        """
        del timeout_s
        return self._waiting.popleft()

    def fileno(self) -> int:
        """Return the descriptor to wait on when `take` would block."""
        return -1

    def lock_pages(self, number: int, memory: memoryview) -> None:
        """Page-lock the memory of a slab that is about to be read."""

    def unlock_pages(self, number: int) -> None: ...

    def drain(self) -> None:
        """Wait until no slab is being read."""

    def close(self) -> None:
        """Drop all batches. Safe in any thread and inside garbage collection."""
        self._waiting.clear()


class PinStage(Ahead):
    """Copies batches into page-locked memory, in a thread that starts with the first batch."""

    depth = _DEPTH_BATCHES

    def __init__(self, pin: Callable[[object], object], device_index: int | None) -> None:
        super().__init__()
        self._pin, self._device_index = pin, device_index
        self._arrived: queue.SimpleQueue[Open | None] = queue.SimpleQueue()
        self._thread: PinThread | None = None

    def put(self, batch: Open) -> None:
        if self._thread is None:
            from headrace.delivery.pinning import PinThread

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
    depth = _DEPTH_BATCHES

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self._mover = mover
        self.lock_pages, self.unlock_pages = mover.lock_pages, mover.unlocker()  # type: ignore[method-assign, assignment]

    def put(self, batch: Open) -> None:
        self._mover.wait_for_all_but(self.depth)  # else too few slabs stay free, and the opener must copy the batch
        try:
            moving: Moving = self._mover.start(batch())
        except Exception as error:
            self._waiting.append(partial(_raise, error))
        else:
            self._waiting.append(partial(self._mover.finish, moving))

    def drain(self) -> None:
        self._mover.drain()


def mover_of(device: Any) -> Mover | None:
    """Return the mover to a device, or None. To be called in the trainer's thread.

    Raises:
        OptionError: the device cannot be used here.
    """
    if device is None:
        return None
    from headrace.delivery.device import mover_to

    return mover_to(device)


def ahead_of(mover: Mover | None, *, pin_memory: bool) -> Ahead:
    """Return the stage for one iterator. To be called in the trainer's thread."""
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
        del error  # break the cycle of error, traceback and this frame
