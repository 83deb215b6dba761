"""The loader's event loop, in a thread of its own: reads go on while the trainer computes or blocks its own loop."""

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
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from headrace.errors import LoaderClosedError
from headrace.wakeup import Wakeup

T = TypeVar("T")

log = logging.getLogger("headrace")

_CLOSE_S = 5.0  # how long closing waits for the thread
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Mailbox:
    """Calls for the loop from other threads, also from finalizers: takes no lock, waits for nothing.

    The loop is woken once for all calls that are posted before it serves them: each time that it is, two threads get in
    one another's way.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._wakeup = Wakeup()
        self._is_woken = False  # set after a call is put, and taken back before calls are taken: none is overlooked

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop call `call(*args)` soon."""
        self.put(call, *args)
        if not self._is_woken:
            self._is_woken = True
            try:
                self._wakeup.set()
            except BaseException:  # an interrupt
                self._is_woken = False
                raise

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop call `call(*args)` before the next posted call, without waking the loop."""
        self._calls.append((call, args))

    def fileno(self) -> int:
        """Readable while there are calls that were posted."""
        return self._wakeup.fileno()

    def serve(self) -> None:
        """Make the calls that were posted so far."""
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
        opened: awaited on the loop before anything else runs there.
        closing: awaited on the loop when everything else there has ended.
        closed: called in the thread when the loop is gone.
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
        """Run a coroutine function on the loop, beside the others; it handles its own exceptions.

        `refused` is called instead where the engine is closing: whoever waits for `main` must not wait for ever.
        """
        self.mailbox.post(self._start, main, refused)
        if self.state is EngineState.CLOSED:
            self.mailbox.serve()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function on the loop and wait for its result. For rare things: state, opening, closing."""
        result: Future[T] = Future()

        async def run() -> None:
            try:
                result.set_result(await function())
            except Exception as error:
                result.set_exception(error)
            finally:
                refuse()

        def refuse() -> None:
            if not result.done():
                result.set_exception(LoaderClosedError("the loader was closed meanwhile"))

        self.start(run, refuse)
        return result.result()

    def close_soon(self) -> None:
        """Begin to close, from any thread and without waiting."""
        if self.state is not EngineState.CLOSED:
            self.mailbox.post(self._end.set)

    def close(self) -> None:
        """Close, and wait until nothing of it is left."""
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
    """Whether the interpreter is ending. Threads that still wait for a batch are daemons: nobody tells them."""
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
    """Await `main(*args)` on a loop of its own, uvloop's where that is there; like `anyio.run`."""
    base: Any = asyncio.SelectorEventLoop
    if importlib.util.find_spec("uvloop") is not None:
        base = importlib.import_module("uvloop").Loop
    anyio.run(_main, main, args, backend_options={"loop_factory": type("Loop", (_Lasting, base), {})})


async def _main(main: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
    try:
        await main(*args)
    except _ENDINGS as error:  # asyncio takes the loop for one that has ended by it already
        raise RuntimeError(f"a loader's event loop ends with {error!r}") from error


class _Lasting:
    """Goes on after a SystemExit or KeyboardInterrupt of a task or callback that a user's function has begun.

    By those a loop ends, so that the program does. This one is in a thread, where no program ends and no Ctrl-C comes:
    whoever awaits such a task has the error, as with any other, and it is told, for perhaps nobody does.
    """

    def run_forever(self) -> None:
        loop: Any = super()
        while True:
            try:
                loop.run_forever()
            except _ENDINGS as error:
                message = f"{error!r} in a task or callback of a loader's event loop, which goes on"
                loop.call_exception_handler({"message": message, "exception": error})
            else:
                return
