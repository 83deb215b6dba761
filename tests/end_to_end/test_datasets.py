"""Data sets of the user's own: coroutines by key, asynchronous iterators and files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch
from builders.loops import loaded
from builders.numbers import Made, Named

import headrace as hr
from headrace.fetch.stores import memory

pytestmark = pytest.mark.usefixtures("warm_server")
leaves_threads = pytest.mark.may_leave(
    threads="AnyIO worker thread", descriptors="x^", reason="threads end with their loop"
)


class Keys(hr.AsyncDataset):
    """Counts what is asked of it; all of that happens on one thread."""

    def __init__(self, count: int = 10, *, is_slow: bool = False) -> None:
        self.count = count
        self.is_slow = is_slow
        self.calls: list[str] = []
        self.got: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.count

    async def aopen(self) -> None:
        self.calls.append("open")
        self.threads.add(threading.current_thread().name)
        self.loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        self.calls.append("close")
        self.threads.add(threading.current_thread().name)
        assert asyncio.get_running_loop() is self.loop

    async def aget(self, key: int) -> int:
        self.got.append(key)
        self.threads.add(threading.current_thread().name)
        assert asyncio.get_running_loop() is self.loop
        if self.is_slow:
            await asyncio.sleep(0)
        return key


class Many(Keys):
    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.chunks: list[list[int]] = []

    async def aget_many(self, keys: Sequence[int]) -> list[int]:
        self.chunks.append(list(keys))
        return [key * 10 for key in keys]


def flat(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_got_on_the_engines_loop_and_the_data_set_is_opened_once(num_workers: int) -> None:
    data = Keys(is_slow=True)
    with hr.DataLoader(data, batch_size=4, num_workers=num_workers) as loader:
        assert data.calls == []
        for _ in range(3):
            assert flat(loader) == list(range(10))
        assert data.calls == ["open"]
    assert data.calls == ["open", "close"]
    assert data.threads == {"headrace-engine"}
    assert sorted(data.got) == sorted([*range(10)] * 3)


def test_each_loader_has_its_own_session_when_several_use_one_data_set() -> None:
    class Session(hr.AsyncDataset):
        """Fails if another loop's session is used, or one that is closed."""

        def __init__(self) -> None:
            self.log: list[str] = []

        def __len__(self) -> int:
            return 6

        async def aopen(self) -> None:
            self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self.log.append("open")

        async def aclose(self) -> None:
            assert self.loop is asyncio.get_running_loop()
            self.loop = None
            self.log.append("close")

        async def aget(self, key: int) -> int:
            assert self.loop is asyncio.get_running_loop()
            return key

    class Sessions(hr.AsyncIterableDataset):
        ranks_by = "position"

        async def aopen(self) -> None:
            self.loop = asyncio.get_running_loop()

        async def aiter(self) -> AsyncIterator[int]:
            for number in range(6):
                assert self.loop is asyncio.get_running_loop()
                yield number

    data = Session()
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
    assert data.log.count("open") == data.log.count("close") == 3 * 4


def test_a_failure_to_open_is_raised_and_opening_is_tried_again() -> None:
    class Shy(Keys):
        async def aopen(self) -> None:
            await super().aopen()
            if len(self.calls) == 1:
                raise ConnectionError("not yet")

    data = Shy()
    with hr.DataLoader(data, batch_size=4) as loader:
        with pytest.raises(ConnectionError, match="not yet"):
            next(iter(loader))
        assert flat(loader) == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_got_together_where_the_data_set_can(num_workers: int) -> None:
    data = Many(10)
    with hr.DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers) as loader:
        assert sorted(flat(loader)) == [10 * k for k in range(10)]
    assert data.got == []
    assert sorted(k for chunk in data.chunks for k in chunk) == list(range(10))


class Plain(Keys):
    def aget(self, key: int) -> int:  # type: ignore[override]
        return key


class Short(Many):
    async def aget_many(self, keys: Sequence[int]) -> list[int]:
        return list(keys)[1:]


