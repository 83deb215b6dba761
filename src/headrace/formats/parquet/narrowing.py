"""Rows that page indexes leave out, of groups of which the footer cannot say it of all.

An index that is not there, or damaged, leaves nothing out: then its column is read as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import ColumnChunk, Footer, Group, by_column
from headrace.formats.parquet.page_index import PageIndex, Run, page_bounds, page_index
from headrace.formats.parquet.reading import FileEnd, Place
from headrace.formats.parquet.some_rows import SMALL_BYTES, SomeRows
from headrace.formats.parquet.where import Asking, is_decided, pages_left

T = TypeVar("T")

_QUICK_BYTES = 16 * 1024  # of thrift, which are read in some milliseconds
_AT_ONCE_BYTES = 256 * 1024  # of indexes, which are read before it is known whether all are needed: that is one request


class Left(NamedTuple):
    """What is left of a group of rows.

    Attributes:
        asked: what its rows must be asked.
        some: the rows that are left, with their pages; None: all.
    """

    asked: Asking
    some: SomeRows | None = None


async def quickly(compute: Callable[[], T], nbytes: int) -> T:
    """What is computed of so many bytes of thrift: in a thread, where that takes its time."""
    return compute() if nbytes <= _QUICK_BYTES else await anyio.to_thread.run_sync(compute)


class Narrowing:
    """Learns from the page indexes of a file which rows its groups have left.

    Args:
        end: reads the file.
        left: what is left to ask of the rows of each group, after its statistics were asked.

    Attributes:
        indexes: of columns that were read, by where these begin.
    """

    def __init__(self, end: FileEnd, footer: Footer, left: Sequence[Asking], limits: Limits) -> None:
        self._end, self._left, self._limits = end, left, limits
        self._schema, self._groups = footer.schema, footer.groups
        self.indexes: dict[int, PageIndex] = {}

    async def run(self) -> list[Left]:
        """What is left of each group.

        Raises:
            ValueError: the file is shorter than it was.
            StorageError: it could not be read. No rows more are left then: they are the same in every process.
        """
        groups, left = self._groups, [Left(one) for one in self._left]
        asked = {k: chunks for k, group in enumerate(groups) if (chunks := self._asked(k, group))}
        first = [place for chunks in asked.values() for one in chunks for place in (one.page_index, one.bounds_index)]
        if not 0 < _nbytes(first) <= self._limits.unpacked_free_bytes:
            return left
        others = [place for k in asked for place in self._others(k).values()]
        is_little = _nbytes(first) + _nbytes(others) <= _AT_ONCE_BYTES
        await self._end.read([*first, *others] if is_little else first)
        found = await quickly(partial(self._look, asked), _nbytes(first))
        more = {k: self._others(k) for k, (_, runs) in found.items() if runs}
        nbytes = sum(_nbytes(places.values()) for places in more.values())
        if nbytes > self._limits.unpacked_free_bytes:
            more, nbytes = {}, 0
        await self._end.read(place for places in more.values() for place in places.values())
        for k, one in await quickly(partial(self._narrow, found, more), nbytes):
            left[k] = one
        return left

    def _asked(self, k: int, group: Group) -> list[ColumnChunk]:
        """The columns of a group whose page indexes are asked."""
        asked = self._left[k]
        if not group.rows or is_decided(asked, group):
            return []
        numbers = {one.leaf for these in asked.questions for one in these}
        return [chunk for leaf in numbers if (chunk := group.chunks[leaf]).page_index[1] and chunk.bounds_index[1]]

    def _others(self, k: int) -> dict[int, Place]:
        """Where the indexes lie that are not known yet of a group's columns, by where these begin."""
        return {
            chunk.start: chunk.page_index
            for chunk in self._groups[k].chunks
            if chunk.page_index[1] and chunk.size > SMALL_BYTES and chunk.start not in self.indexes
        }

    def _look(self, asked: dict[int, list[ColumnChunk]]) -> dict[int, tuple[Asking, tuple[Run, ...]]]:
        """What is left to ask of groups, and their rows that are left, where that are not all."""
        found = {}
        for k, chunks in asked.items():
            group, left = self._groups[k], self._left[k]
            bounds = {}
            for chunk in chunks:
                with suppress(ValueError):
                    index = page_index(self._end.at(*chunk.page_index), chunk, group.rows)
                    bounds[chunk.start] = page_bounds(self._end.at(*chunk.bounds_index), chunk, index)
                    self.indexes[chunk.start] = index
            masks = []
            for these in left.questions:
                mask = np.ones(group.rows, np.bool_)
                for one in these:
                    start = group.chunks[one.leaf].start
                    if start in bounds:
                        pages = np.diff([*self.indexes[start].rows, group.rows])
                        mask &= np.repeat(pages_left(one, bounds[start]), pages)
                masks.append(mask)
            kept = np.logical_or.reduce(masks)
            if not kept.all():
                found[k] = left.only([bool(mask.any()) for mask in masks]), _runs(kept)
        return found

    def _narrow(
        self, found: dict[int, tuple[Asking, tuple[Run, ...]]], places: dict[int, dict[int, Place]]
    ) -> list[tuple[int, Left]]:
        narrowed = []
        for k, (asked, runs) in found.items():
            group = self._groups[k]
            for chunk in group.chunks:
                if chunk.start in places.get(k, {}):
                    with suppress(ValueError):
                        self.indexes[chunk.start] = page_index(self._end.at(*chunk.page_index), chunk, group.rows)
            some = SomeRows.of(by_column(self._schema.columns, group.chunks), self.indexes, runs, group.rows)
            narrowed.append((k, Left(asked, some if runs else None)))
        return narrowed


async def page_indexes(
    chunks: Sequence[ColumnChunk], rows: int, read: Callable[[int, int], Awaitable[bytes]]
) -> dict[int, PageIndex]:
    """The indexes of the pages of chunks, by where these begin, as far as there are any that are whole."""
    wanted = [chunk for chunk in chunks if chunk.page_index[1] and chunk.size > SMALL_BYTES]
    bodies = await asyncio.gather(*(read(at, at + size) for at, size in (chunk.page_index for chunk in wanted)))
    found = {}
    for chunk, body in zip(wanted, bodies, strict=True):
        with suppress(ValueError):  # the pages are read all the same, without it
            found[chunk.start] = page_index(body, chunk, rows)
    return found


def _runs(kept: NDArray[np.bool_]) -> tuple[Run, ...]:
    """The stretches of rows that are kept."""
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _nbytes(places: Iterable[Place]) -> int:
    return sum(nbytes for _, nbytes in places)
