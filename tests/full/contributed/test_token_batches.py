"""Batches by tokens, as a stranger writes them: they keep the contract, and no batch is over its budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from builders.loops import state_after
from full.contributed import token_batches  # noqa: F401 (it is registered by that)
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.testing import OperatorContract


class TestTokenBatches(OperatorContract):
    samples = [{"n": n} for n in (3, 5, 1, 0, 9, 2, 12, 4, 4, 1, 1, 8)]
    expected = [[{"n": n} for n in group] for group in ([3, 5, 1, 0], [9], [2], [12], [4, 4, 1], [1, 8])]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("token_batches", 9)


class TestTokenBatchesAreSamples(OperatorContract):
    """They go through functions, are put together again, and taken apart."""

    samples = [{"n": n * 7 % 11} for n in range(40)]

    def apply(self, data: Any) -> hr.Stream:
        sized = data.map(as_it_is).apply_op("token_batches", most=20).map(with_size)
        return sized.apply_op("token_batches", most=30, field="sizes").flat_map(taken_apart).map(drawn)


async def as_it_is(sample: dict[str, int]) -> dict[str, int]:
    return sample


def with_size(batch: list[dict[str, int]]) -> dict[str, Any]:
    return {"batch": batch, "sizes": sum(sample["n"] for sample in batch)}


def taken_apart(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sample for batch in batches for sample in batch["batch"]]


def drawn(sample: dict[str, int]) -> dict[str, int]:
    return {**sample, "drawn": int(hr.rng().integers(1 << 30))}


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), max_size=30), most=st.integers(1, 15))
def test_batches_have_as_many_tokens_as_they_may_and_no_more(lengths: Sequence[int], most: int) -> None:
    data = hr.from_map([{"n": "x" * n} for n in lengths]).apply_op("token_batches", most)
    with hr.DataLoader(data, batch_size=None) as loader:
        batches = [[len(sample["n"]) for sample in batch] for batch in loader]
    assert [n for batch in batches for n in batch] == list(lengths)
    assert all(sum(batch) <= most or len(batch) == 1 for batch in batches)
    assert all(sum(batch) + following[0] > most for batch, following in itertools.pairwise(batches))


def test_state_is_refused_when_the_operator_has_another_argument() -> None:
    data = hr.from_map([{"n": 2}] * 9)
    state = state_after(hr.DataLoader(data.apply_op("token_batches", 6), batch_size=None), 1)
    assert state["steps"] == ["token_batches(6)"]
    with (
        hr.DataLoader(data.apply_op("token_batches", 8), batch_size=None) as loader,
        pytest.raises(hr.StateMismatchError, match="operators"),
    ):
        loader.load_state_dict(state)
