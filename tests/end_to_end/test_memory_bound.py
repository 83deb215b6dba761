"""Memory stays within the budget, and no budget is so small that nothing moves."""

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import pytest
import torch
from builders.numbers import Iterated, Made, Numbers, is_kept_later
from builders.tars import tar

import headrace as hr
from headrace.fetch.stores import memory

pytestmark = pytest.mark.usefixtures("warm_server")
MiB = 2**20
RANGE = 4 * MiB  # what the oldest batch lacks is read even over the budget, one range at a time
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@contextmanager
def stored(name: str, bodies: Iterable[bytes]) -> Iterator[list[str]]:
    urls = []
    for k, body in enumerate(bodies):
        urls.append(f"memory://{name}/{k:02}.bin")
        memory.put(urls[-1], body)
    yield urls
    for url in urls:
        memory.remove(url)


@pytest.fixture(scope="module")
def big() -> Iterator[list[str]]:
    samples = lambda k: [(f"{k}{n:03d}", {"bin": bytes([10 * k + n]) * 2 * MiB, "cls": b"1"}) for n in range(12)]
    with stored("big", (tar(samples(k)) for k in range(8))) as urls:
        yield urls


def as_array(sample: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(sample["bin"], np.uint8).copy()


class Sampler(threading.Thread):
    """Looks at a loader's memory as often as it can."""

    def __init__(self, loader: hr.DataLoader[Any]) -> None:
        super().__init__(name="sampler")
        self.loader = loader
        self.most = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.001):
            stats = self.loader.stats()
            self.most = max(self.most, stats.shared_bytes + stats.fetch.claimed_bytes)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("budget", [48 * MiB, 96 * MiB])
@pytest.mark.parametrize("shuffled", [False, True])
def test_shared_memory_stays_within_the_budget(big: list[str], budget: int, shuffled: bool, num_workers: int) -> None:
    data = hr.stream(big, format="tar").map(as_array)
    data = data.shuffle(window=8) if shuffled else data
    options = {"batch_size": 2, "memory_budget": budget, "num_workers": num_workers, "timeout": 30}
    with hr.DataLoader(data, **options) as loader:
        count = 0
        with Sampler(loader) as sampler:
            for batch in loader:
                count += len(batch)
        batch_bytes = 2 * 2 * MiB
        window_bytes = 8 * 2 * MiB if shuffled else 0
        assert count == 96
        assert sampler.most > 0
        assert sampler.most <= budget + RANGE + batch_bytes + window_bytes


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("kind", ["keys", "files", "filtered"])
def test_objects_far_larger_than_expected_wait_for_memory(kind: str, num_workers: int) -> None:
    size, count, budget = 5 * MiB, 24, 48 * MiB
    with stored("large", (bytes([k]) * size for k in range(count))) as urls:

        async def get(key: int) -> dict[str, Any]:
            return {"bin": await hr.read(urls[key])}

        data = (hr.files(urls) if kind == "files" else Made(get, count)).map(lambda sample: sample["bin"][0])
        data = data.filter(lambda _: True) if kind == "filtered" else data
        with hr.DataLoader(data, batch_size=1, memory_budget=budget, num_workers=num_workers, timeout=30) as loader:
            with Sampler(loader) as sampler:
                got = [int(batch[0]) for batch in loader]
            assert got == list(range(count))
            assert loader.stats().fetch.claimed_bytes == 0
    segments = (1 + 2 * num_workers) * 16 * MiB  # partly used segments
    assert 2 * size <= sampler.most <= budget + segments


@WORKERS
def test_trainer_that_keeps_batches_larger_than_the_budget_gets_all_of_them(big: list[str], num_workers: int) -> None:
    data = hr.stream(big[:3], format="tar").map(as_array)
    with hr.DataLoader(data, batch_size=2, memory_budget="1MiB", num_workers=num_workers, timeout=30) as loader:
        batches = list(loader)
        assert [int(row[0]) for batch in batches for row in batch] == [10 * k + n for k in range(3) for n in range(12)]
    assert [int(row[-1]) for batch in batches for row in batch] == [10 * k + n for k in range(3) for n in range(12)]


@pytest.mark.parametrize("budget", [9 * MiB, 20 * MiB])
def test_a_slow_first_sample_does_not_lock_up_later_batches(budget: int) -> None:
    is_others_turn = threading.Event()

    async def late(key: int) -> int:
        if key == 0:
            await asyncio.get_running_loop().run_in_executor(None, is_others_turn.wait, 20)
        return key

    data = Made(late, 6).map(lambda n: torch.full((1_000_000,), float(n)))
    with hr.DataLoader(data, batch_size=1, in_order=False, memory_budget=budget, timeout=30) as loader:
        got = []
        for batch in loader:
            got.append(int(batch[0, 0]))
            is_others_turn.set()
    assert sorted(got) == list(range(6))
    assert got[0] != 0


