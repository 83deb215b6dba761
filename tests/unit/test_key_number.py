"""Numbers of keys: the same in every process, for equal keys, and for hardly any others."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.randomness import key_number

PLAIN = (
    *(st.integers(), st.booleans(), st.text(max_size=8), st.binary(max_size=8), st.none()),
    *(st.floats(allow_nan=False), st.integers(-3, 3).map(float)),
)
KEYS = st.recursive(
    st.one_of(PLAIN),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)


@given(KEYS, KEYS)
def test_keys_have_one_number_when_they_are_equal_and_two_when_not(one: Any, other: Any) -> None:
    assert 0 <= key_number(one) < 2**64
    assert (key_number(one) == key_number(other)) == (one == other)


@given(st.integers(0, 2**64 - 1))
def test_whole_numbers_are_their_own(number: int) -> None:
    assert key_number(number) == number


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_is_the_same_key_in_any_library(number: int) -> None:
    for kind in (np.int64, np.array, torch.tensor):
        assert key_number(kind(number)) == key_number(number)
        assert key_number((kind(number), "a")) == key_number((number, "a"))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (np.float64(1.5), 1.5, True),
        (np.float32(1.5), 1.5, True),
        (np.bool_(True), True, True),
        (np.str_("a"), "a", True),
        (-0.0, 0, True),
        (float("nan"), np.float32("nan"), True),
        ("a", b"a", False),
        ((), None, False),
        (("a", "b"), ("ab",), False),
        ((1, (2, 3)), ((1, 2), 3), False),
        ((), frozenset(), False),
        ("1", 1, False),
    ],
)
def test_scalars_of_numpy_have_the_numbers_of_their_values(one: Any, other: Any, is_same: bool) -> None:
    assert (key_number(one) == key_number(other)) is is_same


SAMPLE = '["a", -1, 2**70, (1, "ä", None), b"c", 0.1, frozenset({"x", "y", "z"}), range(3), [1, 2], {"k": 1}]'


@pytest.mark.process
def test_numbers_are_the_same_in_every_process() -> None:
    code = f"from headrace.workers.randomness import key_number; print([key_number(k) for k in {SAMPLE}])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([key_number(key) for key in eval(SAMPLE)])


def test_numbers_of_a_release_stay() -> None:
    assert key_number("a") == 1410542633125930404
    assert key_number(-1) == 12061929287756718838
    assert key_number((1, "b")) == 10462782514508699542
