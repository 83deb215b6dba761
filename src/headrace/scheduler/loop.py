"""The event loop of a loader, which ends by nothing that users' functions raise on it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

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
