"""The loader's event loop in its own thread, independent of the trainer."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import importlib.util
import logging
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from headrace._util.wakeup import Wakeup

T = TypeVar("T")

log = logging.getLogger("headrace")

_CLOSE_S = 5.0  # limit of the wait for the thread on close
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Mailbox:
    """Calls for the loop from other threads and finalizers, without locks or waits.

    The loop is woken once for all calls posted before it serves them, as each wakeup makes two threads contend.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._wakeup = Wakeup()
        self._is_woken = False  # set after a call is added, cleared before calls are taken: none is missed

    def post(self, call: Callable[..., object], *args: object) -> None:
        self.put(call, *args)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._wakeup.set()
            except BaseException:  # an interrupt
                self._is_woken = False
                raise

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Call `call(*args)` on the loop before the next posted call, without a wakeup."""
        self._calls.append((call, args))

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def serve(self) -> None:
        self._wakeup.clear()
        self._is_woken = False
        while True:
            try:
                call, args = self._calls.popleft()
            except IndexError:
                return
            call(*args)


class EngineState(Enum):
    """starting → running → draining → closed."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"


class Engine:
    """A thread with an event loop that lives as long as its loader.

    Args:
        opened: Awaited on the loop before anything else.
        closing: Awaited on the loop after everything else has ended.
        closed: Called in the thread after the loop has ended.
    """

    def __init__(
        self, opened: Callable[[], Awaitable[None]], closing: Callable[[], Awaitable[None]], closed: Callable[[], None]
    ) -> None:
        self.state = EngineState.STARTING
        self.mailbox = Mailbox()
        self._hooks = opened, closing, closed
        self._group: TaskGroup | None = None
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="headrace-engine", daemon=True)
        _engines.add(self)
        self._thread.start()

    def start(self, main: Callable[[], Awaitable[None]], refused: Callable[[], None]) -> None:
        """Run a coroutine function on the loop, beside others. It must handle its exceptions.

        If the engine is closing, `refused` is called instead, so that nobody waits for `main` for ever.
        """
        self.mailbox.post(self._start, main, refused)
        if self.state is EngineState.CLOSED:
            self.mailbox.serve()

    def close_soon(self) -> None:
        if self.state is not EngineState.CLOSED:
            self.mailbox.post(self._end.set)

    def close(self) -> None:
        self.close_soon()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        opened, closing, closed = self._hooks
        try:
            run(self._main, opened, closing)
        except BaseException:
            log.exception("closing a loader failed")
        finally:
            self.state = EngineState.CLOSED
            self.mailbox.serve()
            closed()

    async def _main(self, opened: Callable[[], Awaitable[None]], closing: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await opened()
            async with anyio.create_task_group() as self._group:
                self.state = EngineState.RUNNING
                loop.add_reader(self.mailbox.fileno(), self.mailbox.serve)
                self.mailbox.serve()
                await self._end.wait()
                self.state = EngineState.DRAINING
                self._group.cancel_scope.cancel()
        finally:
            loop.remove_reader(self.mailbox.fileno())
            with anyio.CancelScope(shield=True):
                await closing()

    def _start(self, main: Callable[[], Awaitable[None]], refused: Callable[[], None]) -> None:
        if self._group is not None and self.state is EngineState.RUNNING:
            self._group.start_soon(_awaited, main)
        else:
            refused()


async def _awaited(main: Callable[[], Awaitable[None]]) -> None:
    await main()


def is_exiting() -> bool:
    """True if the interpreter is exiting. Daemon threads may still wait for a batch then."""
    return _is_exiting


_is_exiting = False


@atexit.register
def _close_all() -> None:
    global _is_exiting
    _is_exiting = True
    for engine in list(_engines):
        engine.close()


_ENDINGS = SystemExit, KeyboardInterrupt


def run(main: Callable[..., Awaitable[None]], *args: object) -> None:
    """Await `main(*args)` on a new loop, uvloop's if installed, as `anyio.run` does."""
    base: Any = asyncio.SelectorEventLoop
    if importlib.util.find_spec("uvloop") is not None:
        base = importlib.import_module("uvloop").Loop
    anyio.run(_main, main, args, backend_options={"loop_factory": type("Loop", (_Lasting, base), {})})


async def _main(main: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
    try:
        await main(*args)
    except _ENDINGS as error:  # asyncio assumes that the error has ended the loop
        raise RuntimeError(f"a loader's event loop ends with {error!r}") from error


class _Lasting:
    """A loop that continues after a SystemExit or KeyboardInterrupt of user code.

    These normally end the loop, to end the program. This loop runs in a thread that gets no Ctrl-C. Who awaits the
    failed task gets the error, and it is logged too.
    """

    def run_forever(self) -> None:
        loop: Any = super()
        while True:
            try:
                loop.run_forever()
            except _ENDINGS as error:
                message = f"{error!r} in a task or callback of a loader's event loop, which continues"
                loop.call_exception_handler({"message": message, "exception": error})
            else:
                return
