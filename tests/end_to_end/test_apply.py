"""Functions of all samples of a stream: their input, their process, ranks, states and errors."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from builders.loops import given, iterated_later
from builders.numbers import Iterated

import headrace as hr


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
    return given(data, None, **options)


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


def test_state_is_refused_when_the_function_has_none() -> None:
    with hr.DataLoader(hr.from_map(range(9)).apply(in_pairs), batch_size=2) as loader:
        next(iter(loader))
        with pytest.raises(hr.OptionError, match=r"states of \.apply\(in_pairs\) would have to hold"):
            loader.state_dict()


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


def test_functions_of_no_iterator_are_refused() -> None:
    async def one(samples: Any) -> Any:
        return samples

    data = hr.from_map([1])
    with pytest.raises(hr.OptionError, match=r"apply\(\): fn=one must be a generator function"):
        data.apply(one)
    with pytest.raises(hr.OptionError, match=r"apply\(\): fn=3 must be a function"):
        data.apply(3)
    with pytest.raises(TypeError, match="not iterable"):
        alone(data.apply(lambda samples: 3))


def test_join_without_a_key_emits_samples_of_both_as_they_arrive() -> None:
    gate = threading.Event()

    def waits(number: int) -> int:
        assert gate.wait(60)
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
