"""Producers give each sample of a plan once, in its place, with marks to resume from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.loop import simulate

from headrace._util.shared_memory import Claim
from headrace.readers.by_key import AdaptiveConcurrency, Charge, ChunkSizes, Expectation, KeyFeed, KeyProducer
from headrace.readers.from_iterator import IterProducer
from headrace.readers.indexed_shards import Reading, ReadingAhead
from headrace.readers.sequential import ShuffleBuffer, Without
from headrace.torch_compat.serialize import pack_error, unpack_error
from headrace.types import Ranges
from headrace.workers.failures import Failure
from headrace.workers.sample_chunks import ListPart, Part

on_a_loop = pytest.mark.asyncio


class Basin:
    """A flow that lets everybody in, and keeps what is put."""

    key, is_starved = 5, False

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size  # of batches that end with their first failure; None: they do not
        self.claimed = 0
        self.cuts: list[int] = []
        self.enlarged: list[int] = []
        self.put_at: dict[int, Any] = {}

    def _count(self, nbytes: int) -> None:
        self.claimed += nbytes

    async def turn(self, size: int, position: int) -> Claim:
        return Claim(size, self._count)

    async def enlarge(self, claim: Claim, size: int, position: int) -> None:
        self.enlarged.append(size)
        claim.grow(size)

    def part_of(self, samples: list[Any], claim: Claim | None) -> Part:
        if claim is not None:
            claim.release()
        return ListPart(samples)

    def put(self, start: int, part: ListPart) -> None:
        for number, sample in enumerate(part.samples[part.start : part.start + part.count], start):
            assert number not in self.put_at, "it was put twice"
            self.put_at[number] = sample

    def cut(self, count: int) -> None:
        self.cuts.append(count)

    def batch_end(self, position: int) -> int | None:
        return None if self._batch_size is None else position - position % self._batch_size + self._batch_size

    @property
    def samples(self) -> list[Any]:
        return [self.put_at[number] for number in range(len(self.put_at))]


class Counting:
    """An iterator that counts, and has a state."""

    def __init__(self, stop: int, start: int = 0) -> None:
        self.at, self.stop = start, stop

    def __aiter__(self) -> Counting:
        return self

    async def __anext__(self) -> int:
        if self.at == self.stop:
            raise StopAsyncIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def ranges(draw: st.DrawFn, stop: int) -> Ranges:
    edges = sorted(draw(st.sets(st.integers(0, stop), max_size=6)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@given(st.data(), st.integers(0, 30), st.none() | st.integers(0, 30), st.integers(1, 7), st.integers(1, 5))
def test_iterator_skips_done_samples_and_marks_earlier_ones(
    data: st.DataObject, count: int, take: int | None, batch_size: int, chunk: int
) -> None:
    done, iterator, basin = data.draw(st.composite(ranges)(count)), Counting(count), Basin()
    options: dict[str, Any] = {"take": take, "begin": 0, "done": done, "batch_size": batch_size, "chunk": chunk}
    producer = IterProducer(
        lambda: iterator, snapshot=lambda: iterator.at, buffer=None, pack_error=pack_error, **options
    )
    asyncio.run(producer.run(basin))  # type: ignore[arg-type]
    some = range(count if take is None else min(take, count))
    assert basin.samples == [n for n in some if not any(start <= n < stop for start, stop in done)]
    assert basin.claimed == 0
    for number in some:
        mark = producer.mark(number)
        assert mark is not None
        state, at = mark
        assert state == at <= number


@given(
    st.integers(0, 25),
    st.frozensets(st.integers(0, 24), max_size=3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["one by one", "growing", "many", "many, then each again"]),
    st.integers(0, 1000),
)
def test_samples_keep_their_places_in_any_order_of_answers(
    count: int, failing: frozenset[int], batch_size: int, chunk: int, ends: bool, how: str, seed: int
) -> None:
    chance, got = random.Random(seed), list[int]()

    async def get(key: int) -> str:
        await asyncio.sleep(chance.choice([0, 1, 20]))
        got.append(key)
        if key in failing:
            raise KeyError(key)
        return str(key)

    async def get_many(keys: Sequence[int]) -> Sequence[str]:
        return [await get(key) for key in keys]

    basin = Basin(batch_size if ends else None)
    producer = KeyProducer(
        count,
        lambda start, stop: (range(start, stop), range(start, stop)),
        get,
        get_many if "many" in how else None,
        adaptive=AdaptiveConcurrency(2, 16),
        chunks=ChunkSizes(batch_size, chunk, grows=how == "growing"),
        pack_error=pack_error,
        again="again" in how,
    )
    simulate(producer.run(basin), seed)  # type: ignore[arg-type]
    assert basin.claimed == 0
    assert "again" in how or len(set(got)) == len(got), "a sample was got twice"
    assert len(basin.samples) == count
    for start in range(0, count, batch_size):
        batch = basin.samples[start : start + batch_size]
        failed = [k for k, sample in enumerate(batch) if isinstance(sample, Failure)]
        bad = [number - start for number in sorted(failing) if start <= number < min(count, start + batch_size)]
        assert bool(failed) == bool(bad)
        if how != "many" and failed:
            assert failed[0] == bad[0], "the first error is raised"
            assert ends or failed == bad
        assert all(sample == str(start + k) for k, sample in enumerate(batch) if k not in failed)


@on_a_loop
async def test_first_samples_do_not_wait_for_later_ones() -> None:
    begun, all_begun, let_go = list[int](), asyncio.Event(), asyncio.Event()

    async def get(key: int) -> int:
        begun.append(key)
        if len(begun) == 64:
            all_begun.set()
        if key >= 2:  # as where the data set itself lets two in at a time
            await let_go.wait()
        return key

    basin = Basin()
    producer = KeyProducer(
        64,
        lambda start, stop: (range(start, stop), range(start, stop)),
        get,
        None,
        adaptive=AdaptiveConcurrency(128, 128),
        chunks=ChunkSizes(64, 32, grows=True),
        pack_error=pack_error,
    )
    running = asyncio.ensure_future(producer.run(basin))  # type: ignore[arg-type]
    await all_begun.wait()
    assert basin.samples == [0, 1]
    let_go.set()
    await running
    assert basin.samples == list(range(64))


@on_a_loop
async def test_drawn_keys_are_pushed_one_batch_at_a_time() -> None:
    basin, feed = Basin(), KeyFeed(ListPart)
    running = asyncio.ensure_future(feed.run(basin))  # type: ignore[arg-type]
    for keys in (["a", "b"], [], ["c"], None):
        feed.add(keys)
        await asyncio.sleep(0)
    await running
    assert (basin.cuts, basin.samples) == ([2, 0, 1], ["a", "b", "c"])


@given(st.integers(1, 8), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 99))
def test_shuffle_buffer_emits_each_sample_once(size: int, counts: Sequence[int], key: int) -> None:
    buffer, waiting, left, came = ShuffleBuffer(size, key), list[int](), list[int](), 0
    for count in counts:
        known = [*waiting, *range(came, came + count)]
        came += count
        leave, stay = buffer.come(count)
        assert sorted([*leave.tolist(), *stay.tolist()]) == list(range(len(known)))
        assert len(stay) <= size
        left += [known[k] for k in leave.tolist()]
        waiting = [known[k] for k in stay.tolist()]
    left += [waiting[k] for k in buffer.end().tolist()]
    assert sorted(left) == list(range(came))
    assert all(sample <= at + size for at, sample in enumerate(left))


@given(st.data(), st.integers(0, 25), st.integers(1, 6))
def test_flow_without_some_samples_renumbers_the_others(data: st.DataObject, count: int, size: int) -> None:
    gone, basin = data.draw(st.composite(ranges)(count)), Basin()
    flow: Any = Without(basin, gone)  # type: ignore[arg-type]
    starts = data.draw(st.permutations(range(0, count, size)))
    for start in starts:
        flow.put(start, ListPart(list(range(start, min(start + size, count)))))
    assert basin.samples == [n for n in range(count) if not any(start <= n < stop for start, stop in gone)]
    assert flow.key == basin.key


@on_a_loop
async def test_charge_claims_only_unexpected_bytes() -> None:
    basin = Basin()
    charge = Charge(basin, await basin.turn(100, 0), 100, 0)  # type: ignore[arg-type]
    assert charge(60) is None
    more = charge(60)
    assert more is not None
    await more
    assert (basin.enlarged, basin.claimed) == ([20], 120)
    charge.claim.release()
    assert charge(500) is None
    assert basin.claimed == 0


def test_expected_size_follows_earlier_samples() -> None:
    expected = Expectation()
    first = expected.of(1)
    expected.learn(ListPart([0, 1]), charged=0)
    assert expected.of(1) == first  # without charges nothing is learned
    expected.learn(ListPart([0, 1, 2]), charged=400)
    assert expected.of(8) == 800


@on_a_loop
async def test_readers_run_ahead_and_are_emitted_in_order() -> None:
    class Counted(ListPart):
        released = 0

        def release(self) -> None:
            Counted.released += 1

    begun: list[int] = []

    async def read(number: int, reading: Reading[ListPart]) -> None:
        with reading.ended(pack_error):
            begun.append(number)
            for k in range(number % 3):
                await asyncio.sleep(0)
                reading.put(Counted([(number, k)]))

    readers = iter([lambda reading, number=number: read(number, reading) for number in range(7)])
    ahead, got = ReadingAhead(readers, lambda: 3), list[Any]()
    async with anyio.create_task_group() as group:
        async for stream in ahead.readings(group):
            assert len(begun) <= 3 + len({number for number, _ in got}) + 3
            async for part in stream:
                assert isinstance(part, ListPart)
                got += part.samples
            if len(got) == 3:
                break
    assert got == [(1, 0), (2, 0), (2, 1)]
    ahead.release()
    assert Counted.released == sum(number % 3 for number in begun) - 3


@pytest.mark.parametrize("count", [0, 2])
@on_a_loop
async def test_error_of_a_reader_follows_its_parts(count: int) -> None:
    async def read(reading: Reading[ListPart]) -> None:
        with reading.ended(pack_error):
            for k in range(count):
                reading.put(ListPart([k]))
            await asyncio.sleep(0)
            raise ExceptionGroup("both", [ValueError("broken"), KeyError("late")])

    async with anyio.create_task_group() as group:
        async for reading in ReadingAhead(iter([read]), lambda: 1).readings(group):
            assert [part.samples async for part in reading] == [[k] for k in range(count)]
            assert reading.failure is not None
            assert "broken" in str(unpack_error(reading.failure.error))


def settle(growth: AdaptiveConcurrency, latency_s: float, most_per_s: float) -> None:
    """The answers of a host: each after its latency, no more of them than it can."""
    now = 0.0
    growth.begin(now)
    for _ in range(20_000):
        now += max(latency_s / growth.level, 1.0 / most_per_s)
        growth.answered(now, 1, is_full=True)


GROWS, FIXED = (128, 1024), (300, 300)


@pytest.mark.parametrize(("bounds", "latency_s", "most_per_s", "level"), [
    (GROWS, 0.02, 5000.0, 128), (GROWS, 0.02, 1e9, 1024), (GROWS, 0.1, 4000.0, 512), (GROWS, 0.1, 1e9, 1024),
    (GROWS, 0.001, 300.0, 128), (FIXED, 0.1, 1e9, 300),
])  # fmt: skip
def test_concurrency_grows_while_doubling_it_helps(
    bounds: tuple[int, int], latency_s: float, most_per_s: float, level: int
) -> None:
    growth = AdaptiveConcurrency(*bounds)
    settle(growth, latency_s, most_per_s)
    assert level <= growth.level <= min(2 * level, bounds[1])
    before = growth.level
    settle(growth, latency_s, most_per_s)
    assert growth.level == before


def test_rounds_that_are_not_full_do_not_change_concurrency() -> None:
    growth = AdaptiveConcurrency(64, 1024)
    growth.begin(0.0)
    for number in range(10_000):
        assert not growth.answered(number * 0.001, 1, is_full=False)
    assert growth.level == 64
    settle(growth, 0.1, 1e9)
    assert growth.level == 1024
