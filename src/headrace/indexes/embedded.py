"""Indexes that shards contain: a table in each, or a catalogue beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, masked, not_as_listed
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits
from headrace.formats.pinned_object import for_each
from headrace.indexes.index import OpenedIndex
from headrace.types import Ints

_Columns = tuple[tuple[str, str], ...]


class OwnTables:
    """The index of shards whose format has its own tables."""

    def __init__(self, form: Format, entries: Sequence[ShardEntry], limits: Limits) -> None:
        self._format, self._entries, self._limits = form, tuple(entries), limits

    async def open(
        self,
        reader: Reads,
        urls: Sequence[str],  # noqa: ARG002 (the entries have theirs)
        hold: Callable[[int, ShardIndex], None],
    ) -> OpenedIndex:
        columns: dict[int, _Columns] = {}

        async def learn(ordinal: int) -> tuple[int, Ints | None]:
            entry = self._entries[ordinal]
            if entry.samples is not None:
                return entry.samples, np.zeros(min(entry.samples, 1), np.int64) if entry.shares_blocks else None
            shard = await self._load(reader, ordinal)
            hold(ordinal, shard)
            if shard.columns is not None:
                columns[ordinal] = shard.columns
            return len(shard.rows), _begins(shard.rows)

        learned = await for_each(len(self._entries), learn)
        self._compare(columns)
        counts = np.array([count for count, _ in learned], np.int64)
        return OpenedIndex(counts, self._load, blocks=_blocks(counts, [begins for _, begins in learned]))

    def _compare(self, columns: Mapping[int, _Columns]) -> None:
        if not columns:
            return
        first = min(columns)
        wanted = dict(columns[first])
        for ordinal in sorted(ordinal for ordinal in columns if columns[ordinal] != columns[first]):
            have, url = dict(columns[ordinal]), self._entries[ordinal].url
            for name in [*wanted, *have]:
                if wanted.get(name) != have.get(name):
                    raise FormatError(
                        f"column {name!r:.200} is {have.get(name, 'not there')} in {masked(url)}, and "
                        f"{wanted.get(name, 'not there')} in {masked(self._entries[first].url)}: the shards of a "
                        "stream have the same columns; leave it out, or read them as two streams",
                        url=url,
                    )

    async def _load(self, reader: Reads, ordinal: int) -> ShardIndex:
        entry = self._entries[ordinal]
        shard = _as_listed(entry, await self._format.index(reader, entry, self._limits))
        try:
            _check(shard)
        except ValueError as error:
            raise FormatError(
                f"the format {self._format.name!r} describes {masked(entry.url)} as no shard can be: {error}",
                url=entry.url,
            ) from None
        return shard


def _as_listed(entry: ShardEntry, shard: ShardIndex) -> ShardIndex:
    listed = entry.version or Version()
    if shard.size >= 0 and listed.size not in (None, shard.size):
        raise not_as_listed(entry.url, f"it had {listed.size} bytes then, and has {shard.size}")
    if shard.etag is not None and listed.etag not in (None, shard.etag):
        raise not_as_listed(entry.url, f"its ETag was {listed.etag}, now {shard.etag}")
    return shard


def _begins(rows: Rows) -> Ints | None:
    if rows.block is None:
        return None
    return np.flatnonzero(np.diff(rows.block, prepend=-1))


def _blocks(counts: Ints, begins: Sequence[Ints | None]) -> Ints | None:
    if not any(some is not None for some in begins):
        return None
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    numbers = [
        start + (np.arange(count) if some is None else some)
        for start, count, some in zip(starts.tolist(), counts.tolist(), begins, strict=False)
    ]
    return np.concatenate([*numbers, starts[-1:]])


def _check(shard: ShardIndex) -> None:
    rows = shard.rows
    blocks = len(rows.starts) - 1
    if len(rows.offset) and 0 <= shard.size < int((rows.offset + rows.size).max()):
        raise ValueError(f"a member ends after its {shard.size} bytes")
    if len(rows.size) and int(rows.size.min()) < 0:
        raise ValueError("a member has less than no bytes")
    if (np.diff(rows.offset, prepend=0) < 0).any() or (np.diff(rows.offset + rows.size) < 0).any():
        raise ValueError("its members begin, or end, before those that precede them")
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
