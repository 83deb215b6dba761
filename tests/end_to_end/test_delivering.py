"""Delivery options of streams: how much is made ahead, and whether ranks divide the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.loops import iterated_later, loaded, rest_of
from unit.fake_device import FakeBackend

import headrace as hr
from headrace.delivery.device import Mover


def test_loader_and_stream_may_say_the_same_and_nothing_else() -> None:
    data = hr.from_map(range(9)).prefetch(3)
    assert hr.DataLoader(data, prefetch_factor=3).options["prefetch_factor"] == 3
    with pytest.raises(hr.OptionError, match=r"prefetch_factor=2 and \.prefetch\(3\) exclude each other"):
        hr.DataLoader(data, prefetch_factor=2)
    assert hr.DataLoader(data, batch_size=2, shuffle=True).options["prefetch_factor"] == 3


def test_samples_are_the_same_with_prefetch_alone_and_in_any_loop() -> None:
    data = hr.from_map(range(9)).shuffle(seed=2)

    for most in (0, 1, 7):
        assert list(data.prefetch(most)) == iterated_later(data.prefetch(most)) == list(data)
    assert ".prefetch(7)  [loader]" in data.prefetch(7).describe()
    assert len(data.prefetch(1)) == 9


@pytest.mark.parametrize("batch", [1, 2])
def test_every_rank_gets_all_samples_of_what_is_on_every_rank(batch: int) -> None:
    data = hr.from_map(range(7)).shuffle().on_every_rank()
    alone = list(hr.DataLoader(data, batch_size=batch, collate_fn=list))
    for rank in range(3):
        assert loaded(data, batch_size=batch, collate_fn=list, rank=rank, world_size=3) == alone
    assert sorted(sample for batch in alone for sample in batch) == list(range(7))


def test_state_of_what_is_on_every_rank_is_good_on_any_rank() -> None:
    data = hr.from_map(range(7)).shuffle().on_every_rank().map(abs)
    with hr.DataLoader(data, batch_size=2, collate_fn=list, rank=1, world_size=2) as loader:
        batches = iter(loader)
        first, state = next(batches), loader.state_dict()
        left = list(batches)
    assert rest_of(hr.DataLoader(data, batch_size=2, collate_fn=list, rank=4, world_size=5), state) == left
    assert len(first) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: data.prefetch(-1), r"prefetch\(\): n=-1 must be a whole number, 0 or more"),
        (lambda data: data.prefetch(1).prefetch(1), r"\.prefetch\(1\) and \.prefetch\(1\)"),
        (lambda data: data.prefetch(1).map(abs), r"map\(abs\) cannot follow \.prefetch\(1\)"),
        (lambda data: data.prefetch(1).batch(2), r"batch\(2\) cannot follow \.prefetch\(1\)"),
        (lambda data: data.prefetch(1).bucket(len, [2], batch_size=1), r"bucket\(.*\) cannot follow \.prefetch\(1\)"),
        (lambda data: data.prefetch(1).zip(data), r"prefetch\(1\) of input 0 of \.zip\(\)"),
        (lambda data: data.concat(data.prefetch(1)), r"prefetch\(1\) of input 1 of \.concat\(\)"),
        (lambda data: data.zip(data.on_every_rank()), r"on_every_rank\(\) of input 1 of \.zip\(\)"),
        (lambda data: hr.mix({"a": data.on_every_rank()}), r"on_every_rank\(\) of source 'a'"),
        (lambda data: data.prefetch(2).pack(4, lengths=[1, 2]), r"\.prefetch\(2\)"),
    ],
)
def test_what_says_how_a_stream_is_delivered_is_refused_where_it_would_say_nothing(make: Any, match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(hr.from_map([1, 2]))


def image(index: int) -> torch.Tensor:
    return torch.full((3, 64, 64), index)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "data set"])
def test_loader_that_ends_while_batches_are_copied_to_a_device_leaves_nothing(
    is_stream: bool, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.delivery.device.mover_to", lambda device: Mover(FakeBackend()))
    data = hr.from_map(range(640)).map(image) if is_stream else [image(k) for k in range(640)]
    loader = hr.DataLoader(data, batch_size=32, num_workers=2, device="cuda")
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    if is_closed:
        loader.close()
