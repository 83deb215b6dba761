"""Coroutines that are waited for outside a loader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


def blocking(function: Callable[[], Any]) -> Any:
    """Run a coroutine function to its end, also where a loop is running in this thread."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((asyncio.run(function()), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, name="headrace-blocking")
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value
