"""The inputs of producers, by hand: the test decides which read is answered next, and how, and who gets memory.

Nothing waits, and there is no clock that goes by itself.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
from builders.tars import Fields, index_of_archive, numbered_samples, tar
from simulation.loop import SimulatedLoop
from unit.by_hand import settle

from headrace._util.reads import Check, Span, Version
from headrace._util.shared_memory import Arena, Lease
from headrace.errors import StorageError
from headrace.formats.index.shard import ShardIndex
from headrace.readers.indexed_shards import Members
from headrace.readers.protocol import Producer
from headrace.torch_compat.serialize import pack_error
from headrace.types import Ints
from headrace.workers.failures import Failure
from headrace.workers.sample_chunks import ListPart, Part
from headrace.workers.task_runner import open_part

SIZE = 90
"""Bytes of a sample, about."""


class LostError(Exception):
    """The error of a worker that ended over a range."""


@dataclass(eq=False)
class Waiting:
    """Somebody waits to be answered.

    Attributes:
        kind: "read", "again", "room" or "scan".
        shard: what it is for: a number, or the address of what is read.
    """

    kind: str
    shard: int | str
    answer: Callable[[], Any]
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(kw_only=True)
class World:
    """The shards, and what is wrong with them.

    Attributes:
        archives: by their addresses.
        broken: the addresses, and the byte from which on their reads fail.
        spoilt: the addresses and numbers of samples whose bytes are others than they were.
        heals: whether these are right when they are read again.
        others: the addresses that have become larger meanwhile.
        cut: the addresses of unknown size, and their remaining sizes.
        renewed: the addresses that have another version whenever they are read.
        lost: the addresses over whose ranges workers end.
        gives_whole: whether the server has no ranges.
    """

    archives: dict[str, bytes]
    broken: dict[str, int] = field(default_factory=dict)
    spoilt: frozenset[tuple[str, int]] = frozenset()
    heals: bool = False
    others: frozenset[str] = frozenset()
    cut: dict[str, int] = field(default_factory=dict)
    renewed: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    gives_whole: bool = False

    def seen(self, url: str) -> bytes:
        data = bytearray(self.archives[url])
        for number in (number for name, number in self.spoilt if name == url):
            rows = _index(self.archives[url]).rows
            data[int(rows.offset[rows.starts[number]])] ^= 255
        return bytes(data[: self.cut.get(url)])


def shards(counts: Sequence[int]) -> dict[str, bytes]:
    firsts = [sum(counts[:k]) for k in range(len(counts))]
    return {f"memory://hand/{k}.tar": _archive(firsts[k], count) for k, count in enumerate(counts)}


@functools.cache
def _archive(first: int, count: int) -> bytes:
    return tar(numbered_samples(first, count, SIZE))


@functools.cache
def _index(archive: bytes) -> ShardIndex:
    return index_of_archive("memory://hand/any.tar", archive)


def bodies(counts: Sequence[int]) -> list[Fields]:
    return [fields for _, fields in numbered_samples(0, sum(counts), SIZE)]


class ByHand:
    """A producer, its reader and its flow, whose answers the test gives.

    Args:
        make: makes the producer of its reader.
        seed: of the order of callbacks that are ready at once.

    Attributes:
        waiting: who waits for an answer.
        put_at: what was put, by its number.
    """

    key, is_starved = 5, False

    def __init__(self, make: Callable[[ByHand], Producer], world: World, seed: int = 0) -> None:
        self.world, self.loop, self.arena = world, SimulatedLoop(seed), Arena()
        self.waiting: list[Waiting] = []
        self.put_at: dict[int, Any] = {}
        self.rounds: list[int] = []
        self.chosen: list[tuple[int, int]] = []
        self._reads = itertools.count()
        self.producer = make(self)
        self.settle(self._begin)

    def _begin(self) -> None:
        self.running = self.loop.create_task(self.producer.run(self))  # type: ignore[arg-type]

    async def _ask(self, kind: str, shard: int | str, answer: Callable[[], Any]) -> Any:
        waiting = Waiting(kind, shard, answer)
        self.waiting.append(waiting)
        try:
            return await waiting.future
        finally:
            if waiting in self.waiting:
                self.waiting.remove(waiting)

    # What the producer sees of storage.

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: Any = None
    ) -> Span:
        data = self.world.seen(url)
        stop = max(start, min(start + len(target), len(data)))

        def answer() -> Span:
            if stop > self.world.broken.get(url, stop):
                raise StorageError("the line is dead", url=url)
            target[: stop - start] = data[start:stop]
            size = len(data) + (url in self.world.others)
            version = f"version {next(self._reads)}" if url in self.world.renewed else None
            return Span(start, stop, size, version, self.world.gives_whole)

        span: Span = await self._ask("read", url, answer)
        return span

    async def read(
        self, url: str, start: int, stop: int, *, check: Check | None = None, version: Version | None = None
    ) -> bytes:
        def answer() -> bytes:
            assert check is not None
            cached = self.world.seen(url)[start:stop]
            if check(cached):
                return cached
            data = (self.world.archives[url] if self.world.heals else self.world.seen(url))[start:stop]
            return data if check(data) else b""  # it was asked again, past the cache

        data: bytes = await self._ask("again", url, answer)
        return data

    def members(self, url: str, rows: Ints) -> Members:
        index = _index(self.world.archives[url])
        crc = None if index.crc is None else index.crc[index.rows.members(rows)]
        size = None if url in self.world.cut else index.size
        return Members(index.rows.take(rows), crc, index.size, Version(size, None))

    # What it sees as its flow.

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        lease: Lease = await self._ask("room", rank[0], lambda: self.arena.lease(size))
        return lease

    def drop(self, lease: Lease) -> None:
        lease.release()

    def loaded(self, lease: Lease) -> None: ...

    def trim(self, lease: Lease, size: int) -> None:
        self.arena.trim(lease, size)

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> Any:
        held = lease.retain()

        def answer() -> Any:
            if scanner.url in self.world.lost:
                return np.zeros(0), Failure(pack_error(LostError(scanner.url)))
            there = pickle.loads(pickle.dumps(scanner))
            return there.feed(lease.view, offset, last), there

        try:
            return await self._ask("scan", order, answer)
        finally:
            held.release()

    def put(self, start: int, part: Part) -> None:
        is_list = isinstance(part, ListPart)
        samples = part.samples[part.start : part.start + part.count] if is_list else open_part(part)
        for number, sample in enumerate(samples, start):
            assert number not in self.put_at, "it was put twice"
            self.put_at[number] = sample
        part.release()

    def batch_end(self, position: int) -> None: ...

    def come_again(self, count: int) -> None:
        self.rounds.append(count)

    def begin_again(self) -> None: ...

    # What may be done.

    def settle(self, *calls: Callable[[], Any]) -> None:
        settle(self.loop, *calls)

    def answer(self, which: int) -> None:
        waiting = self.waiting.pop(which)
        try:
            answer = waiting.answer()
        except Exception as error:
            self.settle(partial(waiting.future.set_exception, error))
        else:
            self.settle(partial(waiting.future.set_result, answer))

    def finish(self, choose: Callable[[int], int]) -> None:
        while not self.running.done():
            assert self.waiting, "it stands still"
            self.answer(choose(len(self.waiting)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.settle(self.running.cancel)
                return
            assert self.running.done()
            assert not self.waiting, "somebody still waits"
            assert self.arena.leased_bytes == 0, "memory is held by nobody"
            assert asyncio.all_tasks(self.loop) == set()
        finally:
            self.arena.close()
            self.loop.close()

    @property
    def samples(self) -> list[Any]:
        made = [self.put_at[number] for number in range(len(self.put_at))]
        return [
            one if isinstance(one, Failure) else {name: bytes(one[name]) for name in ("bin", "cls")} for one in made
        ]
