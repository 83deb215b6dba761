"""Each way to shuffle gives every sample once, in an order of its own for each epoch, and another one for each seed."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.numbers import Numbers, streamed
from builders.tars import numbers_of, put_index, put_shards

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_server")
COUNTS = (9, 0, 14, 1, 30, 6)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("shuffles", COUNTS)


@pytest.fixture(scope="module")
def index(urls: list[str]) -> str:
    return put_index(urls, "shuffles")


def epochs_of(data: hr.Stream, count: int = 1, **options: Any) -> list[list[int]]:
    with hr.DataLoader(data, batch_size=4, collate_fn=numbers_of, **options) as loader:
        return [list(itertools.chain.from_iterable(loader)) for _ in range(count)]


SOURCES: dict[str, Callable[[list[str], str], Any]] = {
    "indexed": lambda urls, index: hr.stream(urls, index=index),
    "unindexed": lambda urls, index: hr.stream(urls, index=None),
    "keys": lambda urls, index: Numbers(TOTAL),
    "iterator": lambda urls, index: streamed(range(TOTAL)),
}
WAYS = [
    *(("indexed", by) for by in ("shards", "within", "window", "global", "auto")),
    *(("unindexed", by) for by in ("shards", "window", "buffer", "auto")),
    *(("keys", by) for by in ("window", "global", "auto")),
    *(("iterator", by) for by in ("buffer", "window", "auto")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "by"), WAYS)
def test_each_epoch_has_each_sample_in_another_order(urls: list[str], index: str, source: str, by: Any) -> None:
    data = SOURCES[source](urls, index)
    more = {"window": {"window": 16}, "buffer": {"buffer": 8}}.get(by, {})
    orders = epochs_of(data.shuffle(by, **more), 2) + epochs_of(data.shuffle(by, seed=9, **more))
    for order in orders:
        assert sorted(order) == list(range(TOTAL))
    assert len(set(map(tuple, [*orders, range(TOTAL)]))) == 4
    if source != "iterator" or by == "buffer":  # windows of these combine both seeds
        assert epochs_of(data.shuffle(by, **more), seed=9) == orders[2:]
    assert epochs_of(data.shuffle(by, **more), 2) == orders[:2]
    assert epochs_of(data.shuffle(by, seed=9, **more)) == orders[2:]


def shard_of(number: int) -> int:
    return int(np.searchsorted(np.cumsum(COUNTS), number, side="right"))


def test_whole_shards_keep_the_order_of_their_samples(urls: list[str], index: str) -> None:
    for data in (hr.stream(urls, index=index), hr.stream(urls, index=None)):
        (order,) = epochs_of(data.shuffle("shards"))
        runs = [list(run) for _, run in itertools.groupby(order, shard_of)]
        assert len(runs) == sum(count > 0 for count in COUNTS)
        assert all(run == sorted(run) for run in runs)
        assert [run[0] for run in runs] != sorted(run[0] for run in runs)


def test_samples_that_are_shuffled_within_stay_in_their_shards(urls: list[str], index: str) -> None:
    (order,) = epochs_of(hr.stream(urls, index=index).shuffle("within"))
    assert [shard_of(number) for number in order] == [shard_of(number) for number in range(TOTAL)]


def test_samples_leave_a_buffer_no_sooner_than_they_have_come() -> None:
    (order,) = epochs_of(streamed(range(TOTAL)).shuffle(buffer=5))
    assert all(number <= place + 5 for place, number in enumerate(order))
    (order,) = epochs_of(streamed(range(TOTAL)).shuffle(buffer=1000))
    assert sorted(order) == list(range(TOTAL))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_order_does_not_depend_on_workers_or_reads(urls: list[str], index: str, workers: int) -> None:
    for source, by in WAYS:
        data = SOURCES[source](urls, index).shuffle(by)
        expected = epochs_of(data, 2)
        assert epochs_of(data, 2, num_workers=workers, fetch=hr.Fetch(concurrency=1), prefetch_factor=1) == expected, (
            source,
            by,
        )


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = [0.0] * 50 + [1.0, 3.0]
    (drawn,) = epochs_of(Numbers(52).sample(weights=weights, count=4000))
    assert len(drawn) == 4000
    assert set(drawn) == {50, 51}
    assert abs(drawn.count(51) - 3000) < 200  # 7 standard deviations
    (once,) = epochs_of(Numbers(52).sample(weights=[1.0] * 52, replacement=False))
    assert sorted(once) == list(range(52)) != once
    (some,) = epochs_of(Numbers(52).sample(count=10, replacement=False))
    assert len(set(some)) == len(some) == 10
    first, second = epochs_of(Numbers(52).sample(count=300), 2)
    assert first != second
    assert len(set(first)) > 40


def test_each_repetition_has_each_sample_once_in_another_order(urls: list[str], index: str) -> None:
    plain = hr.stream(urls, index=None)
    for data in (hr.stream(urls, index=index).shuffle(window=16), plain.shuffle(window=16), plain.shuffle(buffer=7)):
        (order,) = epochs_of(data.repeat(3))
        passes = [order[k * TOTAL : (k + 1) * TOTAL] for k in range(3)]
        assert all(sorted(one) == list(range(TOTAL)) for one in passes)
        assert len(set(map(tuple, passes))) == 3


@pytest.mark.slow
def test_an_endless_stream_ends_where_it_is_told_to(urls: list[str], index: str) -> None:
    data = hr.stream(urls, index=index).shuffle()
    with pytest.raises(TypeError, match="has no end"):
        len(data.repeat())
    assert len(epochs_of(data.repeat().take(150))[0]) == len(data.repeat().take(150)) == 150
    assert len(epochs_of(data.epoch(samples=20))[0]) == len(data.epoch(samples=20)) == 20
    assert len(epochs_of(hr.stream(urls, index=None).repeat().take(150))[0]) == 150
    with hr.DataLoader(data.repeat(), batch_size=4) as loader:
        assert len(list(itertools.islice(loader, 40))) == 40


def test_shards_without_samples_are_not_repeated_for_ever() -> None:
    data = hr.stream(put_shards("nothing", [0, 0]), index=None)
    for endless in (data.repeat(), data.epoch(samples=10)):
        with pytest.raises(hr.OptionError, match=r"2 shards, .*memory://nothing/0.tar .*no samples"):
            epochs_of(endless)


WRONG: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("buffer= is for", lambda indexed, plain: plain.shuffle("window", buffer=3)),
    ("window= is for", lambda indexed, plain: indexed.shuffle("global", window=3)),
    ("window=0 must be", lambda indexed, plain: indexed.shuffle(window=0)),
    ("one of", lambda indexed, plain: indexed.shuffle("widow")),
    ("'window' and 'global' mix better", lambda indexed, plain: indexed.shuffle("buffer")),
    ("without an index", lambda indexed, plain: plain.shuffle("within")),
    ("put it before .filter", lambda indexed, plain: indexed.repeat(2).sample([1])),
    ("1 or more", lambda indexed, plain: indexed.repeat(0)),
    ("1 or more", lambda indexed, plain: indexed.epoch(samples=0)),
    ("have no numbers before they are read", lambda indexed, plain: plain.sample(count=3)),
    ("give the sampler alone", lambda indexed, plain: indexed.sample([1, 2], count=3)),
]


@pytest.mark.parametrize(("text", "use"), WRONG)
def test_wrong_shuffles_are_refused(urls: list[str], index: str, text: str, use: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(hr.OptionError, match=text):
        use(hr.stream(urls, index=index), hr.stream(urls, index=None))