class FewKeys(Keys):
    def keys(self) -> list[int]:
        return [1, 2]


def first_of(data: Any) -> Any:
    with hr.DataLoader(data) as loader:
        return next(iter(loader))


NO_COROUTINE = r"Plain\.aget gave a int that cannot be awaited: write `async def aget`"


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda: first_of(Plain()), TypeError, NO_COROUTINE),
        (lambda: Plain()[0], TypeError, NO_COROUTINE),
        (lambda: first_of(Short()), ValueError, "aget_many gave 0 samples"),
        (lambda: first_of(FewKeys()), hr.OptionError, "10 samples, but its keys"),
    ],
)
def test_data_set_that_breaks_the_protocol_is_an_error(use: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        use()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_keys_may_be_anything(num_workers: int) -> None:
    data = Named(["a", "b", ("c", 1), "d"], "got {}".format)
    assert loaded(data, batch_size=2, num_workers=num_workers) == [["got a", "got b"], ["got ('c', 1)", "got d"]]
    with hr.DataLoader(data, batch_size=4, shuffle=True, seed=3) as loader:
        assert sorted(next(iter(loader))) == ["got ('c', 1)", "got a", "got b", "got d"]


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


def test_samples_are_got_outside_of_a_loader_too() -> None:
    data = Keys()
    assert data[3] == 3
    assert data.calls == ["open", "close"]


class Feed(hr.AsyncIterableDataset):
    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.given = 0
        self.ended = 0
        self.threads: set[str] = set()

    async def aiter(self) -> AsyncIterator[int]:
        n = 0
        try:
            while self.count is None or n < self.count:
                self.threads.add(threading.current_thread().name)
                self.given += 1
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_iterable_is_not_run_ahead_of(num_workers: int) -> None:
    data = Feed()
    options = {"batch_size": 4, "num_workers": num_workers, "fetch_concurrency": 8, "prefetch_factor": 2}
    with hr.DataLoader(data, **options) as loader:
        batches = iter(loader)
        assert flat(next(batches) for _ in range(5)) == list(range(20))
        made_at_most = 4 * (5 + 2) + 2 * 8 + 4
        loader._behind._runtime._engine.call(_turns)
        assert data.given <= made_at_most
    assert data.ended == 1


async def _turns() -> None:
    for _ in range(2000):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_of_any_length_starts_at_once_and_is_not_run_ahead_of(num_workers: int) -> None:
    data = Keys(10**9)
    options = {"batch_size": 4, "num_workers": num_workers, "fetch_concurrency": 8, "prefetch_factor": 2}
    with hr.DataLoader(data, shuffle=True, **options) as loader:
        assert len(loader) == 250_000_000
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        loader._behind._runtime._engine.call(_turns)
        assert len(data.got) <= 4 * (5 + 2) + 2 * 8 + 8 + 4


class Caller(hr.AsyncIterableDataset):
    """Samples out of a queue of the caller's program."""

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


def test_a_queue_of_the_callers_program_is_a_data_set() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int | None] = asyncio.Queue(2)

        async def produce() -> None:
            for n in [*range(10), None]:
                await queue.put(n)

        producing = asyncio.create_task(produce())
        data = Caller(queue)
        async with hr.DataLoader(data.map(lambda n: n * 2), batch_size=3) as loader:
            got = [int(n) async for batch in loader for n in batch]
        await producing
        await data.ended.wait()
        return got

    assert asyncio.run(main()) == [2 * n for n in range(10)]


def test_breaking_off_ends_the_callers_iterator() -> None:
    async def main() -> None:
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        for n in range(5):
            queue.put_nowait(n)
        data = Caller(queue)
        async with hr.DataLoader(data, batch_size=2) as loader:
            async for batch in loader:
                assert batch.tolist() == [0, 1]
                break
        async with asyncio.timeout(10):
            await data.ended.wait()

    asyncio.run(main())


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
    assert list(hr.files(["memory://files/bare"])) == [
        {"__key__": "bare", "__url__": "memory://files/bare", "data": b"x"}
    ]
    with hr.DataLoader(hr.files("memory://files/{00..04}.Txt").decode().to_tuple("txt"), batch_size=5) as loader:
        assert next(iter(loader)) == [("0", "1", "2", "3", "4")]


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
    """Counts how many samples are asked for at once."""

    def __init__(self) -> None:
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, key: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        with self._lock:
            self._now -= 1
        return key


