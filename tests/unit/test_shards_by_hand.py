"""Producers of shards, driven by hand: reads are answered in any order, fail, and are given up; memory comes late.

Each sample is put once, in its place, or a failure in its place. Nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
from builders.tars import Fields, index_of_archive, numbered_samples, tar
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.loop import SimulatedLoop
from unit.by_hand import settle

from headrace._util.reads import Check, Span, Version
from headrace._util.shared_memory import Arena, Lease
from headrace.errors import ChecksumError, ObjectChangedError, OptionError, StateMismatchError, StorageError
from headrace.formats.index import ShardIndex
from headrace.formats.tar.scanner import TarScanner
from headrace.readers.indexed_shards import Bounds, IndexedShardProducer, Members, ReadWindow, ShardVisit
from headrace.readers.protocol import Producer
from headrace.readers.sequential import Expected, ResumeToken, ShardPlan, ShardProducer, ShardReading, ShuffleWindow
from headrace.torch_compat.serialize import pack_error, unpack_error
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
    """Somebody waits to be answered, for a shard: its number, or its address where it is read."""

    shard: int | str
    answer: Callable[[], Any]
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(kw_only=True)
class World:
    """Shards by address, and their faults.

    Attributes:
        broken: Byte from which reads fail, by address.
        spoilt: Addresses and numbers of samples whose bytes have changed.
        heals: True if a second read of these is right.
        others: Addresses of shards that have grown.
        cut: Remaining sizes of shards of unknown size, by address.
        renewed: Addresses of shards that have a new version in each read.
        lost: Addresses of shards whose ranges end workers.
        gives_whole: True if the server ignores ranges.
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
    """A producer with a reader and a flow whose responses the test gives. `seed` sets the order of ready callbacks."""

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

    async def _ask(self, shard: int | str, answer: Callable[[], Any]) -> Any:
        waiting = Waiting(shard, answer)
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

        span: Span = await self._ask(url, answer)
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

        data: bytes = await self._ask(url, answer)
        return data

    def members(self, url: str, rows: Ints) -> Members:
        index = _index(self.world.archives[url])
        crc = None if index.crc is None else index.crc[index.rows.members(rows)]
        size = None if url in self.world.cut else index.size
        return Members(index.rows.take(rows), crc, index.size, Version(size, None))

    # What it sees as its flow.

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        lease: Lease = await self._ask(rank[0], lambda: self.arena.lease(size))
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
            return await self._ask(order, answer)
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


some = settings(max_examples=25, deadline=None, derandomize=True)
COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any)
SEEDS = st.integers(0, 1000)


def error_of(sample: Any) -> BaseException:
    assert isinstance(sample, Failure)
    return unpack_error(sample.error)


def any_order(seed: int) -> Any:
    return random.Random(seed).randrange


# With an index.


@st.composite
def windows(draw: st.DrawFn, counts: Sequence[int]) -> list[ReadWindow]:
    """Some samples of each shard, in windows of one or several visits."""
    made, start, left = [], 0, [shard for shard, count in enumerate(counts) if count]
    while left:
        visits = []
        for _ in range(draw(st.integers(1, 2))):
            if left:
                shard = left.pop(0)
                rows = sorted(draw(st.sets(st.integers(0, counts[shard] - 1), min_size=1)))
                visits.append(ShardVisit(f"memory://hand/{shard}.tar", shard, np.array(rows, np.int64)))
        count = sum(len(visit.rows) for visit in visits)
        order = np.array(draw(st.permutations(range(count))), np.int64) if draw(st.booleans()) else None
        made.append(ReadWindow(start, visits, order))
        start += count
    return made


def indexed(plan: Sequence[ReadWindow], bounds: Bounds, world: World, seed: int = 0) -> ByHand:
    def make(hand: ByHand) -> IndexedShardProducer:
        async def members(shard: int, rows: Ints) -> Any:
            return hand.members(f"memory://hand/{shard}.tar", rows)

        note = lambda nbytes, size: hand.chosen.append((nbytes, size))
        return IndexedShardProducer(iter(plan), hand, members, bounds=bounds, chosen=note, pack_error=pack_error)

    return ByHand(make, world, seed)


