"""Parallel listing by key ranges, for a store that lists keys in order and by page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from headrace.errors import BadResponseError
from headrace.types import Listed

Pages = Callable[[str | None], AsyncIterator[Sequence[Listed]]]
"""Lists the objects after a key, or all, in ascending pages. All but the last page are full."""

_AT_ONCE = 16
_PAGES_FIRST = 4  # pages before a folder is divided; most have fewer
_PAGES = 16  # pages before a range is divided again
_WAITING = 64  # pages in the queue
_SIGNS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TRIED = "0123456789AGNTacegnt"
_DEEPEST = 64


@dataclass
class _Range:
    after: str | None
    end: str | None


async def list_in_ranges(pages: Pages, page_size: int) -> AsyncGenerator[Sequence[Listed], None]:
    """List all objects in pages of up to `page_size`, each object once.

    The first pages are read one by one. If more follow, the rest is divided at likely keys, such as photo-1, photo-2,
    …, photo-9 after photo-0123. Large ranges are divided again.
    """
    listing = _Listing(pages, page_size)
    try:
        async for page in listing.run():
            yield page
    finally:
        await listing.aclose()


async def without_folders(pages: AsyncGenerator[Sequence[Listed], None]) -> AsyncGenerator[Sequence[Listed], None]:
    folders = _Folders()
    async with aclosing(pages) as each:
        async for page in each:
            yield folders.without(page)
    yield folders.waiting


class _Folders:
    """Filters out empty objects that represent folders: "d/", listed as "d" before its content.

    `waiting` has the last object of a page, while it may be a folder.
    """

    def __init__(self) -> None:
        self.waiting: list[Listed] = []

    def without(self, page: Sequence[Listed]) -> list[Listed]:
        """Return the objects that are known not to represent folders. Pages come in key order."""
        known = [*self.waiting, *page]
        self.waiting = [one for one in known[-1:] if one.size == 0]
        objects = [
            one for one, behind in pairwise(known) if one.size != 0 or not behind.path.startswith(f"{one.path}/")
        ]
        return objects if self.waiting else objects + known[-1:]


class _Listing:
    def __init__(self, pages: Pages, page_size: int) -> None:
        self._pages, self._page_size = pages, page_size
        self._waiting: deque[_Range] = deque([_Range(None, None)])
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Queue[Sequence[Listed] | None](_WAITING)  # None: a task has ended
        self._can_divide: bool | None = None  # None: not tried yet

    async def run(self) -> AsyncIterator[Sequence[Listed]]:
        while True:
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.remove(task)
                task.result()
            while self._waiting and len(self._tasks) < _AT_ONCE:
                task = asyncio.create_task(self._pages_of(self._waiting.popleft()))
                task.add_done_callback(self._wake)
                self._tasks.add(task)
            if not self._tasks and self._ready.empty():
                return
            page = await self._ready.get()
            if page is not None:
                yield page

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(BaseException):
                await task

    def _wake(self, _: Any) -> None:
        with suppress(asyncio.QueueFull):  # then the queue has pages, which wake the reader
            self._ready.put_nowait(None)

    async def _pages_of(self, part: _Range) -> None:
        count, last = 0, part.after
        patience = _PAGES_FIRST if part.after is None else _PAGES
        folders = _Folders()
        pages: Any = self._pages(part.after)
        async with aclosing(pages):
            async for page in pages:
                keys = _keys(page)
                if not _ascend(last, keys):
                    if self._can_divide:
                        raise BadResponseError("keys of a listing are out of order, and were not before", url=keys[0])
                    self._can_divide = False
                last = keys[-1] if keys else last
                count += 1
                objects = folders.without(
                    page if part.after is None else [one for one in page if one.path > part.after]
                )
                end = part.end
                if end is not None and any(one.path > end for one in page):
                    await self._ready.put(_up_to(end, objects))
                    return
                await self._ready.put(objects)
                if count >= patience and len(page) >= self._page_size and await self._may_divide(page[-1].path):
                    self._divide(part, page)
                    count = 0
        await self._ready.put(folders.waiting)

    async def _may_divide(self, last: str) -> bool:
        if self._waiting or len(self._tasks) > _AT_ONCE // 2 or self._can_divide is False:
            return False
        if self._can_divide is None:
            pages: Any = self._pages(last)
            async with aclosing(pages):
                following: Sequence[Listed] = await anext(pages, [])
            self._can_divide = _ascend(last, _keys(following))
        return self._can_divide

    def _divide(self, part: _Range, page: Sequence[Listed]) -> None:
        points = [point for point in points_behind(page[0].path, page[-1].path) if part.end is None or point < part.end]
        if points:
            ends = [*points[1:], part.end]
            self._waiting.extend(_Range(point, end) for point, end in zip(points, ends, strict=True))
            part.end = points[0]


def points_behind(first: str, last: str) -> list[str]:
    """Return sorted keys at which the keys after a page may be divided."""
    return sorted(set(_points(first, last)))


def _points(first: str, last: str) -> Iterator[str]:
    same = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    for at in range(max(0, same - _DEEPEST), min(same + 1, len(last))):
        if last[at] in _SIGNS:
            yield from (last[:at] + sign for sign in _TRIED if sign > last[at])


def _keys(page: Sequence[Listed]) -> list[str]:
    """Return a page's keys, without those of empty objects, which may have lost a slash."""
    return [one.path for one in page if one.size != 0]


def _up_to(end: str, objects: Sequence[Listed]) -> list[Listed]:
    """Return the objects up to a key. A folder object's "a" after "a-1" is really "a/"."""
    return list(takewhile(lambda one: one.path <= end, objects))


def _ascend(last: str | None, keys: Sequence[str]) -> bool:
    before = [*([] if last is None else [last]), *keys]
    return all(a < b for a, b in zip(before, keys if last is not None else keys[1:], strict=False))
