"""Data sets of the user's own: coroutines by key, asynchronous iterators and files."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio.to_thread
import pytest
import torch
from builders.loops import loaded
from builders.numbers import Made, Named

import headrace as hr
from headrace.fetch.stores import memory

pytestmark = pytest.mark.usefixtures("warm_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])
leaves_threads = pytest.mark.may_leave(
    threads="AnyIO worker thread", descriptors="x^", reason="threads end with their loop"
)


class Keys(Made):
    """Numbers. Fails if the session of another loop is used, or one that is closed."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(int, count)
        self.calls, self.threads = list[str](), set[str]()

    async def aopen(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self.note("open")

    async def aclose(self) -> None:
        self.note("close")
        self.loop = None

    def note(self, *calls: str) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.threads.add(threading.current_thread().name)
        self.calls += calls

    async def aget(self, key: int) -> int:
        self.note()
        await asyncio.sleep(0)
        return int(await super().aget(key))


def flat(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_got_on_the_engines_loop_and_the_data_set_is_opened_once(num_workers: int) -> None:
    data = Keys()
    with hr.DataLoader(data, batch_size=4, num_workers=num_workers) as loader:
        assert data.calls == []
        for _ in range(3):
            assert flat(loader) == list(range(10))
        assert data.calls == ["open"]
    assert data.calls == ["open", "close"]
    assert data.threads == {"headrace-engine"}
    assert sorted(data.asked) == sorted([*range(10)] * 3)


def test_each_loader_has_its_own_session_when_several_use_one_data_set() -> None:
    class Sessions(hr.AsyncIterableDataset):
        ranks_by = "position"

        async def aopen(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def aiter(self) -> AsyncIterator[int]:
            for number in range(6):
                assert self.loop is asyncio.get_running_loop()
                yield number

    data = Keys(6)
    streams = [data, data.map(int), hr.mix({"a": data, "b": data}), data.zip(data.map(float)), Sessions().map(int)]
    for stream in streams:
        with hr.DataLoader(stream, batch_size=2) as train:
            batches = iter(train)
            first = next(batches)
            with hr.DataLoader(stream, batch_size=2) as validation:
                assert len(list(validation)) in (3, 6)
                if stream is not streams[-1]:
                    assert stream[2] is not None
            assert len([first, *batches]) in (3, 6)
            assert len(list(train)) in (3, 6)
    assert data.calls.count("open") == data.calls.count("close") == 3 * 4


def test_a_failure_to_open_is_raised_and_opening_is_tried_again() -> None:
    class Shy(Keys):
        async def aopen(self) -> None:
            await super().aopen()
            if len(self.calls) == 1:
                raise ConnectionError("not yet")

    with hr.DataLoader(Shy(), batch_size=4) as loader:
        with pytest.raises(ConnectionError, match="not yet"):
            next(iter(loader))
        assert flat(loader) == list(range(10))


class Many(Made):
    def __init__(self, skipped: int = 0) -> None:
        super().__init__(int, 10)
        self.skipped, self.chunks = skipped, list[list[int]]()

    async def aget_many(self, keys: Sequence[int]) -> list[int]:
        self.chunks.append(list(keys))
        return [key * 10 for key in keys][self.skipped :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_got_together_where_the_data_set_can(num_workers: int) -> None:
    data = Many()
    batches = loaded(data, batch_size=4, shuffle=True, num_workers=num_workers)
    assert sorted(flat(batches)) == [10 * k for k in range(10)]
    assert data.asked == []
    assert sorted(k for chunk in data.chunks for k in chunk) == list(range(10))


class Plain(Made):
    def aget(self, key: int) -> int:  # type: ignore[override]
        return key


class FewKeys(Made):
    def keys(self) -> list[int]:
        return [1, 2]


NO_COROUTINE = r"Plain\.aget gave a int that cannot be awaited: write `async def aget`"


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda: loaded(Plain(int)), TypeError, NO_COROUTINE),
        (lambda: Plain(int)[0], TypeError, NO_COROUTINE),
        (lambda: loaded(Many(skipped=1)), ValueError, "aget_many gave 0 samples"),
        (lambda: loaded(FewKeys(int)), hr.OptionError, "8 samples, but its keys"),
    ],
)
def test_data_set_that_breaks_the_protocol_is_an_error(use: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        use()


@WORKERS
def test_keys_may_be_anything(num_workers: int) -> None:
    data = Named(["a", "b", ("c", 1), "d"], "got {}".format)
    assert loaded(data, batch_size=2, num_workers=num_workers) == [["got a", "got b"], ["got ('c', 1)", "got d"]]
    (batch,) = loaded(data, batch_size=4, shuffle=True, seed=3)
    assert sorted(batch) == ["got ('c', 1)", "got a", "got b", "got d"]


def test_a_key_that_cannot_be_had_is_an_error_in_its_place() -> None:
    class Holes(Sequence[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, k: Any) -> Any:
            if k == 5:
                raise LookupError("no key there")
            return k

    with hr.DataLoader(Named(Holes(), int), batch_size=2) as loader:
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(LookupError, match="no key there"):
            next(batches)
        assert next(batches).tolist() == [6, 7]


class Feed(hr.AsyncIterableDataset):
    def __init__(self, count: int | None = None) -> None:
        self.count, self.asked, self.ended, self.threads = count, list[int](), 0, set[str]()

    async def aiter(self) -> AsyncIterator[int]:
        n = 0
        try:
            while n != self.count:
                self.threads.add(threading.current_thread().name)
                self.asked.append(n)
                yield n
                n += 1
        finally:
            self.ended += 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_runs_on_the_engines_loop(num_workers: int) -> None:
    data = Feed(10)
    with hr.DataLoader(data.map(lambda n: n + 1), batch_size=4, num_workers=num_workers) as loader:
        assert [flat(loader), flat(loader)] == [list(range(1, 11))] * 2
    assert data.threads == {"headrace-engine"}
    assert data.ended == 2


def let_run(loader: hr.DataLoader[Any]) -> None:
    """Give the tasks of the engine's loop 2,000 turns."""
    is_over = threading.Event()

    async def turns() -> None:
        for _ in range(2000):
            await asyncio.sleep(0)
        is_over.set()

    loader._behind._runtime._engine.start(turns, is_over.set)
    assert is_over.wait(60)


@WORKERS
@pytest.mark.parametrize(("make", "length"), [(Feed, None), (lambda: Keys(10**9), 250_000_000)])
def test_an_endless_or_long_data_set_is_not_run_ahead_of(make: Any, length: int | None, num_workers: int) -> None:
    data, shuffle = make(), length is not None
    options = {"batch_size": 4, "num_workers": num_workers, "fetch": hr.Fetch(concurrency=8), "prefetch_factor": 2}
    with hr.DataLoader(data, shuffle=shuffle, **options) as loader:
        assert length is None or len(loader) == length
        batches = iter(loader)
        first = flat(next(batches) for _ in range(5))
        assert shuffle or first == list(range(20))
        let_run(loader)
        assert len(data.asked) <= 4 * (5 + 2) + 2 * 8 + 4 + 8 * shuffle
    assert shuffle or data.ended == 1


class Caller(hr.AsyncIterableDataset):
    loop = "caller"

    def __init__(self, queue: asyncio.Queue[int | None]) -> None:
        self.queue = queue
        self.ended = asyncio.Event()

    async def aiter(self) -> AsyncIterator[int]:
        try:
            while (n := await self.queue.get()) is not None:
                yield n
        finally:
            self.ended.set()


@pytest.mark.parametrize("most", [99, 1])
def test_a_queue_of_the_callers_program_is_a_data_set_and_ends_with_the_loop(most: int) -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int | None] = asyncio.Queue(2)

        async def produce() -> None:
            for n in [*range(10), None]:
                await queue.put(n)

        producing = asyncio.create_task(produce())
        data, got = Caller(queue), list[int]()
        async with hr.DataLoader(data.map(lambda n: n * 2), batch_size=3) as loader:
            async for batch in loader:
                got += batch.tolist()
                if len(got) >= 3 * most:
                    break
        async with asyncio.timeout(10):
            await data.ended.wait()
        producing.cancel()
        await asyncio.wait([producing])
        return got

    assert asyncio.run(main()) == [2 * n for n in range(10)][: 3 * most]


def test_the_callers_loop_is_needed_for_it() -> None:
    async def main() -> None:
        with hr.DataLoader(Caller(asyncio.Queue())) as loader, pytest.raises(hr.OptionError, match="async for"):
            iter(loader)

    asyncio.run(main())


def test_files_are_samples() -> None:
    for k in range(5):
        memory.put(f"memory://files/{k:02d}.Txt", b"%d" % k)
    memory.put("memory://files/bare", b"x")
    samples = list(hr.files("memory://files/{00..04}.Txt"))
    assert samples[3] == {"__key__": "03", "__url__": "memory://files/03.Txt", "txt": b"3"}
    (bare,) = hr.files(["memory://files/bare"])
    assert bare == {"__key__": "bare", "__url__": "memory://files/bare", "data": b"x"}
    decoded = hr.files("memory://files/{00..04}.Txt").decode().to_tuple("txt")
    assert loaded(decoded, batch_size=5) == [[("0", "1", "2", "3", "4")]]


class AllAtOnce:
    """Gives no sample before so many are asked for at once."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def __len__(self) -> int:
        return 2 * self._barrier.parties

    def __getitem__(self, key: int) -> int:
        self._barrier.wait(30)
        return key


class AtOnce:
    def __init__(self, count: int) -> None:
        self._lock, self._now, self.most, self.count = threading.Lock(), 0, 0, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        with self._lock:
            self._now -= 1
        return key


@pytest.mark.slow
@leaves_threads
def test_from_map_makes_one_call_at_a_time_over_all_loaders_when_threads_are_left_out() -> None:
    data = AtOnce(2000)
    first, second = torch.utils.data.random_split(data, [1200, 800])  # type: ignore[var-annotated,arg-type]
    with contextlib.ExitStack() as loaders:
        streams = [hr.from_map(part) for part in (first, second, data, data)]
        epochs = [iter(loaders.enter_context(hr.DataLoader(stream, batch_size=50))) for stream in streams]
        got = [sorted(flat(epoch)) for epoch in epochs]
    assert got == [sorted(first.indices), sorted(second.indices), list(range(2000)), list(range(2000))]
    assert data.most == 1


@leaves_threads
def test_from_map_makes_as_many_calls_at_a_time_as_threads_say() -> None:
    assert flat(loaded(hr.from_map(AllAtOnce(60), threads=60), batch_size=60, fetch=hr.Fetch(concurrency=60))) == list(
        range(120)
    )
    data = AtOnce(60)
    assert flat(loaded(hr.from_map(data, threads=3), batch_size=4)) == list(range(60))
    assert 0 < data.most <= 3
    with pytest.raises(hr.OptionError, match="threads=0"):
        hr.from_map(data, threads=0)


@leaves_threads
def test_slow_synchronous_samples_leave_the_threads_of_others_alone() -> None:
    """As decompression does, the others run in threads of anyio."""
    data = AllAtOnce(45)
    others = Made(lambda key: anyio.to_thread.run_sync(data.__getitem__, key), 5)
    sources = {"late": hr.from_map(data, threads=40).slice(0, 40), "others": others}
    assert sorted(flat(loaded(hr.mix(sources), batch_size=45, fetch=hr.Fetch(concurrency=45)))) == sorted(
        [*range(40), *range(5)]
    )


@WORKERS
def test_nothing_is_made_before_it_is_asked_for(num_workers: int) -> None:
    data = Keys(100)
    with hr.DataLoader(data, batch_size=4, prefetch_factor=0, num_workers=num_workers) as loader:
        batches = iter(loader)
        for k in range(6):
            let_run(loader)
            assert len(data.asked) == 4 * k
            assert next(batches).tolist() == list(range(4 * k, 4 * k + 4))


def test_try_next_raises_not_ready_and_loses_no_batch() -> None:
    may_go = threading.Event()

    async def wait(key: int) -> int:
        await asyncio.get_running_loop().run_in_executor(None, may_go.wait)
        return key

    with hr.DataLoader(Made(wait, 4), batch_size=2) as loader:
        batches = iter(loader)
        with pytest.raises(hr.errors.NotReady):
            batches.try_next()
        may_go.set()
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(StopIteration):
            while True:
                with pytest.raises(hr.errors.NotReady):
                    batches.try_next()


def test_closed_iterators_and_loaders_are_refused_and_batches_stay() -> None:
    loader = hr.DataLoader(Keys(100).map(lambda n: torch.full((50_000,), n)), batch_size=2)
    batches = iter(loader)
    kept = next(batches)
    batches.close()
    with pytest.raises(hr.errors.LoaderClosedError, match="iterator was closed"):
        next(batches)
    other = iter(loader)
    next(other)
    loader.close()
    loader.close()
    for use in (lambda: list(other), lambda: iter(loader)):
        with pytest.raises(hr.errors.LoaderClosedError):
            use()
    assert kept[0].eq(0).all()
    assert kept[1].eq(1).all()


def test_samples_are_changed_once_however_their_batch_is_made() -> None:
    class Odd(dict[str, Any]):
        pass

    def change(sample: dict[str, Any]) -> dict[str, Any]:
        sample["n"] += 1
        sample["t"].add_(1)
        return sample

    for kind in (dict, Odd):
        data = Made(lambda key, kind=kind: kind(n=float(key) if key % 2 else key, t=torch.zeros(2)))
        batches = loaded(data.map(change), batch_size=4)
        for batch in batches:
            assert batch["t"].eq(1).all()
            assert batch["n"].dtype in (torch.float32, torch.float64)
        assert batches[-1]["n"].tolist() == [5, 6, 7, 8]


def test_loader_made_anew_of_its_attributes_has_the_same_order() -> None:
    generator = torch.Generator().manual_seed(7)
    names = ("batch_size", "collate_fn", "generator", "prefetch_factor", "seed", "num_workers", "sampler")
    with hr.DataLoader(Keys(20), batch_size=4, shuffle=True, generator=generator) as loader:
        options = {name: getattr(loader, name) for name in names}
        order = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loaded(loader.dataset, **options)] == order
