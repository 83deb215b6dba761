"""Reads the samples of a task from the segments known to a worker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace._util.sample_ranges import LeasedBodies, Rows, texts_of
from headrace.formats.opening import BlockRows, MemberRows, SharedBlock
from headrace.torch_compat import serialize
from headrace.torch_compat.sample_table import RowsOfTables, SampleTable
from headrace.types import Ints
from headrace.workers.failures import Placeholder
from headrace.workers.sample_chunks import Part, Place, TablePart
from headrace.workers.tasks import Chain, TaskMessage


class Inputs:
    """The memory of one worker: segments by number, and private memory if none is shared."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}
        self._room = bytearray()  # memory for results that are sent back as bytes

    def attach(self, number: int, view: memoryview) -> None:
        self._segments[number] = view

    def detach(self, number: int) -> None:
        self._segments.pop(number, None)

    def detach_all(self) -> None:
        self._segments.clear()

    @property
    def shares_memory(self) -> bool:
        """True if any segment is attached."""
        return bool(self._segments)

    def view(self, place: Place) -> memoryview:
        if isinstance(place, tuple):
            number, offset, size = place
            return self._segments[number][offset : offset + size]
        if isinstance(place, int):
            self._room = bytearray(place)
            return memoryview(self._room)
        return memoryview(place)

    def taken(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Return the ranges (offset, size) written to private memory, and discard that."""
        room, self._room = memoryview(self._room), bytearray()
        return [(offset, bytes(room[offset : offset + size])) for offset, size in ranges]

    def bodies(self, places: Sequence[tuple[int, Place]]) -> LeasedBodies:
        return LeasedBodies([self.view(place) for _, place in places], [address for address, _ in places])

    def packed(self, place: Place, lengths: Sequence[int]) -> list[object]:
        """Unpickle a list of samples. Copies their buffers."""
        samples: list[object] = serialize.unpack(self.view(place), lengths, copy=True)
        return samples

    def apart(self, place: Place, pieces: Sequence[tuple[int, ...]]) -> list[object]:
        """Unpickle samples that were pickled one by one. Copies their buffers."""
        view = self.view(place)
        return [
            serialize.unpack_parts([view[at : at + size] for at, size in zip(some[::2], some[1::2], strict=True)])
            for some in pieces
        ]

    def in_table(self, place: Place, lengths: Sequence[int], chosen: Sequence[int]) -> RowsOfTables:
        """Return rows of a table as views of its memory. Samples read from it one by one are copies."""
        table: SampleTable = serialize.unpack(self.view(place), lengths, copy=False)
        return RowsOfTables([(table, chosen)])

    def tables(self, parts: Sequence[Part]) -> RowsOfTables | None:
        """Return the rows of parts that are all tables. None: some are not."""
        tables = [part for part in parts if isinstance(part, TablePart)]
        if not tables or len(tables) < len(parts):
            return None
        return RowsOfTables.of(self.in_table(part.place, part.lengths, part.chosen) for part in tables)

    def unpack(self, blob: bytes) -> list[object]:
        samples: list[object] = serialize.unpack_bytes(blob)
        return samples

    def samples(self, parts: Sequence[Part], busy: dict[str, float]) -> Iterator[object]:
        """Iterate over the samples of parts, in order. Large samples are not kept."""
        return itertools.chain.from_iterable(self._runs(parts, busy))

    def _runs(self, parts: Sequence[Part], busy: dict[str, float]) -> Iterator[Iterable[object]]:
        for part in parts:
            runs = part.open(self)
            while True:
                began = time.perf_counter()
                samples = next(runs, None)
                busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
                if samples is None:
                    break
                yield map(list.pop, [samples]) if len(samples) == 1 else samples

    def opened(self, rows: Rows, shards: Ints, urls: Sequence[str], bodies: LeasedBodies) -> list[object]:
        if rows.block is not None:
            some = block_rows(rows, [urls[shard] for shard in shards.tolist()], bodies)
            return [some.sample(number) for number in range(len(rows))]
        of_shards = [urls[shard] for shard in shards.tolist()]
        members = member_rows(rows, of_shards, bodies)
        if members is not None:
            name, values = members.name, members.bodies(0, len(rows))
            return [
                {"__key__": key, "__url__": url, name: value}
                for key, url, value in zip(members.keys, of_shards, values, strict=True)
            ]
        names = [rows.fields[number] for number in rows.field.tolist()]
        values, starts = bodies.all(rows.offset, rows.size), rows.starts.tolist()
        samples: list[object] = []
        for key, url, start, stop in zip(texts_of(rows.keys), of_shards, starts, starts[1:], strict=False):
            sample: dict[str, object] = {"__key__": key, "__url__": url}
            sample.update(zip(names[start:stop], values[start:stop], strict=True))
            samples.append(sample)
        return samples


def member_rows(rows: Rows, urls: Sequence[str], bodies: LeasedBodies) -> MemberRows | None:
    """Return samples with one member each, all of one name, such as lines. Else None."""
    if (
        not len(rows)
        or len(rows.field) != len(rows)
        or (np.diff(rows.starts) != 1).any()
        or (rows.field != rows.field[:1]).any()
    ):
        return None
    some = lambda start, stop: bodies.all(rows.offset[start:stop], rows.size[start:stop])
    return MemberRows(texts_of(rows.keys), urls, rows.fields[int(rows.field[0])], some)


def block_rows(rows: Rows, urls: Sequence[str], bodies: LeasedBodies) -> BlockRows:
    """Return the samples of a table whose samples are rows of blocks."""
    assert rows.block is not None
    assert rows.row is not None
    assert rows.reads is not None
    assert rows.wanted is not None
    blocks = []
    for block, (number, wanted) in enumerate(zip(rows.reads.tolist(), rows.wanted.tolist(), strict=True)):
        about, members = None if rows.about is None else rows.about[block], partial(_members, rows, bodies, block)
        blocks.append(SharedBlock(number, members, about, wanted))
    return BlockRows(texts_of(rows.keys), urls, blocks, rows.block, rows.row)


def _members(rows: Rows, bodies: LeasedBodies, block: int) -> list[tuple[str, bytes]]:
    part = slice(int(rows.starts[block]), int(rows.starts[block + 1]))
    names = [rows.fields[number] for number in rows.field[part].tolist()]
    return list(zip(names, bodies.all(rows.offset[part], rows.size[part]), strict=True))


_TOGETHER_BYTES = 256 * 1024  # fits into the processor's cache
_TOGETHER_AT_FIRST, _TOGETHER_MOST = 64, 1024

Run = tuple[int, Any]
"""(number of steps already applied, samples). Samples with an applied step are a list."""

OpensRows = Callable[[Any, int, int], tuple[Sequence[object], int]]


def runs(chain: Chain, order: TaskMessage, inputs: Inputs, busy: dict[str, float]) -> Iterator[Run]:
    parts = order.parts
    first = chain.steps[0] if chain.steps and not order.one_by_one else None
    if any(not part.shares_blocks and part.has_large for part in parts):
        samples = inputs.samples(parts, busy)
        yield 0, (_Large(one) if isinstance(one, dict) else one for one in samples)  # failures stay as they are
        return
    for part in parts:
        opens = None if first is None else first.open_rows if part.shares_blocks else first.open_many
        began = time.perf_counter()
        rows = None if opens is None else _rows(part, inputs)
        busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
        if rows is None:
            yield 0, inputs.samples([part], busy)
        else:
            assert first is not None
            assert opens is not None
            yield from _opened(first.name, opens, rows, busy)


def _rows(part: Part, inputs: Inputs) -> BlockRows | MemberRows | None:
    """Return samples that may be decoded together. None: they may not."""
    found = part.undecoded(inputs)
    if found is None:
        return None
    rows, bodies, urls = found
    return member_rows(rows, urls, bodies) if rows.block is None else block_rows(rows, urls, bodies)


def _opened(name: str, opens: OpensRows, rows: BlockRows | MemberRows, busy: dict[str, float]) -> Iterator[Run]:
    """Decode as many samples together as the cache holds. Others are yielded undecoded."""
    start, count = 0, _TOGETHER_AT_FIRST
    while start < len(rows.keys):
        stop = min(start + count, len(rows.keys))
        began = time.perf_counter()
        samples, nbytes = opens(rows, start, stop)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        if None not in samples:
            yield 1, samples
        else:
            for is_missing, some in itertools.groupby(enumerate(samples, start), lambda one: one[1] is None):
                if is_missing:
                    yield 0, (rows.sample(number) for number, _ in some)
                else:
                    yield 1, [sample for _, sample in some]
        count = max(1, min(_TOGETHER_MOST, _TOGETHER_BYTES * (stop - start) // max(nbytes, 1)))
        start = stop


class _Large(Placeholder):
    """A large sample, moved out when it enters the steps, so that this object does not hold it."""

    __slots__ = ("_sample",)

    is_final = False

    def __init__(self, sample: dict[str, object]) -> None:
        self._sample = sample

    def take(self) -> tuple[object, object]:
        sample, self._sample = self._sample, {}
        return sample, {name: sample.get(name) for name in ("__key__", "__url__")}
