"""Uses page indexes to exclude rows of row groups that footer statistics cannot exclude."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import anyio.to_thread
import numpy as np

from headrace.formats.limits import Limits
from headrace.formats.parquet.file_end import FileEnd
from headrace.formats.parquet.footer import ColumnChunk, Footer
from headrace.formats.parquet.page_index import SMALL_BYTES, PageIndex, Run, page_bounds, page_index
from headrace.formats.parquet.where import Asking, is_decided, pages_left

T = TypeVar("T")

_QUICK_BYTES = 16 * 1024  # of Thrift; parsing these takes some milliseconds


class Left(NamedTuple):
    """The remaining predicate of a row group, and the rows to read."""

    asked: Asking
    runs: tuple[Run, ...]


async def pruned(
    end: FileEnd, footer: Footer, asked: Sequence[Asking], limits: Limits, indexes: dict[int, PageIndex]
) -> list[Left]:
    """Return the remaining rows of each group.

    Args:
        asked: The predicate of each group, after its statistics were used.
        indexes: Receives the page indexes that were read, by the start of their chunk.
    """
    left = [Left(one, ((0, group.rows),)) for one, group in zip(asked, footer.groups, strict=True)]
    open_groups = [k for k, group in enumerate(footer.groups) if group.rows and not is_decided(asked[k], group)]
    with_bounds = {
        k: [
            chunk for leaf in leaves if (chunk := footer.groups[k].chunks[leaf]).page_index[1] and chunk.bounds_index[1]
        ]
        for k in open_groups
        if (leaves := {one.leaf for these in asked[k].questions for one in these})
    }
    places = [
        place for chunks in with_bounds.values() for one in chunks for place in (one.page_index, one.bounds_index)
    ]
    places += [
        chunk.page_index
        for k, chunks in with_bounds.items()
        if chunks
        for chunk in footer.groups[k].chunks.values()
        if _has_index(chunk)
    ]
    nbytes = sum(size for _, size in places)
    if not 0 < nbytes <= limits.unpacked_free_bytes:
        return left
    await end.read(places)

    def prune() -> None:
        for k, chunks in with_bounds.items():
            left[k] = _pruned(end, footer, k, chunks, asked[k], indexes)

    await quickly(prune, nbytes)
    return left


async def page_indexes(
    chunks: Sequence[ColumnChunk], rows: int, read: Callable[[int, int], Awaitable[bytes]]
) -> dict[int, PageIndex]:
    """Return the undamaged page indexes of chunks, by the start of the chunk."""
    wanted = [chunk for chunk in chunks if _has_index(chunk)]
    bodies = await asyncio.gather(*(read(at, at + size) for at, size in (chunk.page_index for chunk in wanted)))
    found = {}
    for chunk, body in zip(wanted, bodies, strict=True):
        with suppress(ValueError):
            found[chunk.start] = page_index(body, chunk, rows)
    return found


async def quickly(compute: Callable[[], T], nbytes: int) -> T:
    """Call `compute`, in a thread if `nbytes` of Thrift take long to parse."""
    return compute() if nbytes <= _QUICK_BYTES else await anyio.to_thread.run_sync(compute)


def _has_index(chunk: ColumnChunk) -> bool:
    return chunk.page_index[1] > 0 and chunk.size > SMALL_BYTES


def _pruned(
    end: FileEnd,
    footer: Footer,
    number: int,
    asked_chunks: Sequence[ColumnChunk],
    asked: Asking,
    indexes: dict[int, PageIndex],
) -> Left:
    group, bounds = footer.groups[number], {}
    for chunk in asked_chunks:
        with suppress(ValueError):
            index = page_index(end.at(*chunk.page_index), chunk, group.rows)
            bounds[chunk.start] = page_bounds(end.at(*chunk.bounds_index), chunk, index)
            indexes[chunk.start] = index
    masks = []
    for these in asked.questions:
        mask = np.ones(group.rows, np.bool_)
        for one in these:
            start = group.chunks[one.leaf].start
            if start in bounds:
                mask &= np.repeat(pages_left(one, bounds[start]), np.diff([*indexes[start].rows, group.rows]))
        masks.append(mask)
    kept = np.logical_or.reduce(masks)
    if kept.all():
        return Left(asked, ((0, group.rows),))
    for chunk in group.chunks.values():
        if _has_index(chunk) and chunk.start not in indexes:
            with suppress(ValueError):
                indexes[chunk.start] = page_index(end.at(*chunk.page_index), chunk, group.rows)
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
    return Left(asked.only([bool(mask.any()) for mask in masks]), tuple(zip(edges[::2], edges[1::2], strict=True)))
