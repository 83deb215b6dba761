"""Indexes that shards bring along: a table in each, or a catalogue beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import FormatError, masked
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.shard import ShardIndex, gaps
from headrace.formats.limits import Limits
from headrace.indexes.index import OpenedIndex, for_each
from headrace.protocols import Reads


class OwnTables:
    """What a format knows of its shards without an index of ours.

    Args:
        form: of the shards.
        entries: what is known of each.
        limits: how much they may ask for.
    """

    def __init__(self, form: Format, entries: Sequence[ShardEntry], limits: Limits) -> None:
        self._format, self._entries, self._limits = form, tuple(entries), limits

    async def open(
        self,
        reader: Reads,
        urls: Sequence[str],  # noqa: ARG002 (the entries have theirs)
        hold: Callable[[int, ShardIndex], None],
    ) -> OpenedIndex:
        async def count(ordinal: int) -> int:
            known = self._entries[ordinal].samples
            if known is not None:
                return known
            shard = await self._load(reader, ordinal)
            hold(ordinal, shard)
            return len(shard.rows)

        counts = np.array(await for_each(len(self._entries), count), np.int64)
        shares = any(entry.shares_blocks for entry in self._entries)
        return OpenedIndex(counts, self._load, shares_blocks=shares)

    async def _load(self, reader: Reads, ordinal: int) -> ShardIndex:
        entry = self._entries[ordinal]
        shard = await self._format.index(reader, entry, self._limits)
        try:
            _check(shard)
        except ValueError as error:
            raise FormatError(
                f"the format {self._format.name!r} tells of {masked(entry.url)} what no shard can be: {error}",
                url=entry.url,
            ) from None
        return shard


def _check(shard: ShardIndex) -> None:
    """See that what somebody's format says of a shard can be read as it lies."""
    rows = shard.rows
    blocks = len(rows.starts) - 1
    if len(rows.offset) and 0 <= shard.size < int((rows.offset + rows.size).max()):
        raise ValueError(f"a member ends behind its {shard.size} bytes")
    if len(rows.size) and int(rows.size.min()) < 0:
        raise ValueError("a member has less than no bytes")
    gaps(rows.offset, rows.size, 1)
    if (
        blocks < 0
        or int(rows.starts[0])
        or int(rows.starts[-1]) != len(rows.offset)
        or (np.diff(rows.starts) < 0).any()
    ):
        raise ValueError(f"its blocks do not have {len(rows.offset)} members")
    if rows.block is None:
        is_whole = blocks == len(rows)
    else:
        is_whole = len(rows.block) == len(rows) and (
            not len(rows) or 0 <= rows.block.min() <= rows.block.max() < blocks
        )
    if not is_whole:
        raise ValueError(f"its {len(rows)} samples are not of its {blocks} blocks")
