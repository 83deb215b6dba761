"""Loaders in the torch regime that resume with other options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.loops import flat
from drop_in.stateful_data import (
    Counted,
    EpochSampler,
    EpochStream,
    Numbers,
    Stream,
    begun,
    loader_of,
    refused,
    resumed,
    through_text,
)
from torch.utils.data import BatchSampler

import headrace as hr

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
BATCH_SIZE = "^batch_size: ", "batch_size"


def state_after(dataset: Any, batches: int, **options: Any) -> dict[str, Any]:
    return begun(loader_of(dataset, **options), batches)[1]


def keys(batches: Any) -> list[int]:
    return [sample if isinstance(sample, int) else sample[0] for sample in flat(batches)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2, 7), (4, 12, 3), (2, 4, 5)])
@pytest.mark.parametrize("sampler", [lambda: None, lambda: EpochSampler(60)], ids=["torch's", "stateful"])
@pytest.mark.parametrize("kind", [Numbers, Counted])
@WORKERS
def test_samples_come_once_when_batch_sizes_change(
    num_workers: int, kind: Any, sampler: Callable[[], Any], sizes: tuple[int, ...]
) -> None:
    def make(size: int) -> hr.DataLoader[Any]:
        drawn = sampler()
        options: dict[str, Any] = {"num_workers": num_workers, "snapshot_every_n_steps": 1}
        return loader_of(kind(60), size, shuffle=drawn is None, sampler=drawn, **options)

    torch.manual_seed(7)
    whole = make(4)
    expected = [keys(whole) for _ in range(2)]
    torch.manual_seed(7)
    state: dict[str, Any] = {}
    got = []
    for size, batches in zip(sizes, (6, 2, None), strict=True):
        loader = resumed(make(size), state)
        iterator = iter(loader)
        got += keys(iterator if batches is None else [next(iterator) for _ in range(batches)])
        state = through_text(loader.state_dict())
    assert [got, keys(loader)] == expected


@WORKERS
def test_states_of_copies_belong_to_their_batches_when_the_batch_size_has_changed(num_workers: int) -> None:
    def make(size: int, every: int) -> hr.DataLoader[Any]:
        return loader_of(Counted(40), size, num_workers=num_workers, snapshot_every_n_steps=every)

    _, state, _ = begun(make(4, 1), 3)
    _, state, rest = begun(resumed(make(2, 3), state), 5)
    assert sum(known["batches"] for known in state["copies"]) == state["due"] == 11
    assert list(resumed(make(2, 3), state)) == list(rest)


WITH_WORKERS = {"batch_size": 2, "num_workers": 2}
KEPT_SELDOM = {**WITH_WORKERS, "snapshot_every_n_steps": 3}
ECONOMIC = {**WITH_WORKERS, "economic": True}
# The data and options of the saved loader, batches before the state, options of the resumed loader, and force.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], int, dict[str, Any], bool]] = {
    "stream without a state": (Stream, {"batch_size": 2}, 4, {}, False),
    "stream without a state, workers": (Stream, WITH_WORKERS, 4, {}, False),
    "stream whose state is older": (EpochStream, WITH_WORKERS, 4, {}, False),
    "copies whose states are older": (Counted, WITH_WORKERS, 4, {}, False),
    "copies whose states are not kept": (Counted, {**WITH_WORKERS, "snapshot_every_n_steps": 0}, 4, {}, False),
    "older sampler": (Numbers, {**KEPT_SELDOM, "sampler": EpochSampler(23)}, 4, {}, False),
    "economic": (Numbers, ECONOMIC, 4, {}, False),
    "force skips states of copies": (Counted, WITH_WORKERS, 4, {"num_workers": 0}, True),
    "not between two batches": (Numbers, {"batch_size": 2}, 3, {"batch_size": 4}, False),
    "not between two batches, forced": (Numbers, {"batch_size": 2}, 3, {"batch_size": 4}, True),
    "single samples": (Numbers, {"batch_size": None}, 0, {"batch_size": 4}, True),
    "single samples of a stream": (Stream, {"batch_size": None}, 0, {"batch_size": 4}, True),
    "no batches": (Numbers, {"batch_size": 4}, 0, {"batch_size": None}, True),
    "no batches of a stream": (Stream, {"batch_size": 4}, 0, {"batch_size": None}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_state_of_another_batch_size_is_refused_when_batches_would_be_made_again(case: str) -> None:
    kind, saved, batches, loaded, force = REFUSED[case]
    state = state_after(kind(), batches, **saved)
    refused(loader_of(kind(), **{**saved, "batch_size": 1, **loaded}), state, *BATCH_SIZE, force=force)


def test_state_of_another_batch_size_is_refused_when_batches_came_out_of_order() -> None:
    state = {**state_after(Numbers(), 2, batch_size=2), "beyond": [[3, 4]]}
    refused(loader_of(Numbers()), state, *BATCH_SIZE, force=True)


class Pairs(BatchSampler):
    """A batch sampler of the user's."""


@pytest.mark.parametrize("kind", [BatchSampler, Pairs])
def test_batch_size_of_a_batch_sampler_counts_when_it_is_torchs(kind: type[BatchSampler]) -> None:
    def make(size: int) -> hr.DataLoader[Any]:
        return loader_of(Numbers(), 1, batch_sampler=kind(range(23), size, False))

    _, state, rest = begun(make(4))
    if kind is Pairs:
        refused(make(2), state, *BATCH_SIZE)
    else:
        assert flat(resumed(make(2), state)) == flat(rest)


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
    with loader_of(kind(), **options) as first, loader_of(kind(), 3, **options) as second:
        list(first)
        got = flat(resumed(second, first.state_dict()))
        assert sorted(got) == sorted(flat(loader_of(kind(), 3, **options) if kind is Counted else first))


def test_force_takes_another_batch_size_in_economic_mode() -> None:
    options: dict[str, Any] = {"num_workers": 2, "economic": True, "shuffle": True}
    with loader_of(Numbers(), **options) as loader, loader_of(Numbers(), 2, **options) as other:
        got, state, _ = begun(loader, 2)
        assert sorted(flat(got) + flat(resumed(other, state, force=True))) == list(range(23))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"in_order": False}, {"snapshot_every_n_steps": 2}, {"persistent_workers": True}, {"prefetch_factor": 5}],
    ids=lambda changed: next(iter(changed)),
)
@pytest.mark.parametrize("is_changed_back", [False, True])
@pytest.mark.parametrize("kind", [Numbers, Counted, Stream, EpochStream])
def test_samples_come_once_when_options_change(kind: Any, changed: dict[str, Any], is_changed_back: bool) -> None:
    saved, loaded = (changed, {}) if is_changed_back else ({}, changed)
    got, state, _ = begun(loader_of(kind(), 2, num_workers=2, **saved), 4)
    other = resumed(loader_of(kind(), 2, num_workers=2, **loaded), state)
    assert sorted(keys(got) + keys(other)) == list(range(23))
