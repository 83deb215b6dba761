"""Running coroutines synchronously, outside a loader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


def blocking(function: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run a coroutine function to its end, even if a loop is running in this thread."""
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(function()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="headrace-blocking")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]
