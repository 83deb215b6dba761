"""Pinning in a thread: batches are copied into page-locked memory while the trainer works on those before."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import anyio
import torch

from headrace.errors import LoaderClosedError
from headrace.torch_compat.errors import caught
from headrace.wakeup import Wakeup

_JOIN_S = 10.0  # copying one batch takes far less, and a `take` that its owner forgot to end must not hang the trainer


class PinThread:
    """A thread that takes batches, pins them, and has up to `depth` of them ready, in order.

    Several threads may share one: each batch goes to one of them. Copies do not hold the GIL, and use one core.

    The thread keeps this object alive until `close`; so neither `take` nor `pin` may refer to what closes it when it is
    collected.

    Args:
        take: gives the next batch, blocking; StopIteration is the end, and what else it raises is raised in the batch's
            turn. Its owner makes it return, or raise, before calling `close`.
        pin: what is done to each batch; its errors are raised in the batch's turn, worded as torch does.
        depth: how many batches may be ready, one more may be in work; at least 1.
        device_index: the device for which memory is pinned; None: none is chosen.
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
        """What to wait on for readability: then `try_next` may have something to say."""
        return self._arrived.fileno()

    def try_next(self) -> object:
        """The next batch, if it is ready.

        Raises:
            anyio.WouldBlock: it is not.
            StopIteration: there is none any more.
            LoaderClosedError: `close` was called.
            RuntimeError: the thread has died.
        """
        while True:
            if self._is_closed:
                raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)")
            is_over = self._is_over  # asked first: nothing becomes ready after it
            with contextlib.suppress(IndexError):
                batch, error = self._ready.popleft()
                break
            if is_over:
                raise self._end()
            self._arrived.clear()  # and look again: what came between is for others who wait, too
            if not (self._ready or self._is_over or self._is_closed):
                raise anyio.WouldBlock
            self._arrived.set()
        self._room.set()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # its traceback has this frame: what they hold would wait for a garbage collection

    def next(self, timeout_s: float | None = None) -> object:
        """As `try_next`, blocking until something is ready; WouldBlock once `timeout_s` seconds have passed."""
        while True:
            try:
                return self.try_next()
            except anyio.WouldBlock:
                if not self._arrived.wait(timeout_s):
                    raise

    def close(self) -> None:
        """End the thread, and drop what is ready; who waits gets a LoaderClosedError. It may be called again."""
        self._is_closed = True
        self._ready.clear()
        self._arrived.set()
        self._room.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        end: Callable[[], BaseException] = _death
        try:
            # torch keeps this number per thread: a copy by all cores would take them from the workers.
            torch.set_num_threads(1)
            if self._device_index is not None:
                torch.accelerator.set_device_index(self._device_index)
            while self._has_room() and self._step():
                pass
            end = StopIteration
        except BaseException as error:  # also SystemExit of a batch's own pin_memory: those who wait must hear of it
            raised = error
            end = lambda: _death(raised)
        finally:
            self._end = end
            self._is_over = True
            self._arrived.set()

    def _has_room(self) -> bool:
        """Wait for a place; False when there will be none."""
        while not self._is_closed:
            if len(self._ready) < self._depth:
                return True
            self._room.wait()
            self._room.clear()
        return False

    def _step(self) -> bool:
        """Take and pin one batch; False at the end. Nothing of it stays in this thread: it may hold a slab."""
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
