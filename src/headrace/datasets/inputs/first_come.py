"""Samples of several streams as they come, whichever is first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio

from headrace.datasets.inputs.within import WithinDataset

_END = object()


class FirstComeDataset(WithinDataset):
    """The samples of streams, each as soon as it is there."""

    name = "join"
    why_no_state = (
        "states of .join(other) without on= would have to say which sample was first: it is another one in each run; "
        ".interleave(), hr.mix and .join(other, on=…) have states"
    )

    @property
    def text(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.join({', '.join(others)})"

    async def aiter(self) -> AsyncIterator[object]:
        loaders = self.loaders()
        waiting: dict[asyncio.Task[object], tuple[int, AsyncIterator[object]]] = {}
        try:
            iterators = [aiter(loader) for loader in loaders]
            waiting = {asyncio.ensure_future(_next(one)): (number, one) for number, one in enumerate(iterators)}
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: waiting[task][0]):
                    number, iterator = waiting.pop(task)
                    if (sample := task.result()) is not _END:
                        waiting[asyncio.ensure_future(_next(iterator))] = number, iterator
                        yield sample
        finally:
            with anyio.CancelScope(shield=True):
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for loader in loaders:
                    await loader.aclose()


async def _next(iterator: AsyncIterator[object]) -> object:
    return await anext(iterator, _END)
