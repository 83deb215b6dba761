"""The indexes of several groups of shards as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace._util.reads import Reads
from headrace.formats.index.shard import ShardIndex
from headrace.indexes.index import Index, OpenedIndex
from headrace.types import Ints


class JoinedFiles:
    """Concatenated indexes, which stay open with their caches for other users."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = tuple(indexes)

    async def open(
        self,
        reader: Reads,
        urls: Sequence[str],  # noqa: ARG002 (the indexes have theirs)
        hold: Callable[[int, ShardIndex], None],  # noqa: ARG002 (each has its own cache)
    ) -> OpenedIndex:
        for index in self._indexes:
            await index.open(reader)
        counts = [np.diff(index.starts) for index in self._indexes]
        firsts = np.cumsum([0, *map(len, counts)])

        async def load(reader: Reads, ordinal: int) -> ShardIndex:
            k = int(np.searchsorted(firsts, ordinal, side="right")) - 1
            return await self._indexes[k].shard(reader, ordinal - int(firsts[k]))

        return OpenedIndex(np.concatenate(counts), load, self._mean_bytes(), self._blocks())

    def _blocks(self) -> Ints | None:
        if all(index.blocks is None for index in self._indexes):
            return None
        begins, first = list[Ints](), 0
        for index in self._indexes:
            count = int(index.starts[-1])
            begins.append(first + (np.arange(count) if index.blocks is None else index.blocks[:-1]))
            first += count
        return np.concatenate([*begins, [first]]).astype(np.int64)

    def _mean_bytes(self) -> float | None:
        whole, count = 0.0, 0
        for index in self._indexes:
            if index.mean_bytes is None:
                return None
            whole += index.mean_bytes * int(index.starts[-1])
            count += int(index.starts[-1])
        return whole / count if count else 0.0
