"""Loaders in the torch regime that resume with other options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drop_in.stateful_data import Counted, EpochSampler, EpochStream, Numbers, Stream, identity, through_text
from torch.utils.data import BatchSampler

import headrace as hr

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def flat(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def begun(dataset: Any, batches: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some batches, and the state after those."""
    iterator = iter(hr.DataLoader(dataset, collate_fn=identity, **options))
    got = [next(iterator) for _ in range(batches)]
    return flat(got), through_text(iterator.state_dict())


def refused(state: dict[str, Any], loader: hr.DataLoader[Any], **options: Any) -> None:
    with pytest.raises(hr.StateMismatchError, match=r"^batch_size: ") as told:
        loader.load_state_dict(state, **options)
    assert told.value.field == "batch_size"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2, 7), (4, 12, 3), (2, 4, 5)])
@pytest.mark.parametrize("sampler", [lambda: None, lambda: EpochSampler(60)], ids=["torch's", "stateful"])
@pytest.mark.parametrize("kind", [Numbers, Counted])
@WORKERS
def test_samples_come_once_and_in_order_when_the_batch_size_changes_twice(
    num_workers: int, kind: Any, sampler: Callable[[], Any], sizes: tuple[int, ...]
) -> None:
    def make(size: int) -> hr.DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": identity, "snapshot_every_n_steps": 1}
        drawn = sampler()
        return hr.DataLoader(kind(60), size, drawn is None, sampler=drawn, **options)

    def keys(batches: Any) -> list[int]:
        return [sample[0] if kind is Counted else sample for sample in flat(batches)]

    torch.manual_seed(7)
    whole = make(4)
    expected = [keys(whole) for _ in range(2)]
    torch.manual_seed(7)
    state: dict[str, Any] = {}
    got = []
    for size, batches in zip(sizes, (6, 2, None), strict=True):
        loader = make(size)
        loader.load_state_dict(state)
        iterator = iter(loader)
        taken = list(iterator) if batches is None else [next(iterator) for _ in range(batches)]
        got += keys(taken)
        state = through_text(loader.state_dict())
    assert [got, keys(loader)] == expected


@WORKERS
def test_states_of_copies_belong_to_their_batches_when_the_batch_size_has_changed(num_workers: int) -> None:
    def make(size: int, every: int) -> hr.DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": identity}
        return hr.DataLoader(Counted(40), size, snapshot_every_n_steps=every, **options)

    iterator = iter(make(4, 1))
    for _ in range(3):
        next(iterator)
    second = make(2, 3)
    second.load_state_dict(iterator.state_dict())
    iterator = iter(second)
    for _ in range(5):
        next(iterator)
    state = through_text(second.state_dict())
    assert sum(known["batches"] for known in state["copies"]) == state["due"] == 11
    third = make(2, 3)
    third.load_state_dict(state)
    assert list(third) == list(iterator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Stream, {}, id="stream without a state"),
        pytest.param(Stream, {"num_workers": 2}, id="stream without a state, workers"),
        pytest.param(EpochStream, {"num_workers": 2}, id="stream whose state is older"),
        pytest.param(Counted, {"num_workers": 2}, id="copies whose states are older"),
        pytest.param(Counted, {"num_workers": 2, "snapshot_every_n_steps": 0}, id="copies whose states are not kept"),
        pytest.param(
            Numbers, {"num_workers": 2, "sampler": EpochSampler(23), "snapshot_every_n_steps": 3}, id="older sampler"
        ),
        pytest.param(Numbers, {"num_workers": 2, "economic": True}, id="economic"),
    ],
)
def test_state_of_another_batch_size_is_refused_when_batches_would_be_made_again(
    kind: Any, options: dict[str, Any]
) -> None:
    _, state = begun(kind(), 4, batch_size=2, **options)
    refused(state, hr.DataLoader(kind(), batch_size=1, **options))


