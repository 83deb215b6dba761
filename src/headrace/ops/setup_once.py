"""Functions of operators that need setup in each process."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread

from headrace._util import check
from headrace._util.context import running_part, running_threads
from headrace._util.functions import name_of

_NOTHING = object()


class Prepared:
    """A function with setup that runs once in each process. Pickles omit the setup's result.

    Args:
        lazy_init: Creates the second argument of `function`.
        sharding_settings: Called with the number of ranks and the index of this one.
        is_separate: True if `function` must not run in the process that created this object.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        lazy_init: Callable[[], object] | None,
        sharding_settings: Callable[[int, int], object] | None,
        *,
        is_separate: bool,
    ) -> None:
        self.function, self._lazy_init, self._sharding_settings = function, lazy_init, sharding_settings
        self._home = os.getpid() if is_separate else None
        self.__qualname__ = name_of(function)
        self._forget()

    def _forget(self) -> None:
        self._lock, self._made, self._part = threading.Lock(), _NOTHING, (0, 0)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_made", "_part")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, sample: object) -> Any:
        return self.function(sample, *self._ready())

    def _ready(self) -> tuple[object, ...]:
        """Run pending setup. Return the arguments after the sample."""
        if self._home == os.getpid():
            name = f"{self.__qualname__} has is_separate_process=True, and it"
            raise check.lacking(name, "processes: give num_workers")
        part = running_part.get()
        if self._sharding_settings is not None and part != self._part:
            with self._lock:
                if part != self._part:
                    self._sharding_settings(*part)
                    self._part = part
        if self._lazy_init is None:
            return ()
        if self._made is _NOTHING:
            with self._lock:
                if self._made is _NOTHING:
                    self._made = self._lazy_init()
        return (self._made,)


class AsyncPrepared(Prepared):
    async def __call__(self, sample: object) -> Any:
        return await self.function(sample, *self._ready())


class AsyncManyPrepared(Prepared):
    async def __call__(self, sample: object) -> AsyncIterator[object]:
        async for part in self.function(sample, *self._ready()):
            yield part


class CalledInThread:
    def __init__(self, function: Callable[[object], object]) -> None:
        self.function = function
        self.__qualname__ = name_of(function)

    async def __call__(self, sample: object) -> object:
        return await anyio.to_thread.run_sync(self.function, sample, limiter=running_threads.get())
