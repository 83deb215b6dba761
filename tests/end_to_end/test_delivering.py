"""Delivery options of streams: how much is made ahead, and whether ranks divide the samples."""

from typing import Any

import pytest
import torch
from builders.loops import flat, iterated_later, loaded, rest_of, state_after
from unit.fake_device import FakeBackend

import headrace as hr
from headrace.delivery.device import Mover


def test_prefetch_of_the_stream_is_an_option_of_the_loader_and_changes_no_sample() -> None:
    data = hr.from_map(range(9)).shuffle(seed=2)
    for most in (0, 1, 7):
        assert list(data.prefetch(most)) == iterated_later(data.prefetch(most)) == list(data)
        assert hr.DataLoader(data.prefetch(most), batch_size=2).options["prefetch_factor"] == most
    assert hr.DataLoader(data.prefetch(3), prefetch_factor=3).options["prefetch_factor"] == 3
    assert ".prefetch(7)  [loader]" in data.prefetch(7).describe()
    assert len(data.prefetch(1)) == 9


@pytest.mark.parametrize("batch_size", [1, 2])
def test_on_every_rank_gives_each_rank_all_samples_and_one_state(batch_size: int) -> None:
    data = hr.from_map(range(7)).shuffle().on_every_rank().map(abs)
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": list}
    alone = loaded(data, **options)
    assert sorted(flat(alone)) == list(range(7))
    for rank in range(3):
        assert loaded(data, **options, ranks=hr.Ranks(rank=rank, world_size=3)) == alone
    state = state_after(hr.DataLoader(data, **options, ranks=hr.Ranks(rank=1, world_size=2)), 1)
    assert rest_of(hr.DataLoader(data, **options, ranks=hr.Ranks(rank=4, world_size=5)), state) == alone[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: data.prefetch(-1), r"prefetch\(\): n=-1 must be a whole number, 0 or more"),
        (lambda data: data.prefetch(1).prefetch(1), r"\.prefetch\(1\) and \.prefetch\(1\)"),
        (lambda data: hr.DataLoader(data.prefetch(3), prefetch_factor=2), r"factor=2 and \.prefetch\(3\) exclude"),
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
def test_delivery_options_are_refused_before_other_operators(make: Any, match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(hr.from_map([1, 2]))


def image(index: int) -> torch.Tensor:
    return torch.full((3, 64, 64), index)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "data set"])
def test_end_during_copies_leaks_nothing(is_stream: bool, is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.delivery.device.mover_to", lambda device: Mover(FakeBackend()))
    data = hr.from_map(range(640)).map(image) if is_stream else [image(k) for k in range(640)]
    loader = hr.DataLoader(data, batch_size=32, num_workers=2, device="cuda")
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    if is_closed:
        loader.close()
