"""Hooks of operators in each process that runs them, and functions of all samples of a stream."""

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio.to_thread
import pytest
from builders import loops
from builders.loops import iterated_later, loaded
from builders.numbers import Iterated
from unit.batchers import Budget

import headrace as hr
from headrace.errors import LoaderClosedError


class Told:
    """Calls of hooks in this process, in their order."""

    calls: tuple[Any, ...] = ()

    @classmethod
    def of(cls, *what: Any) -> None:
        cls.calls = (*cls.calls, what)


@pytest.fixture(autouse=True)
def _forget() -> None:
    Told.calls = ()


class Connection:
    def __init__(self) -> None:
        self.lock, self.pid = threading.Lock(), os.getpid()
        Told.of("made")


def with_connection(sample: int, connection: Connection) -> tuple[int, int, tuple[Any, ...]]:
    assert connection.pid == os.getpid()
    return sample, connection.pid, Told.calls


def kept(sample: int, connection: Connection) -> bool:
    return connection.pid == os.getpid() and sample % 2 == 0


def many(sample: int, connection: Connection) -> Iterator[int]:
    yield from [sample, connection.pid]


async def later(sample: int, connection: Connection) -> tuple[int, int, tuple[Any, ...]]:
    return with_connection(sample, connection)


async def many_later(sample: int, connection: Connection) -> AsyncIterator[int]:
    yield sample
    yield connection.pid


def seen(sample: int) -> tuple[int, int, tuple[Any, ...]]:
    return sample, os.getpid(), Told.calls


def op(**settings: Any) -> Any:
    """A stream's operator, as `apply_op` would put it there."""
    hr.plugins.register_operator("hooked", lambda: hr.plugins.SampleOp(**settings))
    return lambda data: data.apply_op("hooked")


def given(data: Any, **options: Any) -> list[Any]:
    return loaded(data, **{"batch_size": None, "collate_fn": lambda sample: sample, **options})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fn", [with_connection, later])
def test_lazy_init_runs_once_in_each_process_before_its_first_sample(fn: Any, workers: int) -> None:
    got = given(op(fn=fn, lazy_init=Connection)(hr.from_map(range(40))), num_workers=workers)
    assert [number for number, *_ in got] == list(range(40))
    assert {calls for *_, calls in got} == {(("made",),)}
    is_here = workers == 0 or fn is later
    assert ({pid for _, pid, _ in got} == {os.getpid()}) == is_here


@pytest.mark.parametrize("workers", [0, 1])
def test_lazy_init_serves_filters_and_functions_of_many_samples(workers: int) -> None:
    data = hr.from_map(range(6))
    assert given(op(fn=kept, lazy_init=Connection, yields="at most one")(data), num_workers=workers) == [0, 2, 4]
    for fn in (many, many_later):
        got = given(op(fn=fn, lazy_init=Connection, yields="many")(data), num_workers=workers)
        assert got[::2] == list(range(6))
        assert (got[1] == os.getpid()) == (workers == 0 or fn is many_later)