def wanted(plan: Sequence[ReadWindow], counts: Sequence[int]) -> list[tuple[str, int, Any]]:
    """(shard, number there, what it is) of each sample, as they are to come."""
    everything, firsts = bodies(counts), [sum(counts[:k]) for k in range(len(counts))]
    came = []
    for window in plan:
        read = [(v.url, row, everything[firsts[v.shard] + row]) for v in window.visits for row in v.rows.tolist()]
        came += read if window.order is None else [read[k] for k in window.order.tolist()]
    return came


BOUNDS = st.sampled_from([Bounds(0, 1), Bounds(4096, 1 << 20), Bounds(512, 1500)])


@pytest.mark.slow
@some
@given(data=st.data(), counts=COUNTS, bounds=BOUNDS, seed=SEEDS)
def test_samples_keep_their_places_in_any_order_of_reads(
    data: st.DataObject, counts: list[int], bounds: Bounds, seed: int
) -> None:
    plan = data.draw(windows(counts))
    with indexed(plan, bounds, World(archives=shards(counts)), seed) as hand:
        hand.finish(any_order(seed))
        hand.running.result()
        assert hand.samples == [sample for _, _, sample in wanted(plan, counts)]
        assert len(hand.chosen) == sum(len(window.visits) for window in plan)


@pytest.mark.slow
@some
@given(data=st.data(), counts=COUNTS, bounds=BOUNDS, seed=SEEDS)
def test_unreadable_samples_fail_in_their_places(
    data: st.DataObject, counts: list[int], bounds: Bounds, seed: int
) -> None:
    plan, archives = data.draw(windows(counts)), shards(counts)
    urls = st.frozensets(st.sampled_from(sorted(archives)), max_size=2)
    world = World(
        archives=archives,
        broken={url: data.draw(st.integers(0, len(archives[url]))) for url in data.draw(urls)},
        others=data.draw(urls),
        lost=data.draw(urls),
        spoilt=frozenset(
            (url, data.draw(st.integers(0, count - 1))) for url, count in zip(archives, counts, strict=True) if count
        ),
        heals=data.draw(st.booleans()),
    )
    with indexed(plan, bounds, world, seed) as hand:
        hand.finish(any_order(seed))
        hand.running.result()
        for (url, row, sample), came in zip(wanted(plan, counts), hand.samples, strict=True):
            reasons: list[type[BaseException]] = [StorageError] * (url in world.broken)
            reasons += [ObjectChangedError] * (url in world.others) + [LostError] * (url in world.lost)
            if (url, row) in world.spoilt and not world.heals:
                reasons.append(ChecksumError)
                assert isinstance(came, Failure)
            if isinstance(came, Failure):
                assert isinstance(error_of(came), tuple(reasons)), (url, row, error_of(came))
            else:
                assert came == sample
                assert url not in world.others | world.lost


@some
@given(data=st.data(), counts=COUNTS, bounds=BOUNDS, seed=SEEDS, steps=st.integers(0, 25))
def test_nothing_is_held_after_reading_is_cancelled(
    data: st.DataObject, counts: list[int], bounds: Bounds, seed: int, steps: int
) -> None:
    plan, choose = data.draw(windows(counts)), any_order(seed)
    with indexed(plan, bounds, World(archives=shards(counts)), seed) as hand:
        while steps and hand.waiting:
            hand.answer(choose(len(hand.waiting)))
            steps -= 1
        hand.settle(hand.running.cancel)
        everything = [sample for _, _, sample in wanted(plan, counts)]
        assert all(
            {name: bytes(one[name]) for name in everything[k]} == everything[k] for k, one in hand.put_at.items()
        )