COUNTED = {"batch_size": 2, "num_workers": 2}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], Any], int | None, bool]] = {
    "force skips states of copies": (lambda: begun(Counted(), 4, **COUNTED)[1], Counted, 1, True),
    "not between two batches": (lambda: begun(Numbers(), 3, batch_size=2)[1], Numbers, 4, False),
    "not between two batches, forced": (lambda: begun(Numbers(), 3, batch_size=2)[1], Numbers, 4, True),
    "out of order": (lambda: {**begun(Numbers(), 2, batch_size=2)[1], "beyond": [[3, 4]]}, Numbers, 4, True),
    "single samples": (lambda: begun(Numbers(), 0, batch_size=None)[1], Numbers, 4, True),
    "single samples of a stream": (lambda: begun(Stream(), 0, batch_size=None)[1], Stream, 4, True),
    "no batches": (lambda: begun(Numbers(), 0, batch_size=4)[1], Numbers, None, True),
    "no batches of a stream": (lambda: begun(Stream(), 0, batch_size=4)[1], Stream, None, True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_of_another_batch_size_is_refused(case: str) -> None:
    make_state, kind, size, force = REFUSED[case]
    refused(make_state(), hr.DataLoader(kind(), batch_size=size), force=force)


class Pairs(BatchSampler):
    """A batch sampler of the user's."""


def test_batch_size_of_a_batch_sampler_counts_when_it_is_given() -> None:
    def make(kind: Any, size: int) -> hr.DataLoader[Any]:
        return hr.DataLoader(Numbers(), batch_sampler=kind(range(23), size, False), collate_fn=identity)

    for kind in (BatchSampler, Pairs):
        iterator = iter(make(kind, 4))
        next(iterator)
        state = iterator.state_dict()
        other = make(kind, 2)
        if kind is Pairs:
            refused(state, other)
        else:
            other.load_state_dict(state)
            assert flat(other) == flat(iterator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Numbers, {}),
        (Numbers, {"num_workers": 2}),
        (Numbers, {"num_workers": 2, "economic": True}),
        (Numbers, {"sampler": EpochSampler(23)}),
        (Counted, {"num_workers": 2}),
        (Stream, {"num_workers": 2}),
        (EpochStream, {"num_workers": 2, "snapshot_every_n_steps": 1}),
    ],
)
def test_epoch_that_follows_may_have_batches_of_another_size(kind: Any, options: dict[str, Any]) -> None:
    def make(size: int) -> hr.DataLoader[Any]:
        return hr.DataLoader(kind(), size, collate_fn=identity, **options)

    with make(4) as first, make(3) as second:
        list(first)
        second.load_state_dict(first.state_dict())
        assert sorted(flat(second)) == sorted(flat(make(3)) if kind is Counted else flat(first))


def test_force_takes_another_batch_size_in_economic_mode() -> None:
    options: dict[str, Any] = {"num_workers": 2, "economic": True, "shuffle": True}
    got, state = begun(Numbers(), 2, batch_size=4, **options)
    with hr.DataLoader(Numbers(), 2, collate_fn=identity, **options) as other:
        other.load_state_dict(state, force=True)
        assert sorted(got + flat(other)) == list(range(23))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"in_order": False}, {"snapshot_every_n_steps": 2}, {"persistent_workers": True}, {"prefetch_factor": 5}],
    ids=lambda changed: next(iter(changed)),
)
@pytest.mark.parametrize("is_changed_back", [False, True])
@pytest.mark.parametrize("kind", [Numbers, Counted, Stream, EpochStream])
def test_samples_come_once_when_an_option_that_makes_none_of_them_changes(
    kind: Any, changed: dict[str, Any], is_changed_back: bool
) -> None:
    saved, loaded = (changed, {}) if is_changed_back else ({}, changed)
    got, state = begun(kind(), 4, batch_size=2, num_workers=2, **saved)
    other = hr.DataLoader(kind(), 2, num_workers=2, collate_fn=identity, **loaded)
    other.load_state_dict(state)
    keys = [sample if isinstance(sample, int) else sample[0] for sample in got + flat(other)]
    assert sorted(keys) == list(range(23))
