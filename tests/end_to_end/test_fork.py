"""Branches of a stream: each sample is got once, and what is done to it in one branch no other one sees."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from builders.loops import flat, given, iterated_later, loaded
from builders.numbers import Made

import headrace as hr


def counted(count: int) -> Made:
    """Samples that can be changed in place. `asked` has the requested ones."""
    return Made(numbered, count)


def numbered(key: int) -> dict[str, Any]:
    return {"n": key, "list": [key], "array": np.full(2, key)}


def changed(sample: dict[str, Any]) -> dict[str, Any]:
    sample["n"] += 100
    sample["list"].append(1)
    sample["array"] += 1
    return sample


async def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "slow": True}


def plain(pair: tuple[dict[str, Any], ...]) -> list[Any]:
    return [{name: np.asarray(value).tolist() for name, value in sample.items()} for sample in pair]


def drawn(sample: dict[str, Any]) -> float:
    return float(hr.rng().random())


@pytest.mark.parametrize("workers", [0, 2])
def test_branches_that_are_zipped_get_each_sample_once(workers: int) -> None:
    data = counted(9)
    first, second = data.shuffle().fork(2)
    pairs = first.map(changed).zip(second.map(slowly)).map(plain)
    got = loaded(pairs, batch_size=None, num_workers=workers, collate_fn=list)
    assert sorted(data.asked) == list(range(9))
    assert sorted(second["n"] for _, second in got) == list(range(9))
    for one, other in got:
        n = other["n"]
        assert other == {"n": n, "list": [n], "array": [n, n], "slow": True}
        assert one == {"n": n + 100, "list": [n, 1], "array": [n + 1, n + 1]}


def test_later_branches_do_not_see_what_earlier_ones_change() -> None:
    branches = counted(2).fork(3)
    pairs = branches[0].map(changed).zip(branches[1], branches[2].map(changed)).map(plain)
    assert [sample["n"] for sample in next(iter(pairs))] == [100, 0, 100]
    assert pairs[1][1] == {"n": 1, "list": [1], "array": [1, 1]}
    first, second = counted(3).fork(2)
    third, fourth = second.map(slowly).fork(2)  # a fork within a branch
    inner = third.map(drawn).zip(fourth.map(lambda sample: sample["slow"]))
    got = list(first.map(lambda sample: sample["n"]).zip(inner))
    assert [(n, pair[1]) for n, pair in got] == [(0, True), (1, True), (2, True)]


def test_branches_draw_random_numbers_of_their_own() -> None:
    first, second = counted(50).fork(2)
    pairs = list(first.map(drawn).zip(second.map(drawn)))
    assert all(one != other for one, other in pairs)
    assert pairs == list(first.map(drawn).zip(second.map(drawn)))


def test_branches_of_samples_without_numbers_stay_together() -> None:
    first, second = hr.from_iterable(lambda: iter(range(10))).filter(lambda n: n % 2).fork(2)
    assert list(first.map(str).zip(second)) == [(str(n), n) for n in range(1, 10, 2)]
    first, second = hr.from_map(range(5)).batch(2).fork(2)
    assert list(first.map(sum).zip(second.map(len))) == [(1, 2), (5, 2), (4, 1)]


def test_branch_by_itself_is_the_stream() -> None:
    first, second = hr.from_map(range(5)).shuffle(seed=1).fork(2)
    assert list(first) == list(second) == list(hr.from_map(range(5)).shuffle(seed=1))
    assert ".fork(2)[1]  [plan]" in second.describe()
    assert next(iter(first.map(str).zip(hr.from_map("abcde")))) == (str(next(iter(first))), "a")
    text = first.map(str).zip(second.map(abs)).describe()
    assert all(line in text for line in ("fork(2)  [w", ".map(str) of branch 0  [w", ".map(abs) of branch 1  [w"))
    first, second = (pickle.loads(pickle.dumps(branch)) for branch in counted(3).fork(2))
    assert [pair[0]["n"] for pair in first.zip(second)] == [0, 1, 2]
    assert first.source.asked == [0, 1, 2]
    assert second.source.asked == []


def test_branches_give_the_same_in_any_loop_and_with_any_workers() -> None:
    first, second = counted(11).shuffle().fork(2)
    data = first.map(drawn).zip(second.map(drawn)).filter(lambda pair: pair[0] < 0.8)

    alone = given(data, 2)
    assert alone == given(data, 2, num_workers=1)
    assert iterated_later(data) == list(data) == [tuple(pair) for pair in flat(alone)]


def test_error_of_a_branch_names_it() -> None:
    first, second = hr.from_map([1, 0]).fork(2)
    with pytest.raises(ZeroDivisionError) as caught:
        list(first.zip(second.map(lambda n: 1 // n)))
    assert any("of branch 1" in note for note in caught.value.__notes__)
    first, second = hr.from_map([threading.Lock()]).fork(2)
    with pytest.raises(TypeError) as refused:
        list(first.zip(second))
    assert any("cannot be copied for each branch" in note for note in refused.value.__notes__)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda a, b: a.filter(bool).zip(b), r"filter\(bool\) of branch 0"),
        (lambda a, b: a.zip(b.shuffle()), r"shuffle\(auto\) of branch 1"),
        (lambda a, b: a.zip(b.take(2)), r"take\(2\) of branch 1"),
        (lambda a, b: a.batch(2).zip(b.batch(2)), r"batch\(2\) of branch 0"),
        (lambda a, b: a.zip(b.flat_map(list)), r"flat_map\(list\) of branch 1"),
        (lambda a, b: a.zip(b.enumerate()), r"enumerate\(\) of branch 1"),
        (lambda a, b: a.zip(b, hr.from_map([1, 2])), r"inputs 0 and 1 of \.zip\(\) are branches of one \.fork"),
        (lambda a, b: a.zip(hr.from_map([1, 2])).zip(b), r"inputs 0 and 1 of \.zip\(\) are branches of one \.fork"),
        (lambda a, b: a.map(str).cache().zip(b), r"cache\(\) of branch 0"),
        (lambda a, b: a.cache().concat(b.cache()), r"inputs 0 and 1 of \.concat\(\) are branches"),
        (lambda a, b: a.concat(b), r"inputs 0 and 1 of \.concat\(\) are branches"),
        (lambda a, b: a.interleave(b), r"inputs 0 and 1 of \.interleave\(\) are branches"),
        (lambda a, b: hr.mix({"a": a, "b": b}), "are branches of one"),
        (lambda a, b: a.zip(*b.map(str).fork(2)), r"inputs 1 and 2 of \.zip\(\) are branches"),
        (lambda a, b: a.fork(0), "n=0 must be"),
    ],
)
def test_branches_that_would_read_samples_twice_are_refused(make: Any, match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(*hr.from_map([1, 2]).fork(2))
