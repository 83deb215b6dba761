"""A thread that copies batches into page-locked memory, concurrently with the trainer."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import anyio
import torch

from headrace._util.wakeup import Wakeup
from headrace.errors import LoaderClosedError
from headrace.torch_compat.errors import caught

_JOIN_S = 10.0  # copying a batch takes far less; a `take` that never ends must not hang the trainer


class PinThread:
    """A thread that takes batches, pins them, and keeps up to `depth` of them ready, in order.

    Threads may share it: each batch goes to one of them. Copies release the GIL and use one core.

    The thread keeps this object alive until `close`. If `take` or `pin` referred to the object that closes it, that
    object would never be collected.

    Args:
        take: Returns the next batch, blocking. StopIteration ends the thread; other errors are raised in the batch's
            turn. Its owner must make it return or raise before calling `close`.
        pin: Applied to each batch. Its errors are raised in the batch's turn, worded as torch does.
        depth: Maximum number of ready batches, at least 1. One more may be in work.
        device_index: Device to pin memory for. None: selects none.
    """

    def __init__(
        self, take: Callable[[], object], pin: Callable[[object], object], depth: int, device_index: int | None
    ) -> None:
        self._take, self._pin, self._depth, self._device_index = take, pin, depth, device_index
        self._ready: deque[tuple[object, BaseException | None]] = deque()
        # Wakeups and no lock: `close` may run inside a garbage collection, in any of the threads.
        self._arrived, self._room = Wakeup(), Wakeup()
        self._is_over = self._is_closed = False
        self._end: Callable[[], BaseException] = StopIteration
        self._thread = threading.Thread(target=self._run, name="headrace-pin", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `try_next` has something to report."""
        return self._arrived.fileno()

    def try_next(self) -> object:
        """Return the next batch if it is ready.

        Raises:
            anyio.WouldBlock: it is not ready.
            StopIteration: there are no more batches.
            LoaderClosedError: `close` was called.
            RuntimeError: the thread has died.
        """
        while True:
            if self._is_closed:
                raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)")
            is_over = self._is_over  # read first: no batch becomes ready after it is set
            with contextlib.suppress(IndexError):
                batch, error = self._ready.popleft()
                break
            if is_over:
                raise self._end()
            self._arrived.clear()  # check again: a batch may have come in between
            if not (self._ready or self._is_over or self._is_closed):
                raise anyio.WouldBlock
            self._arrived.set()
        self._room.set()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # break the cycle of error, traceback and this frame

    def next(self, timeout_s: float | None = None) -> object:
        """Same as `try_next`, but wait. Raise WouldBlock after `timeout_s` seconds."""
        while True:
            try:
                return self.try_next()
            except anyio.WouldBlock:
                if not self._arrived.wait(timeout_s):
                    raise

    def close(self) -> None:
        """End the thread and drop ready batches. Waiting threads get a LoaderClosedError."""
        self._is_closed = True
        self._ready.clear()
        self._arrived.set()
        self._room.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        end: Callable[[], BaseException] = _death
        try:
            # Per thread in torch: a copy on all cores would take them from the workers.
            torch.set_num_threads(1)
            if self._device_index is not None:
                torch.accelerator.set_device_index(self._device_index)
            while self._has_room() and self._step():
                pass
            end = StopIteration
        except BaseException as error:  # also SystemExit from a batch's own pin_memory: waiting threads must get it
            raised = error
            end = lambda: _death(raised)
        finally:
            self._end = end
            self._is_over = True
            self._arrived.set()

    def _has_room(self) -> bool:
        while not self._is_closed:
            if len(self._ready) < self._depth:
                return True
            self._room.wait()
            self._room.clear()
        return False

    def _step(self) -> bool:
        """Take and pin one batch. Return False at the end.

        Keeps no reference to the batch, which may hold a slab.
        """
        try:
            batch = self._take()
        except StopIteration:
            return False
        except BaseException as error:
            self._put(None, error)
            return True
        try:
            pinned = self._pin(batch)
        except Exception as error:
            self._put(None, caught(error, f"in pin memory thread for device {self._device_index}"))
        else:
            self._put(pinned, None)
        return True

    def _put(self, batch: object, error: BaseException | None) -> None:
        self._ready.append((batch, error))
        if self._is_closed:
            self._ready.clear()
        self._arrived.set()


def _death(cause: BaseException | None = None) -> RuntimeError:
    error = RuntimeError("Pin memory thread exited unexpectedly")
    error.__cause__ = cause
    return error
