"""What the engine asks of the trainer, where it is hosted by a thread of the same process: functions are called."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial

from headrace.cancelled import is_ours
from headrace.datasets.faces import IteratedData
from headrace.errors import LoaderClosedError, OptionError
from headrace.options import SkipPolicy
from headrace.running import running_charge, running_reader

_LOOK_S = 0.5  # how often it is seen whether that loop has been closed, which says nothing to anybody


class DirectCalls:
    """`headrace.engine.calls.TrainerCalls` in one process.

    Args:
        policy: the loader's, which alone holds it: the user's function may refer to the loader, and the engine's thread
            has this as long as an epoch runs.
        loop: of the `async for`; None: there is none.
    """

    def __init__(self, policy: SkipPolicy | None, loop: asyncio.AbstractEventLoop | None) -> None:
        self._policy = None if policy is None else weakref.ref(policy)
        self._loop = loop

    def decide(self, error: BaseException) -> object:
        """What the function says; nothing is left out any more where the loader is gone."""
        policy = None if self._policy is None else self._policy()
        return policy is not None and policy.decide is not None and policy.decide(error)

    def samples_of(self, data: IteratedData) -> Callable[[], AsyncIterator[object]]:
        """What makes an iterator that runs on that loop."""
        if self._loop is None:
            raise OptionError(f"{type(data).__name__}.loop is 'caller': it can be used with `async for` only")
        return partial(from_caller, data, self._loop)


async def from_caller(source: IteratedData, loop: asyncio.AbstractEventLoop) -> AsyncIterator[object]:
    """The samples of `source.aiter()`, which runs on another loop.

    Raises:
        LoaderClosedError: that loop has ended before they have.
    """
    iterator = source.aiter()
    asked: Future[object] | None = None
    is_lost = is_users = False

    async def following() -> object:
        nonlocal is_lost, is_users
        leave()
        is_lost = getattr(iterator, "ag_frame", iterator) is None  # a generator that its loop has closed
        if is_lost:
            return None
        try:
            return await anext(iterator, _END)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            is_users = task is not None and not task.cancelling()  # `asyncio.run` cancels all that is left
            raise

    def leave() -> None:
        running_reader.set(None)  # they belong to our loop
        running_charge.set(None)

    async def close() -> None:
        leave()
        with contextlib.suppress(RuntimeError):  # what it is in the middle of was cancelled, and ends it
            await iterator.aclose()  # type: ignore[attr-defined]

    async def watch() -> None:
        while not loop.is_closed():  # noqa: ASYNC110 (loops have no event for it)
            await asyncio.sleep(_LOOK_S)
        if asked is not None and not asked.done():
            asked.set_exception(RuntimeError("the loop is closed"))  # nobody else would ever answer

    watching = asyncio.create_task(watch())
    try:
        while True:
            asking, sample = following(), None
            try:
                asked = asyncio.run_coroutine_threadsafe(asking, loop)
                sample = await asyncio.shield(asyncio.wrap_future(asked))  # to cancel it would be told to a closed loop
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
                    asking.close()  # it may never have begun
                elif asked is not None:
                    asked.cancel()
            if is_lost:
                raise LoaderClosedError(
                    f"{type(source).__name__}.loop is 'caller', and the event loop of the `async for` has ended before "
                    "its samples have: iterate in one loop to their end, or begin anew in another one"
                )
            if sample is _END:
                return
            yield sample
    finally:
        watching.cancel()
        if hasattr(iterator, "aclose") and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has been closed meanwhile
                loop.call_soon_threadsafe(lambda: loop.create_task(close()))  # not awaited: it may be waiting for us


_END = object()