def test_later_shards_wait_for_earlier_ones() -> None:
    counts = [2, 2]
    urls = [f"memory://hand/{k}.tar" for k in range(2)]
    plan = [ReadWindow(2 * k, [ShardVisit(urls[k], k, np.arange(2))], None) for k in range(2)]
    with indexed(plan, Bounds(4096, 1 << 20), World(archives=shards(counts))) as hand:
        assert {one.shard for one in hand.waiting} == {0, 1}
        while late := [k for k, one in enumerate(hand.waiting) if one.shard in (1, urls[1])]:
            hand.answer(late[0])
        assert not hand.put_at
        hand.finish(lambda _: 0)
        assert hand.samples == bodies(counts)


@pytest.mark.parametrize("order", [0, -1])
def test_shard_replaced_between_reads_fails(order: int) -> None:
    world = World(archives=shards([3]), renewed=frozenset({"memory://hand/0.tar"}))
    with indexed(_all_of_one(3), Bounds(0, 1), world) as hand:
        hand.finish(lambda count: order % count)
        assert len(hand.samples) == 3
        assert all(isinstance(error_of(one), ObjectChangedError) for one in hand.samples)


@pytest.mark.parametrize("left", [0, 1500, 2500])
def test_shard_shorter_than_its_index_is_a_changed_object(left: int) -> None:
    world = World(archives=shards([3]), cut={"memory://hand/0.tar": left})
    with indexed(_all_of_one(3), Bounds(0, 1), world) as hand:
        hand.finish(lambda _: 0)
        came = [one for one in hand.samples if not isinstance(one, Failure)]
        assert came == bodies([3])[: len(came)]
        assert isinstance(error_of(hand.samples[-1]), ObjectChangedError)


def _all_of_one(count: int) -> list[ReadWindow]:
    return [ReadWindow(0, [ShardVisit("memory://hand/0.tar", 0, np.arange(count))], None)]


# Where they are looked for.


def found(
    counts: Sequence[int],
    seed: int = 0,
    *,
    world: World | None = None,
    rounds: int = 1,
    range_bytes: int = 2048,
    expected: Sequence[int] | None = None,
    begin: ResumeToken = ResumeToken(),  # noqa: B008 (it is immutable)
    **plan: Any,
) -> ByHand:
    world = world or World(archives=shards(counts))
    urls = [url for _ in range(rounds) for url in world.archives]

    async def known(ordinal: int) -> Expected:
        assert expected is not None
        url = urls[ordinal]
        return Expected(Version(len(world.archives[url]), None), expected[ordinal % len(counts)])

    def make(hand: ByHand) -> ShardProducer:
        reading = ShardReading(
            reader=hand,
            scanner=TarScanner,
            unpacks=lambda url: None,
            expected=None if expected is None else known,
            range_bytes=range_bytes,
        )
        options: dict[str, Any] = {"window": None, "buffer": None, "take": None, "done": (), "is_endless": False}
        shards_left = list(enumerate(urls))[begin.shard :]
        options |= {"shards": shards_left, "in_round": len(counts), "begin": begin} | plan
        return ShardProducer(reading, ShardPlan(**options), pack_error)

    return ByHand(make, world, seed)


def backwards(count: int, number: int) -> Ints:
    return np.roll(np.arange(count)[::-1], number)


WINDOWS = st.sampled_from([None, ShuffleWindow(3, 1 << 30, backwards), ShuffleWindow(100, 300, backwards)])


@pytest.mark.slow
@some
@given(counts=COUNTS, window=WINDOWS, seed=SEEDS, data=st.data(), range_bytes=st.sampled_from([1024, 4096, 1 << 16]))
def test_shards_are_read_in_order_and_resume_from_marks(
    counts: list[int], window: ShuffleWindow | None, seed: int, data: st.DataObject, range_bytes: int
) -> None:
    world = World(archives=shards(counts), gives_whole=data.draw(st.booleans()))
    expected = data.draw(st.sampled_from([None, counts]))
    with found(counts, seed, world=world, window=window, range_bytes=range_bytes, expected=expected) as hand:
        hand.finish(any_order(seed))
        hand.running.result()
        whole = hand.samples
        key = lambda sample: int(sample["cls"])
        assert sorted(whole, key=key) == bodies(counts)
        assert window is not None or whole == bodies(counts)
        at = data.draw(st.integers(0, len(whole)))
        token, begin = hand.producer.mark(at)  # type: ignore[misc]
    assert begin <= at
    done = ((0, at - begin),)
    with found(counts, seed, world=world, window=window, begin=ResumeToken(*token), done=done) as again:
        again.finish(any_order(seed + 1))
        again.running.result()
        assert again.samples == whole[at:]


