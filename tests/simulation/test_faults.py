"""Whatever a store does, in whatever order things happen: a read is byte-exact or the one right error, and ends."""

import asyncio
import os
import random
from typing import Any

import pytest
from simulation.faulty_store import PASSING, FaultyStore, body_of, reader_of
from simulation.loop import Deadlock, simulate, simulated

from headrace._util.context import running_charge
from headrace.errors import (
    BadResponseError,
    ObjectChangedError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    ThrottledError,
)
from headrace.fetch import Reader
from headrace.options import Fetch

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "200"))
BATCHES = 20
OBJECTS = {f"a/{n}": body_of(f"a/{n}", size) for n, size in enumerate([0, 1, 5_000, 83_000, 83_000, 200_000])}
READS = 24
LONGEST_S = 200.0


async def read_one(reader: Reader, rng: random.Random, number: int) -> str:
    path = rng.choice([*OBJECTS, "missing"])
    data = OBJECTS.get(path, b"")
    start = rng.choice([None, 0, rng.randrange(len(data) + 10)])
    stop = rng.choice([None, (start or 0) + rng.randrange(1, 100_000)])
    address = f"{path}?{number}"  # Retry-After holds for one of them
    try:
        if rng.random() < 0.5:
            assert await reader.read(address, start, stop) == data[start:stop]
        else:
            target = bytearray(rng.randrange(1, 100_000))
            span = await reader.read_into(address, start or 0, memoryview(target))
            wanted = data[start or 0 :][: len(target)]
            assert (span.stop - span.start, span.size) == (len(wanted), len(data))
            assert target[: len(wanted)] == wanted
    except StorageError as error:
        return f"{path}: {type(error).__name__} after {error.attempts}"
    assert path != "missing"
    return "ok"


async def many_reads(seed: int) -> list[str]:
    rng = random.Random(seed)
    store = FaultyStore(rng, OBJECTS, p=0.3, fills=seed % 2 == 0)
    options = Fetch(range_bytes=64 * 1024, hedge_share=(0.0, 0.05, 0.5)[seed % 3])
    reader = reader_of(store, seed=seed, concurrency=1 + seed % 8, options=options)
    ends = await asyncio.gather(*(read_one(reader, random.Random(seed * READS + n), n) for n in range(READS)))
    assert reader.meter.in_flight == 0
    await reader.aclose()
    assert (store.under_way, store.open_bodies, store.violations) == (0, 0, 0)
    assert store.most_under_way <= 1 + seed % 8
    needed = READS + store.injected.total()
    assert store.requests.total() - reader.meter.hedges <= 1.3 * needed
    return ends


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_read_is_exact_or_the_right_error_under_every_seed(batch: int) -> None:
    exact = total = 0
    for seed in range(batch, SEEDS, BATCHES):
        ends, loop = simulate(many_reads(seed), seed)
        assert loop.time() < LONGEST_S, f"seed {seed}"
        exact += sum(end == "ok" or end.startswith("missing: ObjectMissing") for end in ends)
        total += len(ends)
    assert exact >= 0.95 * total  # two wrong ranges in a row are an error; little else is at p = 0.3


def test_same_seed_is_the_same_run() -> None:
    first, again, other = (simulate(many_reads(seed), seed) for seed in (3, 3, 4))
    assert (first[0], first[1].trace) == (again[0], again[1].trace)
    assert first[1].trace != other[1].trace


