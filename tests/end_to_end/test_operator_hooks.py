"""Hooks of operators from other packages in each process that runs them."""

import functools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from builders.loops import loaded
from unit.batchers import Budget

import headrace as hr


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
    with pytest.raises(hr.OptionError, match=r"\.hooked\(\) has is_shardable=False: .* 2 ranks"):
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fn": later, "is_separate_process": True}, r"is_separate_process=True\): fn=later must be a plain"),
        ({"fn": later, "sharding_settings": print}, r"sharding_settings\): fn=later must be a plain"),
        ({"fn": seen, "sharding_settings": print, "is_separate_process": False}, "and is_separate_process=False"),
        ({"fn": seen, "lazy_init": later}, r"lazy_init=later must be a plain function"),
        ({"fn": seen, "lazy_init": 3}, "lazy_init=3 must be a plain function"),
    ],
)
def test_hooks_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(hr.OptionError, match=says):
        hr.plugins.SampleOp(**settings)
