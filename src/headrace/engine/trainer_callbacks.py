"""Calls from the engine to the trainer during an epoch. All other messages go one way."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from headrace._util.context import is_ours, running_charge, running_reader
from headrace.errors import LoaderClosedError, OptionError
from headrace.options import Skip

if TYPE_CHECKING:
    from headrace.dataset.asynchronous import AsyncIterableDataset

_LOOK_S = 0.5  # interval of checks for a closed loop, which sends no notification


class TrainerCalls:
    """The user's `hr.Skip(when=)`, and the samples of a data set whose `loop` is "caller".

    Args:
        policy: Referenced weakly: the user's function may refer to the loader, and the engine's thread holds this
            object during an epoch.
        loop: Loop of the `async for`, if any.
    """

    def __init__(self, policy: Skip | None, loop: asyncio.AbstractEventLoop | None) -> None:
        self._policy = None if policy is None else weakref.ref(policy)
        self._loop = loop

    def decide(self, error: BaseException) -> object:
        """Return the decision of `hr.Skip(when=)` on a failed sample. False once the loader is gone.

        Called in order of delivery. An exception raised here replaces the batch.
        """
        policy = None if self._policy is None else self._policy()
        return policy is not None and policy.when is not None and policy.when(error)

    def samples_of(self, data: AsyncIterableDataset) -> Callable[[], AsyncIterator[object]]:
        """Return a factory of iterators over a data set whose `loop` is "caller".

        Raises:
            OptionError: the loader was not iterated over with `async for`.
        """
        if self._loop is None:
            raise OptionError(f"{type(data).__name__}.loop is 'caller': it can be used with `async for` only")
        return partial(from_caller, data, self._loop)


async def from_caller(source: AsyncIterableDataset, loop: asyncio.AbstractEventLoop) -> AsyncIterator[object]:
    """Yield the samples of `source.aiter()`, which runs on another loop.

    Raises:
        LoaderClosedError: that loop has ended before the samples.
    """
    iterator = source.aiter()
    asked: Future[object] | None = None
    is_lost = is_users = False

    async def following() -> object:
        nonlocal is_lost, is_users
        leave()
        is_lost = getattr(iterator, "ag_frame", iterator) is None  # a generator closed by its loop
        if is_lost:
            return None
        try:
            return await anext(iterator, _END)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            is_users = task is not None and not task.cancelling()  # `asyncio.run` cancels remaining tasks
            raise

    def leave() -> None:
        running_reader.set(None)  # these belong to the engine's loop
        running_charge.set(None)

    async def close() -> None:
        leave()
        with contextlib.suppress(RuntimeError):  # a cancelled step is still running and ends the generator
            await iterator.aclose()  # type: ignore[attr-defined]

    async def watch() -> None:
        while not loop.is_closed():  # noqa: ASYNC110 (loops have no event for it)
            await asyncio.sleep(_LOOK_S)
        if asked is not None and not asked.done():
            asked.set_exception(RuntimeError("the loop is closed"))  # no other code would set a result

    watching = asyncio.create_task(watch())
    try:
        while True:
            asking, sample = following(), None
            try:
                asked = asyncio.run_coroutine_threadsafe(asking, loop)
                sample = await asyncio.shield(asyncio.wrap_future(asked))  # a closed loop cannot be cancelled
            except asyncio.CancelledError as error:
                if is_ours(error) or is_users:
                    raise
                is_lost = True
            except RuntimeError:
                if not loop.is_closed():
                    raise
                is_lost = True
            finally:
                if loop.is_closed():
                    asking.close()  # it may never have started
                elif asked is not None:
                    asked.cancel()
            if is_lost:
                raise LoaderClosedError(
                    f"{type(source).__name__}.loop is 'caller', and the event loop of the `async for` has ended before "
                    "its samples have: iterate in one loop to their end, or start a new iteration in another one"
                )
            if sample is _END:
                return
            yield sample
    finally:
        watching.cancel()
        if hasattr(iterator, "aclose") and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(lambda: loop.create_task(close()))  # not awaited: it may wait for this task


_END = object()
