"""What a stranger writes to have an operator: a call or an entry point registers it, and it keeps the contract."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from full.contributed import noisy_copies

import headrace as hr
from headrace.ops import registry as registered
from headrace.testing import OperatorContract


@pytest.fixture
def by_entry_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = importlib.metadata.EntryPoint("copies", "full.contributed.noisy_copies:noisy_copies", "headrace.operators")
    monkeypatch.setattr(registered, "entry_points", lambda group: [entry])
    registered._installed.cache_clear()
    yield
    registered._installed.cache_clear()


class TestNoisyCopies(OperatorContract):
    samples = [{"n": n} for n in range(11)]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("noisy_copies", most=3)


class TestTimes(OperatorContract):
    samples = list(range(10))
    expected = [n for n in range(10) for _ in range(n % 3)]

    def apply(self, data: Any) -> hr.Stream:
        hr.register_operator("times", times)
        return data.apply_op("times", 3)


def times(modulus: int) -> hr.SampleOp:
    return hr.SampleOp(fn=lambda n: [n] * (n % modulus), yields="many")


async def doubled(n: int) -> int:
    return 2 * n


def test_operator_gives_one_or_at_most_one_when_it_says_so() -> None:
    hr.register_operator("doubled", lambda: hr.SampleOp(fn=doubled))
    hr.register_operator("below", lambda most: hr.SampleOp(fn=lambda n: n < most, yields="at most one"))
    data = hr.from_map(range(9)).apply_op("doubled").apply_op("below", most=9)
    assert list(hr.DataLoader(data, batch_size=None)) == [0, 2, 4, 6, 8]
    assert repr(data).endswith(".doubled().below(most=9)")
    assert [hr.SampleOp(fn=fn).where for fn in (doubled, abs)] == ["loop", "worker"]


def test_operator_is_found_when_a_package_names_it_as_an_entry_point(by_entry_point: None) -> None:
    data = hr.from_map([{"n": 2}, {"n": 0}]).apply_op("copies")
    assert [sample["n"] for sample in hr.DataLoader(data, batch_size=None)] == [2, 2]


def test_state_names_the_operator_and_its_arguments() -> None:
    with hr.DataLoader(hr.from_map([{"n": 2}]).apply_op("noisy_copies", 2, field="n")) as loader:
        assert loader.state_dict()["steps"] == ["noisy_copies(2, field='n')"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: hr.from_map([1]).apply_op("nobodys"), "'nobodys'.*register others"),
        (lambda: hr.register_operator("no word", noisy_copies.noisy_copies), "must be a word"),
        (lambda: hr.register_operator("word", 3), "make=3 must be a function"),  # type: ignore[arg-type]
        (lambda: hr.SampleOp(fn=abs, yields="two"), "yields='two'"),  # type: ignore[arg-type]
        (lambda: hr.SampleOp(fn=3), "fn=3 must be a function"),  # type: ignore[arg-type]
    ],
)
def test_operator_is_refused_when_it_is_of_no_use(wrong: Any, told: str) -> None:
    with pytest.raises(hr.OptionError, match=told):
        wrong()


def test_what_gives_no_operator_is_refused_when_it_is_applied() -> None:
    hr.register_operator("nothing", lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(hr.OptionError, match="result=None must be"):
        hr.from_map([1]).apply_op("nothing")
    del registered._registered["nothing"]
