"""Numbers of samples: their positions in the epoch, with any workers and ranks."""

import itertools
from typing import Any

import pytest
from builders.loops import first_of, flat, given, iterated_later
from builders.tars import number_of, put_index, put_shards

import headrace as hr

COUNTS = (9, 0, 17, 30)


@pytest.fixture(scope="module")
def urls() -> list[str]:
    return put_shards("enumerated", COUNTS)


@pytest.fixture(scope="module")
def indexed(urls: list[str]) -> hr.Stream:
    return hr.stream(urls, index=put_index(urls, "enumerated"))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["window", "global", "shards", None])
@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_positions_in_the_epoch(indexed: hr.Stream, by: Any, workers: int) -> None:
    data = (indexed if by is None else indexed.shuffle(by)).map(number_of)
    assert flat(given(data.enumerate(), num_workers=workers)) == list(enumerate(flat(given(data))))


@pytest.mark.parametrize("world", [2, 3])
def test_numbers_do_not_depend_on_ranks(indexed: hr.Stream, world: int) -> None:
    data = indexed.shuffle().map(number_of).enumerate()
    alone = flat(given(data, batch_size=6))
    ranks = [given(data, batch_size=6 // world, ranks=hr.Ranks(rank=rank, world_size=world)) for rank in range(world)]
    steps = [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert sorted(flat(steps)) == sorted(alone)
    for k, step in enumerate(steps[:-2]):  # the last ones share what is left
        assert sorted(step) == alone[6 * k : 6 * k + 6]


def test_excluded_samples_keep_their_numbers() -> None:
    data, left_out = hr.from_map(range(10)).enumerate(), hr.Exclude(samples=[3, 4])
    ranks = [given(data, batch_size=1, ranks=hr.Ranks(rank=rank, world_size=2), exclude=left_out) for rank in range(2)]
    alone = flat(given(data, batch_size=2, exclude=left_out))
    assert alone == [(n, n) for n in range(10) if n not in (3, 4)]
    assert sorted(flat(ranks[0] + ranks[1])) == alone


def test_numbers_are_the_same_alone_and_in_any_loop(indexed: hr.Stream) -> None:
    data = indexed.map(number_of).enumerate()

    assert list(data) == iterated_later(data) == flat(given(data)) == list(enumerate(range(sum(COUNTS))))
    assert ".enumerate()  [workers]" in data.describe()
    assert len(data) == sum(COUNTS)
    with pytest.raises(TypeError, match="by its number"):
        data[3]


def test_later_filter_leaves_the_numbers_as_they_are(indexed: hr.Stream) -> None:
    data = indexed.map(number_of).enumerate().filter(lambda pair: pair[1] % 2)
    assert list(data) == [(n, n) for n in range(1, sum(COUNTS), 2)]
    kept = indexed.filter(lambda key: int(key) % 2, field="__key__").map(number_of).enumerate()
    assert list(kept) == [(k, 2 * k + 1) for k in range(sum(COUNTS) // 2)]  # the index filters before the order


def test_numbers_of_an_iterable_count_what_it_gives_and_are_refused_on_several_ranks() -> None:
    def letters() -> Any:
        part = hr.shard_info()
        return list("abcdef")[part.rank :: part.world]

    data = hr.from_iterable(letters, ranks_by="shard_info").epoch(samples=6).enumerate()
    assert list(data) == list(enumerate("abcdef"))
    with pytest.raises(hr.OptionError, match=r"enumerate\(\).*2 ranks read samples of their own"):
        on_two_ranks(data, last_batch=None)
    assert flat(given(data, ranks=hr.Ranks.none)) == list(enumerate("abcdef"))


ODD = [n for n in range(20) if n % 3 != 1]


def odd(number: int) -> bool:
    return number % 3 != 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda data: data.filter(odd).skip(5), ODD[5:]),
        (lambda data: data.filter(odd).slice(3, 9, 2), ODD[3:9:2]),
        (lambda data: data.filter(odd).take(9).skip(2), ODD[2:9]),
        (lambda data: data.flat_map(lambda n: [n, -n]).enumerate().slice(3, 5), [(3, -1), (4, 2)]),
        (lambda data: data.batch(3).skip(5).unbatch(), [15, 16, 17, 18, 19]),
        (lambda data: data.enumerate().skip(18), [(18, 18), (19, 19)]),
        (lambda data: data.repeat(2).slice(18, 22), [18, 19, 0, 1]),
    ],
)
def test_samples_made_of_others_are_counted_as_they_come(make: Any, expected: list[object]) -> None:
    assert list(make(hr.from_map(range(20)))) == expected


def on_two_ranks(data: hr.Stream, last_batch: Any = "uneven") -> Any:
    return first_of(data, batch_size=None, ranks=hr.Ranks(rank=0, world_size=2, last_batch=last_batch))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: on_two_ranks(data.filter(bool).enumerate()), r"enumerate\(\) has is_shardable=False"),
        (lambda data: on_two_ranks(data.filter(bool).skip(1)), r"skip\(1\) has is_shardable=False"),
        (lambda data: data.enumerate().pack(4, lengths=[1, 2]), r"\.enumerate\(\): it is about a whole epoch"),
    ],
)
def test_enumerate_is_refused_when_positions_are_unknown(make: Any, match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(hr.from_map([[1], [2]]))


def test_padding_repeats_numbers_and_carried_samples_have_negative_ones() -> None:
    data = hr.from_map(range(5)).enumerate()
    assert sorted(flat(given(data, batch_size=2, ranks=hr.Ranks(last_batch="pad")))) == [(0, 0), *enumerate(range(5))]
    with hr.DataLoader(data, batch_size=2, collate_fn=list, ranks=hr.Ranks(last_batch="carry")) as loader:
        assert flat(list(loader)) == list(enumerate(range(4)))
        assert flat(list(loader)) == [(-1, 4), *enumerate(range(5))]