def test_lazy_init_that_fails_fails_the_sample_and_is_tried_again_for_the_next() -> None:
    attempts = []

    def fails_once() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("not yet")
        return "there"

    data = op(fn=lambda sample, made: (sample, made), lazy_init=fails_once)(hr.from_map(range(3)))
    assert loaded(data, batch_size=None, collate_fn=list, errors=hr.Skip()) == [[1, "there"], [2, "there"]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_sharding_settings_are_set_before_the_first_sample(workers: int, rank: int) -> None:
    settings = functools.partial(Told.of, "part")
    data = op(fn=seen, sharding_settings=settings)(hr.from_map(range(6)))
    got = given(data, num_workers=workers, ranks=hr.Ranks(rank=rank, world_size=3))
    assert [number for number, *_ in got] == [rank, rank + 3]
    assert {calls for *_, calls in got} == {(("part", 3, rank),)}
    Told.calls = ()
    assert {calls for *_, calls in given(data, num_workers=workers)} == {(("part", 1, 0),)}


def test_sharding_settings_precede_lazy_init_also_for_one_of_several_inputs() -> None:
    hooked = op(fn=with_connection, sharding_settings=functools.partial(Told.of, "part"), lazy_init=Connection)
    data = hr.from_map(range(4)).zip(hooked(hr.from_map(range(4))))
    got = given(data, ranks=hr.Ranks(rank=1, world_size=2))
    assert [number for number, _ in got] == [1, 3]
    assert {calls for _, (*_, calls) in got} == {(("part", 2, 1), ("made",))}


def test_operator_that_is_not_shardable_is_refused_on_several_ranks() -> None:
    data = op(fn=seen, is_shardable=False)(hr.from_map(range(4)))
    with pytest.raises(hr.OptionError, match=r"\.hooked\(\) has is_shardable=False, and it needs .* 2 ranks"):
        given(data, ranks=hr.Ranks(rank=0, world_size=2))
    assert len(given(data)) == len(given(data.on_every_rank(), ranks=hr.Ranks(rank=0, world_size=2))) == 4
    assert len(given(data, ranks=hr.Ranks.none)) == 4
    with pytest.raises(hr.OptionError, match=r"hooked\(\) of input 1 of \.zip\(\)"):
        hr.from_map(range(4)).zip(data)

    hr.plugins.register_operator("twos", lambda: hr.plugins.BatchOp(batcher=lambda: Budget(2), is_shardable=False))
    with pytest.raises(hr.OptionError, match=r"\.twos\(\) has is_shardable=False"):
        given(hr.from_map(range(4)).apply_op("twos").epoch(samples=2), ranks=hr.Ranks(rank=0, world_size=2))
    assert given(hr.from_map(range(4)).apply_op("twos")) == [[0, 1], [2, 3]]


def test_is_separate_process_sets_the_process() -> None:
    data = hr.from_map(range(4))
    assert {pid for _, pid, _ in given(op(fn=seen, is_separate_process=False)(data), num_workers=1)} == {os.getpid()}
    separate = op(fn=seen, is_separate_process=True)(data)
    assert os.getpid() not in {pid for _, pid, _ in given(separate, num_workers=1)}
    for options in ({}, {"num_workers": 2, "workers": "thread"}):
        with pytest.raises(hr.OptionError, match=r"\.hooked\(\) has is_separate_process=True"):
            given(separate, **options)
    with pytest.raises(hr.OptionError, match="seen has is_separate_process=True"):
        given(data.zip(separate))
    assert "hooked()  [event loop]" in op(fn=seen, is_separate_process=False)(data).describe()


def in_pairs(samples: Iterator[int]) -> Iterator[tuple[int, int]]:
    for sample in samples:
        yield sample, next(samples, -1)


async def in_pairs_later(samples: AsyncIterator[int]) -> AsyncIterator[tuple[int, int]]:
    async for sample in samples:
        yield sample, await anext(samples, -1)


def never() -> hr.AsyncIterableDataset:
    async def one_sample() -> AsyncIterator[int]:
        hr.shard_info()
        yield 1
        await asyncio.Event().wait()

    return Iterated(one_sample, ranks_by="shard_info")


def process_of(number: int) -> tuple[int, int]:
    return number, os.getpid()


def alone(data: Any, **options: Any) -> list[Any]:
    return loops.given(data, None, **options)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [in_pairs, in_pairs_later])
@pytest.mark.parametrize("workers", [0, 2])
def test_function_gets_all_samples_in_their_order(fn: Any, workers: int) -> None:
    numbers = hr.from_map(range(9)).shuffle().map(lambda number: number * number)
    samples = alone(numbers, collate_fn=None)
    data = numbers.apply(fn).map(lambda pair: (pair, float(hr.rng().random())))
    got = alone(data, num_workers=workers)
    assert [list(pair) for pair, _ in got] == [[*samples[k : k + 2], -1][:2] for k in range(0, 9, 2)]
    assert got == alone(data)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [in_pairs, in_pairs_later])
def test_samples_do_not_depend_on_the_loop_and_differ_in_the_next_epoch(fn: Any) -> None:
    data = hr.from_map(range(30)).shuffle().apply(fn).filter(lambda pair: pair[0] % 3)

    assert list(data) == iterated_later(data) == list(data)
    with hr.DataLoader(data, batch_size=None, collate_fn=list) as loader:
        assert list(loader) != list(loader)
    text = data.describe()
    assert f".apply({fn.__name__})" in text
    assert "└─ 0: FromMap(…)" in text
    assert ".shuffle(auto)  [plan]" in text


