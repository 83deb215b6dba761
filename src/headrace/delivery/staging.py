"""Stages between the arrival of a batch and `next`: none, pinning, or a copy to a device."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import torch

from headrace._util.wakeup import Wakeup
from headrace.errors import LoaderClosedError

if TYPE_CHECKING:
    from headrace.delivery.device import Mover, Moving

_JOIN_S = 10.0  # pinning a batch takes far less
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
    """Copies batches into page-locked memory, in a thread that starts with the first batch.

    Copies release the GIL and use one core.

    Args:
        pin: Applied to each batch. Its errors are worded as torch does.
        device_index: Device to pin memory for. None: selects none.
    """

    depth = _DEPTH_BATCHES

    def __init__(self, pin: Callable[[object], object], device_index: int | None) -> None:
        super().__init__()
        self._is_closed = False
        self._jobs: queue.SimpleQueue[Open | None] = queue.SimpleQueue()
        # A wakeup and no lock: `close` may run inside a garbage collection, in any of the threads.
        self._arrived = Wakeup()
        # The thread must not refer to this object, which could not be collected then.
        arguments = self._jobs, pin, device_index, self._waiting, self._arrived
        self._thread = threading.Thread(target=_pin_all, args=arguments, name="headrace-pin", daemon=True)

    def put(self, batch: Open) -> None:
        self._jobs.put(batch)
        if self._thread.ident is None:
            self._thread.start()

    def take(self, timeout_s: float | None) -> Open:
        while True:
            if self._is_closed:
                return partial(_raise, LoaderClosedError("this iterator was closed; make a new one with iter(loader)"))
            with contextlib.suppress(IndexError):
                return self._waiting.popleft()
            self._arrived.clear()  # check again: a batch may have come in between
            if self._waiting or self._is_closed:
                self._arrived.set()
            elif not self._arrived.wait(timeout_s):
                raise anyio.WouldBlock

    def fileno(self) -> int:
        return self._arrived.fileno()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._arrived.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._waiting.clear()


def _pin_all(
    jobs: queue.SimpleQueue[Open | None],
    pin: Callable[[object], object],
    device_index: int | None,
    pinned: deque[Open],
    arrived: Wakeup,
) -> None:
    finish: Callable[[Open], Open] = partial(_pinned, pin, device_index)
    try:
        # Per thread in torch: a copy on all cores would take them from the workers.
        torch.set_num_threads(1)
        if device_index is not None:
            torch.accelerator.set_device_index(device_index)
    except BaseException as error:
        finish = _death(error)
    while (job := jobs.get()) is not None:
        try:
            pinned.append(finish(job))
        except BaseException as error:  # a SystemExit from a batch's own pin_memory
            finish = _death(error)
            pinned.append(finish(job))
        del job  # it may hold a slab
        arrived.set()


def _pinned(pin: Callable[[object], object], device_index: int | None, job: Open) -> Open:
    try:
        batch = job()
    except BaseException as error:
        return partial(_raise, error)
    try:
        made = pin(batch)
    except Exception as error:
        from headrace.torch_compat.serialize import caught

        return partial(_raise, caught(error, f"in pin memory thread for device {device_index}"))
    return lambda: made


def _death(cause: BaseException) -> Callable[[Open], Open]:
    """Return what the thread answers to all further jobs. torch's thread would have ended."""

    def finish(_: Open) -> Open:
        error = RuntimeError("Pin memory thread exited unexpectedly")
        error.__cause__ = cause
        return partial(_raise, error)

    return finish


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


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # break the cycle of error, traceback and this frame
