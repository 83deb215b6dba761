"""Each operator after each other one: the samples are right, and a resumed run gives the rest."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr

pytestmark = pytest.mark.slow

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "map": lambda data: data.map(as_it_is),
    "map, async": lambda data: data.map(later),
    "filter": lambda data: data.filter(some),
    "flat_map": lambda data: data.flat_map(twice),
    "batch": lambda data: data.batch(3),
    "unbatch": lambda data: data.batch(3).unbatch(),
    "padded_batch": lambda data: data.padded_batch(2),
    "bucket": lambda data: data.bucket(length, [30], batch_size=2),
    "shuffle": lambda data: data.shuffle(seed=1),
    "take": lambda data: data.take(10),
    "skip": lambda data: data.skip(2),
    "slice": lambda data: data.slice(1, 14, 2),
    "enumerate": lambda data: data.enumerate(),
    "repeat": lambda data: data.repeat(2),
    "epoch": lambda data: data.epoch(samples=15),
    "concat": lambda data: data.concat(other()),
    "zip": lambda data: data.zip(other(), strict=False),
    "interleave": lambda data: data.interleave(other()),
    "mix": lambda data: hr.mix({"a": data, "b": other()}, {"a": 2, "b": 1}),
    "cache": lambda data: data.cache(),
}
REFUSED = {  # where the result would not be what anybody means, or is not made yet
    *((name, "repeat") for name in ("batch", "unbatch", "padded_batch", "bucket", "enumerate", "repeat", "epoch")),
    *((name, "epoch") for name in ("batch", "padded_batch", "enumerate", "repeat", "epoch")),
    *((name, "cache") for name in ("batch", "unbatch", "padded_batch", "bucket", "enumerate")),
    *((name, "cache") for name in ("zip", "interleave", "mix")),
    ("shuffle", "shuffle"),
    ("mix", "shuffle"),
}
PLAIN: dict[str, Callable[[list[Any]], list[Any]]] = {  # what operators do to a list
    "map": lambda items: items,
    "map, async": lambda items: items,
    "filter": lambda items: [item for item in items if some(item)],
    "flat_map": lambda items: [item for item in items for _ in range(2)],
    "unbatch": lambda items: items,
    "take": lambda items: items[:10],
    "skip": lambda items: items[2:],
    "slice": lambda items: items[1:14:2],
    "enumerate": lambda items: [[k, item] for k, item in enumerate(items)],
    "repeat": lambda items: items * 2,
    "epoch": lambda items: (items * 15)[:15],
    "concat": lambda items: items + OTHER,
    "zip": lambda items: [[item, one] for item, one in zip(items, OTHER, strict=False)],
    "cache": lambda items: items,
}
ITEMS = [{"n": n, "ids": [n, 2]} for n in range(24)]
OTHER = [{"n": 100 + n, "ids": [3, 4]} for n in range(9)]


def other() -> hr.Stream:
    return hr.from_map(OTHER)


def as_it_is(sample: Any) -> Any:
    return sample


async def later(sample: Any) -> Any:
    return sample


def some(sample: Any) -> bool:
    return len(json.dumps(plain(sample))) % 5 != 1


def twice(sample: Any) -> list[Any]:
    return [sample, sample]


def length(sample: Any) -> int:
    return len(json.dumps(plain(sample)))


def plain(sample: Any) -> Any:
    return json.loads(json.dumps(sample, default=lambda tensor: tensor.tolist()))


def loader(first: str, second: str, workers: int = 0) -> hr.DataLoader[Any]:
    data = OPERATORS[second](OPERATORS[first](hr.from_map(ITEMS)))
    return hr.DataLoader(data, batch_size=None, seed=5, num_workers=workers)


@pytest.mark.parametrize("second", OPERATORS)
@pytest.mark.parametrize("first", OPERATORS)
def test_each_operator_works_after_each_other(first: str, second: str) -> None:
    if (first, second) in REFUSED:
        with pytest.raises(hr.OptionError):
            list(loader(first, second))
        return
    with loader(first, second) as whole:
        states, given = [plain(whole.state_dict())], []
        for sample in whole:
            given.append(plain(sample))
            states.append(plain(whole.state_dict()))
    if first in PLAIN and second in PLAIN:
        assert given == PLAIN[second](PLAIN[first](ITEMS))
    for done in random.Random(f"{first} {second}").sample(range(len(given)), min(2, len(given))):
        with loader(first, second) as resumed:
            resumed.load_state_dict(states[done])
            assert [plain(sample) for sample in resumed] == given[done:]


def fails_once(folder: Path, item: Any) -> Any:
    if item["n"] == 5 and not (folder / "failed").exists():
        (folder / "failed").touch()
        raise ValueError("a read that failed")
    return item


@pytest.mark.parametrize(
    "combined",
    [
        lambda data: other().zip(data, strict=False),
        lambda data: data.zip(other(), strict=False),
        lambda data: other().interleave(data),
        lambda data: hr.mix({"a": other(), "b": data}, {"a": 1, "b": 1}),
    ],
)
def test_state_after_a_failed_read_gives_the_same_pairs(combined: Callable[[Any], Any], tmp_path: Path) -> None:
    data = hr.from_map(ITEMS).map(functools.partial(fails_once, tmp_path)).filter(some)
    given: list[Any] = []
    with hr.DataLoader(combined(data), batch_size=None) as failing:
        with pytest.raises(ValueError, match="a read that failed"):
            given.extend(plain(sample) for sample in failing)
        state = plain(failing.state_dict())
    with (
        hr.DataLoader(combined(data), batch_size=None) as resumed,
        hr.DataLoader(combined(data), batch_size=None) as whole,
    ):
        resumed.load_state_dict(state)
        assert given + [plain(sample) for sample in resumed] == [plain(sample) for sample in whole]


def test_zip_of_counted_inputs_refuses_other_lengths() -> None:
    with pytest.raises(hr.OptionError, match="its inputs have different numbers of samples"):
        list(hr.from_map(ITEMS).filter(some).zip(other()))
    pairs = list(other().filter(as_it_is).zip(other().filter(as_it_is)))
    assert pairs == [(item, item) for item in OTHER]


@pytest.mark.parametrize("first", OPERATORS)
def test_workers_give_the_same(first: str) -> None:
    second = random.Random(first).choice([name for name in OPERATORS if (first, name) not in REFUSED])
    with loader(first, second) as alone, loader(first, second, workers=2) as shared:
        assert [plain(sample) for sample in shared] == [plain(sample) for sample in alone]