def test_program_that_waits_for_ever_is_found() -> None:
    with pytest.raises(Deadlock):
        simulate(asyncio.Event().wait(), limit_s=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize(("fault", "kind", "attempts"), [
    ("503", ThrottledError, 6),
    ("503-after", ThrottledError, 6),
    ("500", StorageError, 6),
    ("refused", StorageError, 6),
    ("cut", ShortReadError, 6),
    ("short", ShortReadError, 6),
    ("hang", ReadTimeoutError, 4),
    ("stall", ReadTimeoutError, 4),
    ("drip", ReadTimeoutError, 2),
    ("wrong-range", BadResponseError, 2),
])  # fmt: skip
@simulated
async def test_lasting_fault_is_its_error(fault: str, kind: type[StorageError], attempts: int, fills: bool) -> None:
    store = FaultyStore(random.Random(1), {"a": bytes(2_000_000)}, p=1.0, faults=(fault,), fails_at=0, fills=fills)
    async with reader_of(store) as reader:
        with pytest.raises(kind) as caught:
            await reader.read("a")
    assert type(caught.value) is kind
    assert caught.value.attempts == attempts
    assert (store.under_way, store.open_bodies) == (0, 0)
    assert asyncio.get_running_loop().time() <= 62.0


@simulated
async def test_object_that_changes_while_it_is_read_is_an_error() -> None:
    store = FaultyStore(random.Random(1), {"a": bytes(100_000)}, p=1.0, faults=("cut",))
    reader = reader_of(store)
    task = asyncio.ensure_future(reader.read("a"))
    await asyncio.sleep(0.021)
    store.objects["a"] = bytes(99_999)
    with pytest.raises(ObjectChangedError, match="2 attempts"):
        await task
    await reader.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(), PASSING], ids=["well", "faults"])
@pytest.mark.parametrize("charged", [False, True])
def test_read_cancelled_at_any_step_holds_nothing(faults: tuple[str, ...], charged: bool) -> None:
    async def run(steps: int) -> bool:
        store = FaultyStore(random.Random(steps), dict(OBJECTS), p=0.5 * bool(faults), faults=faults)
        reader = reader_of(store, concurrency=2, options=Fetch(hedge_share=1.0))
        p, store.p = store.p, 0.0
        for _ in range(25):
            await reader.read("a/2")  # from here on it knows what is late
        store.p = p

        async def pay(nbytes: int) -> None:
            await asyncio.sleep(0.01)

        token = running_charge.set(pay if charged else None)
        tasks = [asyncio.ensure_future(reader.read("a/3")) for _ in range(3)]
        running_charge.reset(token)
        for _ in range(steps):
            await asyncio.sleep(0)
            if asyncio.get_running_loop().time() > 1e5 or tasks[0].done():
                break
            await asyncio.sleep(0.0004)
        done = tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert reader.meter.in_flight == 0
        store.p = 0.0
        assert await reader.read("a/4", 5, 500) == OBJECTS["a/4"][5:500]
        await reader.aclose()
        assert (store.under_way, store.open_bodies) == (0, 0)
        return done

    steps = 0
    while not simulate(run(steps), steps)[0]:
        steps += 1
    assert steps > 20


@simulated
async def test_waiting_for_memory_holds_nobody_up_and_takes_no_time() -> None:
    store = FaultyStore(random.Random(1), dict(OBJECTS))
    reader = reader_of(store, concurrency=1)
    charged = []
    paid = asyncio.Event()

    async def pay(nbytes: int) -> None:
        charged.append(nbytes)
        await paid.wait()

    token = running_charge.set(pay)
    waiting = asyncio.ensure_future(reader.read("a/3", 1000))
    running_charge.reset(token)
    await asyncio.sleep(500.0)
    assert await reader.read("a/4") == OBJECTS["a/4"]
    paid.set()
    assert await waiting == OBJECTS["a/3"][1000:]
    assert (charged, reader.meter.requests, reader.meter.retries) == ([82_000], 2, 0)
    await reader.aclose()


def test_two_cancellations_at_once_are_one_cancelled_read() -> None:
    """A time limit and the user's cancellation in the same turn of the loop: the user's counts."""

    async def run(seed: int) -> None:
        store = FaultyStore(random.Random(1), {"a": b"x"}, p=1.0, faults=("hang",))
        reader = reader_of(store, options=Fetch(attempts=1, first_byte_timeout_s=8.0))
        task: asyncio.Task[Any] = asyncio.ensure_future(reader.read("a"))
        asyncio.get_running_loop().call_later(8.0, task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()
        assert task.cancelling() == 1
        await reader.aclose()

    for seed in range(10):
        simulate(run(seed), seed)