@pytest.mark.slow
@some
@given(counts=COUNTS, seed=SEEDS, data=st.data(), take=st.none() | st.integers(0, 20))
def test_shard_that_ends_early_emits_earlier_samples_and_its_failure(
    counts: list[int], seed: int, data: st.DataObject, take: int | None
) -> None:
    archives = shards(counts)
    urls = sorted(archives)
    world = World(
        archives=archives,
        broken={
            url: data.draw(st.integers(0, len(archives[url]) - 1))
            for url in data.draw(st.frozensets(st.sampled_from(urls)))
        },
        lost=data.draw(st.frozensets(st.sampled_from(urls), max_size=1)),
    )
    more = data.draw(st.sampled_from([0, 0, 1]))
    with found(counts, seed, world=world, take=take, expected=[count + more for count in counts]) as hand:
        hand.finish(any_order(seed))
        hand.running.result()
        left, everything = hand.samples, bodies(counts)
        if take is not None:
            assert len(left) <= take
        for k, count in enumerate(counts):
            first, url = sum(counts[:k]), f"memory://hand/{k}.tar"
            came = 0
            while left and not isinstance(left[0], Failure) and came < count:
                assert left.pop(0) == everything[first + came]
                came += 1
            if not left:
                is_whole = came == count and not more and url not in world.broken
                assert take is not None or is_whole or k == len(counts) - 1
                break
            if url in world.broken or url in world.lost or more:
                reasons = (StorageError, LostError, *[ObjectChangedError] * (came == count and more))
                assert isinstance(error_of(left.pop(0)), reasons)
            else:
                assert came == count
        assert not left


@some
@given(counts=COUNTS, window=WINDOWS, seed=SEEDS, steps=st.integers(0, 30))
def test_cancelled_reading_holds_no_memory(
    counts: list[int], window: ShuffleWindow | None, seed: int, steps: int
) -> None:
    choose = any_order(seed)
    with found(counts, seed, window=window) as hand:
        while steps and hand.waiting:
            hand.answer(choose(len(hand.waiting)))
            steps -= 1
        hand.settle(hand.running.cancel)


def test_rounds_are_reported_and_an_empty_endless_round_is_an_error() -> None:
    counts = [2, 0, 1]
    with found(counts, rounds=3, is_endless=True) as hand:
        hand.finish(any_order(0))
        assert hand.samples == bodies(counts) * 3
        assert hand.rounds == [3, 3]
    with found([0, 0], rounds=2) as empty:
        empty.finish(any_order(0))
        assert empty.samples == []  # as another rank's shards may have samples
    with found([0, 0], rounds=2, is_endless=True) as empty:
        empty.finish(any_order(0))
        with pytest.raises(BaseExceptionGroup) as told:
            empty.running.result()
        assert told.value.subgroup(OptionError) is not None


@pytest.mark.parametrize(("begin", "done"), [(ResumeToken(0, 9), ()), (ResumeToken(0, 0, 0, [1]), ((0, 3),))])
def test_shard_that_has_changed_since_a_mark_is_an_error(begin: ResumeToken, done: Any) -> None:
    with found([2, 3], begin=begin, done=done) as hand:
        hand.finish(any_order(1))
        with pytest.raises(BaseExceptionGroup) as told:
            hand.running.result()
        assert told.value.subgroup(StateMismatchError) is not None