@pytest.mark.slow
@WORKERS
def test_samples_before_a_filter_stay_within_the_budget(num_workers: int) -> None:
    """Every sample becomes 4,000 times larger than what was read: to admit the reads alone would bound nothing."""
    budget, count = 64 * MiB, 256
    body = tar([(f"{n:04d}", {"txt": bytes([n]) * 256, "cls": b"1"}) for n in range(count)])
    options = {"batch_size": 4, "memory_budget": budget, "num_workers": num_workers, "timeout": 30}
    with stored("growing", [body]) as urls:
        images = hr.stream(urls, format="tar").map(lambda one: np.repeat(np.frombuffer(one["txt"], np.uint8), 4096))
        with hr.DataLoader(images.filter(lambda image: image[0] % 4 != 3), **options) as loader:
            with Sampler(loader) as sampler:
                first = [int(image[0]) for batch in loader for image in batch]
    assert first == [n for n in range(count) if n % 4 != 3]
    assert sampler.most <= budget + 2 * 8 * MiB, sampler.most / MiB


SAMPLES, BUDGET = 160, 8  # of 1 MiB each


class Live:
    """Makes large arrays, and counts those that are alive."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()

    def make(self, _: Any) -> np.ndarray[Any, Any]:
        made = np.zeros(MiB, np.uint8)
        weakref.finalize(made, self._count, -1)
        self._count(1)
        return made

    async def make_on_the_loop(self, sample: Any) -> np.ndarray[Any, Any]:
        return self.make(sample)

    def _count(self, change: int) -> None:
        with self._lock:
            self.now += change
            self.most = max(self.most, self.now)


KINDS: dict[str, Any] = {
    "in slots": lambda live: (Numbers(SAMPLES).map(live.make), {}),
    "collated": lambda live: (Numbers(SAMPLES).map(live.make), {"collate_fn": np.stack}),
    "filtered": lambda live: (Numbers(SAMPLES).map(live.make).filter(lambda _: True), {}),
    "filtered by the loop": lambda live: (Numbers(SAMPLES).map(live.make).filter(is_kept_later), {}),
    "by the loop": lambda live: (
        Numbers(SAMPLES).map(str).map(live.make_on_the_loop).map(lambda sample: sample[0]),
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [{}, {"workers": "thread", "num_workers": 2}])
def test_results_in_threads_are_as_few_as_the_budget_allows(kind: str, workers: dict[str, Any]) -> None:
    live = Live()
    data, options = KINDS[kind](live)
    count = 0
    with hr.DataLoader(data, batch_size=8, memory_budget=f"{BUDGET}MiB", **options, **workers) as loader:
        for batch in loader:
            count += len(batch)
    assert count == SAMPLES
    # The budget, the batch that is always let in, one that is taken, and what each thread has in hand.
    assert live.most <= BUDGET + 8 + 8 + 2 * 4, live.most


SIZE, COUNT = 3 * MiB, 16


@pytest.fixture
def urls() -> Iterator[list[str]]:
    with stored("steps", (bytes([k]) * SIZE for k in range(COUNT))) as urls:
        yield urls


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("filtered", [False, True], ids=["map", "filter"])
def test_reads_of_operators_leave_no_claim(urls: list[str], filtered: bool, num_workers: int) -> None:
    async def load(number: int) -> int:
        return (await hr.read(urls[number]))[-1]

    async def is_loaded(number: int) -> bool:
        return len(await hr.read(urls[number])) == SIZE

    data = Numbers(COUNT).filter(is_loaded) if filtered else Numbers(COUNT).map(lambda n: n).map(load)
    with hr.DataLoader(data, batch_size=4, num_workers=num_workers, memory_budget=8 * MiB, timeout=30) as loader:
        for _ in range(2):
            assert [int(n) for batch in loader for n in batch] == list(range(COUNT))
        assert loader.stats().fetch.claimed_bytes == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_iterator_of_the_callers_loop_reads_on_that_loop(urls: list[str]) -> None:
    async def feed() -> Any:
        for url in urls:
            yield (await hr.read(url))[0]

    async with hr.DataLoader(Iterated(feed, loop="caller"), batch_size=4, memory_budget=8 * MiB, timeout=30) as loader:
        assert [int(n) async for batch in loader for n in batch] == list(range(COUNT))
        stats = loader.stats().fetch
        assert (stats.claimed_bytes, stats.requests) == (0, 0)
