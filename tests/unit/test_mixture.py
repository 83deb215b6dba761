"""Refusals, lengths and descriptions of `hr.mix`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from builders.numbers import Counting

import headrace as hr
from headrace.pipeline.epoch_orders import Planning


def numbers(count: int) -> hr.Stream:
    return hr.from_map(range(count))


async def later(sample: Any) -> Any:
    return sample


def plain(sample: Any) -> Any:
    return sample


def mix_two(**options: Any) -> hr.Stream:
    return hr.mix({"a": numbers(50), "b": numbers(50)}, **options)


UNNUMBERED = "no numbers before they are read; .* Otherwise samples are counted as they come"
TWO_STEPS = lambda step: {"a": 1, "b": 1} if step < 2 else {"a": 1}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: hr.mix({"good": numbers(5), "bad": Counting()}), UNNUMBERED),
    (lambda: hr.mix({"good": numbers(5), "bad": iter([1])}), "is a list_iterator: a stream, a list or"),
    (lambda: hr.mix({"bad": numbers(5).map(plain).map(later)}), "a plain one"),
    (lambda: mix_two(weights={"a": 1}), "a number for each of a, b"),
    (lambda: mix_two(weights={"a": 1, "b": 1, "c": 1}), "a number for each of a, b"),
    (lambda: mix_two(weights={"a": 1, "b": -1}), "not negative"),
    (lambda: mix_two(weights={"a": 1, "b": float("nan")}), "finite"),
    (lambda: mix_two(weights={"a": 1, "b": "2"}), "'2'"),
    (lambda: mix_two(weights={"a": 0, "b": 0}), "all weights are 0"),
    (lambda: mix_two(weights=[1, 2]), "a function of the step"),
    (lambda: mix_two(by="lines"), "by='lines'"),
    (lambda: mix_two(by="tokens", until="all"), "by='tokens' and until='all'"),
    (lambda: mix_two(by="tokens"), "needs weights="),
    (lambda: mix_two(until="never"), "until='never'"),
    (lambda: mix_two(step=0), "step=0"),
    (lambda: len(mix_two(weights=TWO_STEPS, step=10)), "at step 2"),
    (lambda: hr.mix({}), "by their names"),
    (lambda: hr.mix([numbers(3)]), "by their names"),  # type: ignore[arg-type]
    (lambda: hr.mix({1: numbers(3)}), "by their names"),  # type: ignore[dict-item]
    (lambda: mix_two(until="forever").shuffle("global"), "in windows only"),
    (lambda: mix_two(until="forever").repeat(2), "has no end"),
    (lambda: mix_two(until="forever").slice(3, 5), "has no end"),
    (lambda: mix_two(until="forever").sample(), "has no end"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_mixture_that_cannot_be_made_or_used_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(hr.OptionError, match=why):
        make()


def test_source_without_samples_is_named_when_it_has_a_weight() -> None:
    data = {"a": numbers(5), "nothing": numbers(0)}
    with pytest.raises(hr.OptionError, match="'nothing' of the mixture has no samples"):
        len(hr.mix(data, {"a": 1, "nothing": 1}))
    assert len(hr.mix(data, {"a": 1, "nothing": 0})) == len(hr.mix(data)) == 5


@pytest.mark.parametrize(("options", "count"), [
    ({}, 100),
    ({"weights": {"a": 1, "b": 1}}, 40),
    ({"weights": {"a": 1, "b": 1}, "until": "all"}, 160),
    ({"weights": {"a": 9, "b": 1}}, 89),  # the 81st of a would be the next one
])  # fmt: skip
def test_mixture_has_a_length_when_it_ends(options: dict[str, Any], count: int) -> None:
    data = hr.mix({"a": numbers(80), "b": numbers(20)}, **options)
    assert len(data) == count
    assert len(data.take(7)) == 7
    assert len(data.repeat(2)) == 2 * count
    assert len(data.batch(8)) == -(-count // 8)


def test_mixture_describes_itself() -> None:
    data = hr.mix({"a": numbers(80).shuffle(), "b": numbers(20).map(plain)}, {"a": 3, "b": 0.5}).map(plain).batch(4)
    assert repr(data) == "mix(a, b).map(plain).batch(4)"
    described = Planning(data.pipeline(), 0).described()
    assert described == ["mix(a, b; weights=3:0.5, until=first, step=1024)", "a: shuffle(global)"]
    assert mix_two(until="forever").describe().splitlines()[1] == "  samples: without end"
    five, six = numbers(5), numbers(6)
    others = [hr.mix(one) for one in ({"a": five, "b": six}, {"a": six, "b": five}, {"a": five, "c": six})]
    assert len({Planning(other.pipeline(), 0).fingerprint for other in others}) == 3


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
