"""Each operator after each other one: the samples are right, and a resumed run gives the rest."""

import functools
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.loops import loaded, rest_of, resumed_anywhere
from builders.numbers import is_odd, later, twice
from builders.tars import put_shards
from end_to_end.state.sources import WithStatefulIterator

import headrace as hr

pytestmark = pytest.mark.slow

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "map": lambda data: data.map(lambda sample: sample),
    "map, async": lambda data: data.map(later),
    "filter": lambda data: data.filter(some),
    "flat_map": lambda data: data.flat_map(twice),
    "batch": lambda data: data.batch(3),
    "unbatch": lambda data: data.batch(3).unbatch(),
    "padded_batch": lambda data: data.padded_batch(2),
    "bucket": lambda data: data.bucket(lambda sample: len(json.dumps(plain(sample))), [30], batch_size=2),
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


def some(sample: Any) -> bool:
    return len(json.dumps(plain(sample))) % 5 != 1


def plain(sample: Any) -> Any:
    return json.loads(json.dumps(sample, default=lambda tensor: tensor.tolist()))


def loader(first: str, second: str, workers: int = 0) -> hr.DataLoader[Any]:
    data = OPERATORS[second](OPERATORS[first](hr.from_map(ITEMS)))
    return hr.DataLoader(data, batch_size=None, seed=5, num_workers=workers)


@pytest.mark.parametrize("second", OPERATORS)
@pytest.mark.parametrize("first", OPERATORS)
def test_each_operator_works_after_each_other(first: str, second: str) -> None:
    (given,) = resumed_anywhere(lambda: loader(first, second), plain, most=2)
    if first in PLAIN and second in PLAIN:
        assert given == PLAIN[second](PLAIN[first](ITEMS))


def test_page_lists_the_operators_whose_pairs_work() -> None:
    page = Path(__file__).parents[3] / "docs/reference/streams.md"
    names = dict.fromkeys(f"`{name.partition(',')[0]}`" for name in OPERATORS)
    current = page.read_text()
    wanted = re.sub(r"(?<=, with exact states: )[^.]*", ", ".join(names), current)
    if os.environ.get("HEADRACE_WRITE_PAGES"):
        page.write_text(wanted)
    assert current == wanted, f"{page} lists other operators: HEADRACE_WRITE_PAGES=1 and this test write the list"


def iterator() -> Any:
    return WithStatefulIterator(24, int)


def unindexed() -> hr.Stream:
    data = hr.stream(put_shards("pairs", [5, 0, 9, 10]), index=None)
    return data.map(lambda sample: int(sample["__key__"]))


NUMBERS = list(range(24))
ODD = NUMBERS[1::2]
TWICE = [n for n in NUMBERS * 2 for _ in range(2)]
CHAINS: dict[str, tuple[Callable[[], Any], list[int] | None]] = {  # None: these numbers in another order
    "iterator, shuffle": (lambda: iterator().shuffle(window=5), None),
    "iterator, shuffle, repeat": (lambda: iterator().shuffle(window=6).repeat(2), None),
    "iterator, skip": (lambda: iterator().skip(3), NUMBERS[3:]),
    "iterator, slice": (lambda: iterator().slice(1, 14, 2), NUMBERS[1:14:2]),
    "iterator, repeat": (lambda: iterator().repeat().take(60), (NUMBERS * 3)[:60]),
    "iterator, take, epoch": (lambda: iterator().take(10).epoch(samples=24), (NUMBERS[:10] * 3)[:24]),
    "shards, skip": (lambda: unindexed().skip(3), NUMBERS[3:]),
    "shards, take, shuffle": (lambda: unindexed().take(12).shuffle(window=6), None),
    "flat_map, epoch, batch": (lambda: numbers().flat_map(twice).epoch(samples=59).batch(3).unbatch(), TWICE[:59]),
    "filter, epoch, batch": (lambda: odds().epoch(samples=29).batch(3).map(later).unbatch(), (ODD * 3)[:29]),
    "filter, take, padded_batch": (lambda: odds().take(7).padded_batch(3).map(later).unbatch(), ODD[:7]),
    "filter, take, bucket": (lambda: odds().take(7).bucket(int, [10], batch_size=2).map(later).unbatch(), None),
    "filter, take, filter, epoch": (lambda: odds().take(7).filter(is_odd).epoch(samples=12), (ODD[:7] * 2)[:12]),
    "filter, skip, epoch": (lambda: odds().skip(2).epoch(samples=22), (ODD[2:] * 3)[:22]),
    "epoch, epoch": (lambda: numbers().epoch(samples=5).epoch(samples=12), (NUMBERS[:5] * 3)[:12]),
    "filter, take, filter, take": (lambda: odds().take(9).filter(lambda n: n % 5).take(6), [1, 3, 7, 9, 11, 13]),
    "filter, enumerate, filter, skip": (lambda: odds().enumerate().filter(sum).skip(1).map(sum), [*range(4, 36, 3)]),
    "flat_map, slice, batch, skip": (
        lambda: numbers().flat_map(twice).slice(1, 30, 2).batch(3).unbatch().skip(1),
        NUMBERS[1:15],
    ),
    "list, concat": (lambda: numbers().concat([24], (25, 26)), [*NUMBERS, 24, 25, 26]),
    "mix, shuffle": (lambda: hr.mix({"a": NUMBERS, "b": (30, 31)}).shuffle(window=8), None),
    "mix, take, filter, epoch": (lambda: endless().take(40).filter(is_odd).epoch(samples=22), None),
    "interleave, shuffle": (lambda: numbers().interleave([24]).shuffle("window", window=8), None),
}