@pytest.mark.slow
def test_earlier_operators_run_in_workers_and_the_function_in_the_loaders_process() -> None:
    def with_own(samples: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for _, pid in samples:
            yield pid, os.getpid()

    pids = alone(hr.from_map(range(4)).map(process_of).apply(with_own), num_workers=1, collate_fn=None)
    assert {own for _, own in pids} == {os.getpid()}
    assert os.getpid() not in {before for before, _ in pids}


def test_ranks_apply_it_to_samples_of_their_own() -> None:
    data = hr.from_map(range(12)).apply(in_pairs).epoch(samples=6)
    ranks = [alone(data, ranks=hr.Ranks(rank=rank, world_size=2), collate_fn=None) for rank in range(2)]
    assert [len(one) for one in ranks] == [3, 3]
    assert sorted(n for one in ranks for pair in one for n in pair) == list(range(12))
    without = hr.from_map(range(12)).apply(in_pairs)
    with pytest.raises(hr.OptionError, match=r"epoch\(samples=N\)"):
        alone(without, ranks=hr.Ranks(rank=0, world_size=2))
    assert len(alone(without, ranks=hr.Ranks.none)) == 6


@pytest.mark.parametrize("fn", [in_pairs, in_pairs_later])
def test_error_before_or_in_the_function_comes_in_its_place(fn: Any) -> None:
    def fails(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    with hr.DataLoader(hr.from_map(range(9)).map(fails).apply(fn), batch_size=None, collate_fn=list) as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1]
        with pytest.raises(ValueError, match="the third"):
            next(batches)

    def ends(samples: Iterator[int]) -> Iterator[int]:
        yield next(samples)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own") as caught:
        alone(hr.from_map(range(3)).apply(ends), collate_fn=None)
    assert any(note.startswith("stage: apply(") and "ends)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("way", ["for", "async for"])
def test_function_that_waits_for_samples_ends_with_its_loader(way: str) -> None:
    ended = threading.Event()

    def gives(samples: Iterator[int]) -> Iterator[int]:
        try:
            yield from samples
        finally:
            ended.set()

    async def gives_later(samples: AsyncIterator[int]) -> AsyncIterator[int]:
        try:
            async for sample in samples:
                yield sample
        finally:
            ended.set()

    with hr.DataLoader(never().apply(gives if way == "for" else gives_later), batch_size=None) as loader:
        assert next(iter(loader)) == 1
    assert ended.wait(60)


def is_any(n: int) -> bool:
    return n >= 0


async def by_twos(samples: Any) -> AsyncIterator[int]:
    while True:
        for sample in await asyncio.gather(anext(samples, None), anext(samples, None)):
            if sample is None:
                return
            yield sample


def test_apply_may_ask_for_several_samples_at_once() -> None:
    assert list(hr.from_map(range(30)).filter(is_any).apply(by_twos)) == list(range(30))


def test_function_that_asks_after_the_end_of_the_iterator_gets_an_error() -> None:
    (begun, closed, raised), errors = [threading.Event() for _ in range(3)], list[BaseException]()

    def late(samples: Any) -> Iterator[int]:
        begun.set()
        assert closed.wait(60)
        try:
            yield from samples
        except BaseException as error:
            errors.append(error)
            raised.set()
            raise

    with hr.DataLoader(hr.from_map(range(30)).filter(is_any).apply(late), batch_size=4) as loader:
        batches = iter(loader)
        assert begun.wait(60)
        batches.close()
        closed.set()
        assert raised.wait(60)
    assert isinstance(errors[0], LoaderClosedError)


def test_coroutine_functions_after_an_iterable_run_concurrently() -> None:
    running, are_many = list[int](), asyncio.Event()

    async def waits(n: int) -> int:
        running.append(n)
        if len(running) == 10:
            are_many.set()
        await asyncio.wait_for(are_many.wait(), 60)
        return n

    data = hr.from_iterable(range(100)).map(waits)
    assert [n for batch in loaded(data, batch_size=20) for n in batch.tolist()] == list(range(100))


def test_join_without_a_key_emits_samples_of_both_as_they_arrive() -> None:
    gate = threading.Event()

    async def waits(number: int) -> int:
        assert await anyio.to_thread.run_sync(gate.wait, 60)
        return number

    slow, quick = hr.from_map([100, 101]).map(waits), hr.from_map(range(20))
    got = []
    for sample in slow.join(quick):
        got.append(sample)
        if len(got) == 12:  # nobody waits for the slow one
            gate.set()
    assert sorted(got) == [*range(20), 100, 101]
    assert [n for n in got if n < 100] == list(range(20))
    assert [n for n in got if n >= 100] == [100, 101]
    with hr.DataLoader(slow.join(never()), batch_size=None) as loader:
        assert sorted(sample for _, sample in zip(range(3), loader, strict=False)) == [1, 100, 101]
        with pytest.raises(hr.OptionError, match=r"states of \.join\(other\) without on="):
            loader.state_dict()
    both = hr.from_map(range(6)).join(hr.from_map(range(10, 16))).epoch(samples=12)
    ranks = [alone(both, ranks=hr.Ranks(rank=rank, world_size=2), collate_fn=None) for rank in range(2)]
    assert [len(one) for one in ranks] == [6, 6]
    assert sorted(ranks[0] + ranks[1]) == [*range(6), *range(10, 16)]
    assert "FromMap(…).join(FromMap(…))" in both.describe()
    with pytest.raises(ZeroDivisionError):
        list(never().join(hr.from_map([0]).map(lambda number: 1 // number)))


async def one(samples: Any) -> Any:
    return samples


HOOKS: list[tuple[dict[str, Any], str]] = [
    ({"fn": later, "is_separate_process": True}, r"is_separate_process=True\): fn=later must be a plain"),
    ({"fn": later, "sharding_settings": print}, r"sharding_settings\): fn=later must be a plain"),
    ({"fn": seen, "sharding_settings": print, "is_separate_process": False}, "and is_separate_process=False"),
    ({"fn": seen, "lazy_init": later}, r"lazy_init=later must be a plain function"),
    ({"fn": seen, "lazy_init": 3}, "lazy_init=3 must be a plain function"),
]
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda settings=settings: hr.plugins.SampleOp(**settings), hr.OptionError, says) for settings, says in HOOKS),
    (lambda: hr.from_map([1]).apply(one), hr.OptionError, r"apply\(\): fn=one must be a generator function"),
    (lambda: hr.from_map([1]).apply(3), hr.OptionError, r"apply\(\): fn=3 must be a function"),
    (lambda: alone(hr.from_map([1]).apply(lambda samples: 3)), TypeError, "not iterable"),
]


@pytest.mark.parametrize(("make", "error", "match"), WRONG)
def test_hooks_and_functions_that_cannot_work_are_errors(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
