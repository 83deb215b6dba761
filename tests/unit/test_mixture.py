"""What hr.mix refuses, and how it tells so; what a mixture says of itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

import headrace as hr
from headrace.pipeline.epoch_orders import Planning


def numbers(count: int) -> hr.Stream:
    return hr.from_map(range(count))


async def later(sample: Any) -> Any:
    return sample


def plain(sample: Any) -> Any:
    return sample


class Endless(hr.AsyncIterableDataset):
    async def aiter(self) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (Endless, "no numbers before they are read; .* Otherwise samples are counted as they come"),
        (lambda: iter([1]), "is a list_iterator: a stream, a list or"),
        (lambda: numbers(5).map(plain).map(later), "behind a plain one"),
    ],
)
def test_source_is_refused_when_it_cannot_be_mixed(source: Callable[[], Any], told: str) -> None:
    with pytest.raises(hr.OptionError, match=told):
        hr.mix({"good": numbers(5), "bad": source()})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weights": {"a": 1}}, "a number for each of a, b"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "a number for each of a, b"),
        ({"weights": {"a": 1, "b": -1}}, "not negative"),
        ({"weights": {"a": 1, "b": float("nan")}}, "finite"),
        ({"weights": {"a": 1, "b": "2"}}, "'2'"),
        ({"weights": {"a": 0, "b": 0}}, "all weights are 0"),
        ({"weights": [1, 2]}, "a function of the step"),
        ({"by": "lines"}, "by='lines'"),
        ({"by": "tokens", "until": "all"}, "by='tokens' and until='all'"),
        ({"by": "tokens"}, "needs weights="),
        ({"until": "never"}, "until='never'"),
        ({"step": 0}, "step=0"),
    ],
)
def test_option_is_refused_when_it_cannot_be_used(options: dict[str, Any], told: str) -> None:
    with pytest.raises(hr.OptionError, match=told):
        hr.mix({"a": numbers(5), "b": numbers(5)}, **options)


@pytest.mark.parametrize("streams", [{}, [numbers(3)], {1: numbers(3)}])
def test_streams_are_refused_when_they_have_no_names(streams: Any) -> None:
    with pytest.raises(hr.OptionError, match="by their names"):
        hr.mix(streams)


@pytest.mark.parametrize(
    ("operate", "told"),
    [
        (lambda data: data.shuffle("global"), "in windows only"),
        (lambda data: data.repeat(2), "has no end"),
        (lambda data: data.slice(3, 5), "has no end"),
        (lambda data: data.sample(), "has no end"),
    ],
)
def test_operator_is_refused_when_a_mixture_has_no_use_for_it(operate: Callable[[hr.Stream], Any], told: str) -> None:
    data = hr.mix({"a": numbers(5)}, until="forever")
    with pytest.raises(hr.OptionError, match=told):
        operate(data)


def test_weights_of_a_step_are_refused_when_they_cannot_be_used() -> None:
    def weights(step: int) -> Mapping[str, float]:
        return {"a": 1, "b": 1} if step < 2 else {"a": 1}

    data = hr.mix({"a": numbers(50), "b": numbers(50)}, weights, step=10)
    with pytest.raises(hr.OptionError, match="at step 2"):
        len(data)


def test_source_without_samples_is_named_when_it_has_a_weight() -> None:
    data = {"a": numbers(5), "nothing": numbers(0)}
    with pytest.raises(hr.OptionError, match="'nothing' of the mixture has no samples"):
        len(hr.mix(data, {"a": 1, "nothing": 1}))
    assert len(hr.mix(data, {"a": 1, "nothing": 0})) == len(hr.mix(data)) == 5


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 100),
        ({"weights": {"a": 1, "b": 1}}, 40),
        ({"weights": {"a": 1, "b": 1}, "until": "all"}, 160),
        ({"weights": {"a": 9, "b": 1}}, 89),  # the 81st of a would be the next one
    ],
)
def test_mixture_has_a_length_when_it_ends(options: dict[str, Any], count: int) -> None:
    data = hr.mix({"a": numbers(80), "b": numbers(20)}, **options)
    assert len(data) == count
    assert len(data.take(7)) == 7
    assert len(data.repeat(2)) == 2 * count
    assert len(data.batch(8)) == -(-count // 8)


def test_mixture_tells_what_it_is() -> None:
    data = hr.mix({"a": numbers(80).shuffle(), "b": numbers(20).map(plain)}, {"a": 3, "b": 0.5}).map(plain).batch(4)
    assert repr(data) == "mix(a, b).map(plain).batch(4)"
    planning = Planning(data.pipeline(), 0)
    assert planning.described() == ["mix(a, b; weights=3:0.5, until=first, step=1024)", "a: shuffle(global)"]


def test_plans_tell_data_apart_when_a_source_or_a_name_differs() -> None:
    data = [{"a": numbers(5), "b": numbers(6)}, {"a": numbers(6), "b": numbers(5)}, {"a": numbers(5), "c": numbers(6)}]
    assert len({Planning(hr.mix(streams).pipeline(), 0).fingerprint for streams in data}) == 3


def by_step(step: int) -> Mapping[str, float]:
    return {"a": 1, "b": step}


def test_mixture_is_the_same_when_it_was_pickled_or_copied_after_use() -> None:
    data = hr.mix({"a": hr.from_map(list(range(40))), "b": hr.from_map(list(range(40, 60)))}, by_step, step=8)
    samples = list(data)
    assert len(samples) == len(data) > 30
    assert list(pickle.loads(pickle.dumps(data))) == list(copy.deepcopy(data)) == samples


def test_objects_in_a_mixture_within_a_mixture_are_read_with_their_options() -> None:
    def files(**options: str) -> hr.Stream:
        return hr.files(["memory://a.bin", "memory://b.bin"], storage_options=options)

    inner = hr.mix({"numbers": numbers(2), "files": files(region="here")})
    shards = hr.stream("memory://a.tar", index="memory://a.hri", storage_options={"region": "elsewhere"})
    assert hr.mix({"shards": shards, "inner": inner}).source.storage_options == {"region": "here"}
    with pytest.raises(hr.OptionError, match="different storage_options"):
        hr.mix({"inner": inner, "files": files(region="there")})


def test_mixture_without_end_says_so() -> None:
    mixed = hr.mix({"a": numbers(5), "b": numbers(3)}, {"a": 1, "b": 1}, until="forever")
    assert mixed.describe().splitlines()[1] == "  samples: without end"