class OneHandle:
    """Fixed-size records of one file, which all calls seek and read through the same handle."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"".join(number.to_bytes(2, "big") for number in range(2000)))
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> int:
        self._file.seek(2 * index)
        return int.from_bytes(self._file.read(2), "big")

    def close(self) -> None:
        self._file.close()


@pytest.mark.slow
@leaves_threads
def test_from_map_makes_one_call_at_a_time_over_all_loaders_when_threads_are_left_out(tmp_path: Path) -> None:
    with contextlib.closing(OneHandle(tmp_path / "records")) as data:
        first, second = torch.utils.data.random_split(data, [1200, 800])
        streams = [hr.from_map(part) for part in (first, second, data, data)]
        with contextlib.ExitStack() as loaders:
            epochs = [iter(loaders.enter_context(hr.DataLoader(stream, batch_size=50))) for stream in streams]
            got = [sorted(flat(epoch)) for epoch in epochs]
    assert got == [sorted(first.indices), sorted(second.indices), list(range(2000)), list(range(2000))]


@leaves_threads
def test_from_map_makes_as_many_calls_at_a_time_as_threads_say() -> None:
    assert flat(loaded(hr.from_map(AllAtOnce(60), threads=60), batch_size=60, fetch_concurrency=60)) == list(range(120))
    data = AtOnce()
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
    assert sorted(flat(loaded(hr.mix(sources), batch_size=45, fetch_concurrency=45))) == sorted([*range(40), *range(5)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_made_before_it_is_asked_for(num_workers: int) -> None:
    data = Keys(100)
    with hr.DataLoader(data, batch_size=4, prefetch_factor=0, num_workers=num_workers) as loader:
        batches = iter(loader)
        for k in range(5):
            loader._behind._runtime._engine.call(_turns)
            assert len(data.got) == 4 * k
            assert next(batches).tolist() == list(range(4 * k, 4 * k + 4))
        loader._behind._runtime._engine.call(_turns)
        assert len(data.got) == 20


def test_what_is_not_ready_is_told_and_not_lost() -> None:
    may_go = threading.Event()

    async def wait(key: int) -> int:
        await asyncio.get_running_loop().run_in_executor(None, may_go.wait)
        return key

    with hr.DataLoader(Made(wait, 4), batch_size=2) as loader:
        batches = iter(loader)
        with pytest.raises(hr.errors.NotReady):
            batches.try_next()
        may_go.set()
        assert next(batches).tolist() == [0, 1]
        assert next(batches).tolist() == [2, 3]
        with pytest.raises(StopIteration):
            while True:
                with pytest.raises(hr.errors.NotReady):
                    batches.try_next()


def test_closed_iterators_and_loaders_say_so_and_batches_stay() -> None:
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
    with pytest.raises(hr.errors.LoaderClosedError):
        list(other)
    with pytest.raises(hr.errors.LoaderClosedError):
        iter(loader)
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
        with hr.DataLoader(data.map(change), batch_size=4) as loader:
            for batch in loader:
                assert batch["t"].eq(1).all()
                assert batch["n"].dtype == torch.float32 or batch["n"].dtype == torch.float64
            assert batch["n"].tolist() == [5, 6, 7, 8]


def test_loader_made_anew_of_its_attributes_has_the_same_order() -> None:
    generator = torch.Generator().manual_seed(7)
    names = ("batch_size", "collate_fn", "generator", "prefetch_factor", "seed", "num_workers", "sampler")
    with hr.DataLoader(Keys(20), batch_size=4, shuffle=True, generator=generator) as loader:
        options = {name: getattr(loader, name) for name in names}
        order = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loaded(loader.dataset, **options)] == order
