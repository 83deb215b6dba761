"""Batches by lengths, as a stranger writes them: several are open at once, and states lose and repeat nothing."""

from __future__ import annotations

from typing import Any

from builders.loops import state_after
from full.contributed import length_buckets  # noqa: F401 (it is registered by that)

import headrace as hr
from headrace.testing import OperatorContract

LENGTHS = (1, 12, 3, 2, 5, 6, 0, 30, 7, 11, 2, 8, 3, 1, 9)


class TestLengthBuckets(OperatorContract):
    samples = [{"n": "x" * n} for n in LENGTHS]
    expected = [
        [{"n": "x" * n, "longest": max(group)} for n in group]
        for group in ([1, 3, 2], [5, 6, 7], [12, 30, 11], [0, 2, 3], [1], [8], [9])
    ]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("length_buckets", 3, bounds=(4, 9))


class TestLengthBucketsOfParts(OperatorContract):
    """Of samples that became others before, and with the samples taken out again."""

    samples = [{"n": n} for n in LENGTHS]

    def apply(self, data: Any) -> hr.Stream:
        return data.flat_map(halves).apply_op("length_buckets", 4).flat_map(list).map(drawn)


def halves(sample: dict[str, int]) -> list[dict[str, int]]:
    return [{"n": sample["n"] // 2 + k, "of": sample["n"]} for k in range(sample["n"] % 4)]


def drawn(sample: dict[str, int]) -> dict[str, int]:
    return {**sample, "drawn": int(hr.rng().integers(1 << 30))}


def test_state_says_which_samples_wait_in_a_few_numbers_when_one_bucket_fills_seldom() -> None:
    data = hr.from_map([{"n": 30 if n == 5 else 1} for n in range(1000)]).apply_op("length_buckets", 4)
    state = state_after(hr.DataLoader(data, batch_size=None), 200)
    assert (state["done"], state["parts"], state["passed"]) == ([0, 5], [0, 0], [[1, 795]])
