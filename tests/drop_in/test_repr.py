"""The repr of a loader is one line."""

from collections.abc import Callable
from typing import Any

import pytest
from builders.numbers import Numbers
from drop_in.acting import Made

import headrace as hr


class Wordy(Made):
    def __repr__(self) -> str:
        return "many\nlines"


class Own(hr.DataLoader[int]):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: hr.DataLoader(Wordy(int), 2, num_workers=1),
            "DataLoader(Wordy(…), batch_size=2, num_workers=1, regime='torch')",
        ),
        (lambda: Own(Wordy(int)), "Own(Wordy(…), batch_size=1, num_workers=0, regime='torch')"),
        (lambda: hr.DataLoader(Numbers()), "DataLoader(Numbers(…), batch_size=1, num_workers=0, regime='headrace')"),
        (
            lambda: hr.DataLoader(Numbers().map(len)),
            "DataLoader(Numbers(…).map(len), batch_size=1, num_workers=0, regime='headrace')",
        ),
        (
            lambda: hr.DataLoader(Wordy(int), 2, num_workers=2, economic=True),
            "DataLoader(Wordy(…), batch_size=2, num_workers=2, regime='economic')",
        ),
    ],
)
def test_repr_has_class_data_and_options(make: Callable[[], hr.DataLoader[Any]], text: str) -> None:
    assert repr(make()) == text


def test_repr_of_a_stream_has_no_secrets() -> None:
    data = hr.stream("https://me:secret@host/a-{0..3}.tar?sig=secret", format="tar").decode("l8").to_tuple("png")
    text = repr(hr.DataLoader(data, batch_size=8))
    assert text.startswith("DataLoader(stream(https://host/a-0.tar?sig=*** and 3 more).decode(")
    assert text.endswith("batch_size=8, num_workers=0, regime='headrace')")
    assert "\n" not in text


def test_repr_of_a_long_chain_is_short_and_of_an_unmade_loader_no_error() -> None:
    data = hr.stream("a.tar")
    for _ in range(200):
        data = data.map(len)
    assert len(repr(hr.DataLoader(data))) < 300
    assert repr(hr.DataLoader.__new__(hr.DataLoader)).startswith("DataLoader(")