def numbers() -> hr.Stream:
    return hr.from_map(NUMBERS)


def odds() -> hr.Stream:
    return numbers().filter(is_odd)


def endless() -> hr.Stream:
    return hr.mix({"a": NUMBERS, "b": ODD}, {"a": 1, "b": 2}, until="forever")


@pytest.mark.parametrize("chain", CHAINS)
def test_longer_chains_give_their_samples_and_resume(chain: str) -> None:
    make, expected = CHAINS[chain]
    (given,) = resumed_anywhere(lambda: hr.DataLoader(make(), batch_size=None, seed=5), plain, most=2)
    if expected is not None:
        assert given == expected
    else:
        assert sorted(given) != given
        assert len(given) == len(list(make()))


def test_batches_start_again_with_each_repeat_and_go_on_through_an_epoch() -> None:
    data = hr.from_map(range(5)).batch(2)
    assert [batch.tolist() for batch in hr.DataLoader(data.repeat(2))] == [[0, 1], [2, 3], [4]] * 2
    assert [batch.tolist() for batch in data.epoch(samples=4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert len(data.epoch(samples=4)) == 4
    with pytest.raises(hr.OptionError, match=r"set it there: \.batch\(n, drop_last=True\)"):
        hr.DataLoader(data.repeat(2), drop_last=True)
    with pytest.raises(hr.OptionError, match="has no samples to repeat"):
        list(data.take(0).repeat())


def test_state_of_other_arguments_is_refused() -> None:
    def combined(kind: str, weight: int = 1) -> hr.DataLoader[Any]:
        data = hr.from_map(NUMBERS).filter(is_odd)
        made = {
            "mix": lambda: hr.mix({"a": data, "b": NUMBERS}, {"a": weight, "b": 1}),
            "interleave": lambda: data.interleave(NUMBERS, block=weight),
            "repeat": lambda: data.batch(2).repeat(weight),
        }
        return hr.DataLoader(made[kind](), batch_size=None)

    for kind in ("mix", "interleave", "repeat"):
        with combined(kind, 3) as whole, combined(kind, 2) as other:
            next(iter(whole))
            with pytest.raises(hr.StateMismatchError, match="data"):
                other.load_state_dict(whole.state_dict())


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
    rest = rest_of(hr.DataLoader(combined(data), batch_size=None), state)
    assert given + [plain(sample) for sample in rest] == [plain(sample) for sample in loaded(combined(data), None)]


def fails(number: int) -> int:
    if number in (5, 6, 23):
        raise ValueError(f"sample {number} failed")
    return number


SKIPPED: dict[str, tuple[Callable[[Any], Any], list[Any], int]] = {
    "concat": (lambda data: data.concat([24]), [*(n for n in ODD if n not in (5, 23)), 24], 3),
    "interleave": (lambda data: hr.from_map([30, 31]).interleave(data), [30, 1, 31, 3, *ODD[3:-1]], 3),
    "zip": (
        lambda data: data.zip(NUMBERS, strict=False),
        [[1, 0], [3, 1], *map(list, zip(ODD[3:-1], range(4, 12), strict=True))],
        3,
    ),
    "repeat": (lambda data: data.take(4).repeat(2), [1, 3, 1, 3], 4),
}


@pytest.mark.parametrize("combined", SKIPPED)
@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_of_inputs_are_skipped_in_their_places(combined: str, workers: int) -> None:
    make, expected, skipped = SKIPPED[combined]
    data = make(hr.from_map(NUMBERS).map(fails).filter(is_odd))
    options: dict[str, Any] = {"batch_size": None, "errors": hr.Skip(), "num_workers": workers}
    if not workers:
        assert resumed_anywhere(lambda: hr.DataLoader(data, **options), plain, most=2) == [expected]
    with hr.DataLoader(data, **options) as loader:
        assert list(map(plain, loader)) == expected
        assert loader.stats().skipped == skipped
    with (
        hr.DataLoader(data, **options | {"errors": hr.Skip(max_in_epoch=1)}) as loader,
        pytest.raises(ValueError, match="failed") as caught,
    ):
        list(loader)
    assert any("1 samples of this epoch were skipped before it" in note for note in caught.value.__notes__)


def test_error_of_a_batch_of_an_input_is_raised_as_its_other_samples_would_be_skipped_too() -> None:
    data = hr.from_map(NUMBERS).map(fails).batch(2).repeat(2)
    with hr.DataLoader(data, errors=hr.Skip()) as loader, pytest.raises(ValueError, match="sample 5 failed"):
        list(loader)


def test_zip_of_counted_inputs_refuses_other_lengths() -> None:
    with pytest.raises(hr.OptionError, match=r"an input of \.zip\(\) has 9 samples, and another has more"):
        list(hr.from_map(ITEMS).filter(some).zip(other()))
    pairs = list(other().filter(bool).zip(other().filter(bool)))
    assert pairs == [(item, item) for item in OTHER]


@pytest.mark.parametrize("first", OPERATORS)
def test_workers_give_the_same(first: str) -> None:
    second = random.Random(first).choice([*OPERATORS])
    with loader(first, second) as alone, loader(first, second, workers=2) as shared:
        assert [plain(sample) for sample in shared] == [plain(sample) for sample in alone]
