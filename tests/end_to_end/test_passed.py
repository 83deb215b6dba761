"""Errors name the operators that the sample had passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr


def fails(sample: Any) -> Any:
    raise ValueError(f"{sample!r} is refused")


async def fails_later(sample: Any) -> Any:
    return fails(sample)


async def later(sample: Any) -> Any:
    return sample


CASES: dict[str, tuple[Callable[[hr.Stream], Any], str]] = {
    "map": (lambda data: data.shuffle().map(abs).map(fails), "FromMap(…) → shuffle(auto) → map(abs) → map(fails)"),
    "async": (lambda data: data.map(abs).map(fails_later), "FromMap(…) → map(abs) → map(fails_later)"),
    "async, at the source": (
        lambda data: data.map(later).map(fails_later),
        "FromMap(…) → map(later) → map(fails_later)",
    ),
    "filter": (lambda data: data.take(2).filter(fails), "FromMap(…) → take(2) → filter(fails)"),
    "many": (lambda data: data.flat_map(fails), "FromMap(…) → flat_map(fails)"),
    "after many": (
        lambda data: data.flat_map(lambda n: [n]).batch(2).unbatch().map(fails),
        "FromMap(…) → flat_map(<lambda>) → batch(2) → unbatch() → map(fails)",
    ),
    "of a batch": (lambda data: data.batch(2).map(fails), "FromMap(…) → batch(2) → map(fails)"),
    "of one of several": (
        lambda data: data.map(abs).zip(data.map(later).map(fails)),
        "FromMap(…) → map(later) → map(fails)",
    ),
    "of a branch": (lambda data: _branches(*data.fork(2)), "FromMap(…) → fork(2) → map(fails) of branch 1"),
}


def _branches(first: hr.Stream, second: hr.Stream) -> hr.Stream:
    return first.zip(second.map(fails))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_the_operators_that_the_sample_has_passed(case: str, workers: int) -> None:
    make, passed = CASES[case]
    with pytest.raises(ValueError, match="is refused") as caught:
        list(hr.DataLoader(make(hr.from_map([1, 2, 3])), batch_size=None, num_workers=workers))
    assert any(note.endswith(f"operators: {passed}") for note in caught.value.__notes__)
