"""Loaders in the torch regime save their state, and others go on from it."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drop_in.classes import ThreadLoader
from drop_in.stateful_data import (
    Counted,
    EpochStream,
    Numbers,
    Stream,
    StreamOfPlaces,
    identity,
    rest_of,
    through_text,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

KINDS: list[Callable[[], Any]] = [Numbers, Counted, Stream, EpochStream, StreamOfPlaces]
Make = Callable[..., hr.DataLoader[Any]]


@pytest.fixture
def make(our_class: type[hr.DataLoader[Any]]) -> Make:
    def make(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
        return our_class(dataset, **{"collate_fn": identity, "batch_size": 4, **options})

    return make


def assert_goes_on(make: Callable[[], Any], data: Any) -> None:
    """A loader that is left anywhere gives the rest, and the next epoch."""
    count = len(list(make()))
    stop = data.draw(st.integers(0, count))
    got, expected = rest_of(make(), stop, make)
    assert got == expected
    assert len(got[0]) == count - stop


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(data=st.data())
def test_resumed_loader_gives_the_rest_and_the_next_epoch_with_workers(kind: Callable[[], Any], data: Any) -> None:
    is_map = issubclass(kind, Numbers)
    options: dict[str, Any] = {
        "batch_size": data.draw(st.sampled_from([None, 1, 4])),
        "num_workers": data.draw(st.sampled_from([1, 3])),
        "snapshot_every_n_steps": data.draw(st.sampled_from([0, 1, 2, 5])),
        "persistent_workers": data.draw(st.booleans()),
        "shuffle": is_map and data.draw(st.booleans()),
        "drop_last": False,
        "collate_fn": identity,
    }
    assert_goes_on(lambda: hr.DataLoader(kind(), **options), data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_resumed_loader_gives_the_rest_and_the_next_epoch_without_workers(kind: Callable[[], Any], data: Any) -> None:
    is_map = issubclass(kind, Numbers)
    options: dict[str, Any] = {
        "batch_size": data.draw(st.sampled_from([None, 1, 4, 23])),
        "snapshot_every_n_steps": data.draw(st.sampled_from([0, 1, 2, 5])),
        "shuffle": is_map and data.draw(st.booleans()),
        "collate_fn": identity,
    }
    assert_goes_on(lambda: hr.DataLoader(kind(), **options), data)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_loader_gives_the_rest_when_workers_are_threads(kind: Callable[[], Any]) -> None:
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 2, "collate_fn": identity, "persistent_workers": True}
    got, expected = rest_of(ThreadLoader(kind(), **options), 3, lambda: ThreadLoader(kind(), **options))
    assert got == expected


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("kind", [Counted, EpochStream])
def test_state_is_right_when_a_resumed_loader_is_asked_soon(make: Make, kind: Callable[[], Any], every: int) -> None:
    options = {"num_workers": 2, "snapshot_every_n_steps": every, "batch_size": 1}
    first = make(kind(), **options)
    iterator = iter(first)
    for _ in range(7):
        next(iterator)
    second = make(kind(), **options)
    second.load_state_dict(first.state_dict())
    resumed = iter(second)
    assert next(resumed) == next(iterator)
    third = make(kind(), **options)
    third.load_state_dict(second.state_dict())
    assert list(third) == list(iterator) == list(resumed)


def test_earlier_state_does_not_change_when_iteration_goes_on(make: Make) -> None:
    loader = make(StreamOfPlaces(), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    list(iterator)
    assert state == before
    assert loader.state_dict() != before


def test_loading_a_state_keeps_a_copy_of_it(make: Make) -> None:
    loader = make(Numbers())
    next(iter(loader))
    state = loader.state_dict()
    other = make(Numbers())
    other.load_state_dict(state)
    state["due"] = 4
    assert next(iter(other)) == [4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_before_iter_is_that_of_the_next_iterator(make: Make, num_workers: int) -> None:
    loader = make(Numbers(), shuffle=True, num_workers=num_workers)
    torch.manual_seed(1)
    state = loader.state_dict()
    epochs = list(loader), list(loader)
    torch.manual_seed(1)
    assert (list(loader), list(loader)) == epochs  # it has drawn what two iterators draw, and not three
    torch.manual_seed(2)
    loader.load_state_dict(state)
    assert (list(loader), list(loader)) == epochs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_after_load_is_what_was_loaded(make: Make, num_workers: int) -> None:
    loader = make(EpochStream(), num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = make(EpochStream(), num_workers=num_workers)
    other.load_state_dict(state)
    assert other.state_dict() == state
    resumed = iter(other)
    assert other.state_dict() == state
    assert list(resumed) == list(iterator)


def test_empty_state_begins_anew(make: Make) -> None:
    loader = make(Numbers())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict({})
    assert len(list(loader)) == 6


def test_load_lets_go_of_persistent_workers_and_their_copies(make: Make) -> None:
    loader = make(EpochStream(), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    state = loader.state_dict()
    whole = list(iterator)
    next(iter(loader))
    loader.load_state_dict(state)
    assert iter(loader) is not iterator
    loader.load_state_dict(state)
    assert list(loader) == whole


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_state_after_the_last_batch_gives_nothing_and_then_an_epoch(
    make: Make, kind: Callable[[], Any], num_workers: int
) -> None:
    loader = make(kind(), num_workers=num_workers)
    state = {}
    for _ in loader:
        state = loader.state_dict()
    after = loader.state_dict()
    count = len(list(loader))
    other = make(kind(), num_workers=num_workers)
    other.load_state_dict(through_text(state))
    assert [len(list(other)), len(list(other))] == [0, count]
    other.load_state_dict(through_text(after))
    assert len(list(other)) == count


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 4])
@pytest.mark.parametrize("kind", [Counted, EpochStream, StreamOfPlaces])
def test_copies_of_persistent_workers_go_on_into_the_next_epoch(
    make: Make, kind: Callable[[], Any], every: int
) -> None:
    options = {"num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": every}
    loader = make(kind(), **options)
    list(loader)
    state = loader.state_dict()
    expected = list(loader), list(loader)
    other = make(kind(), **options)
    other.load_state_dict(through_text(state))
    assert (list(other), list(other)) == expected


def test_state_of_a_loop_that_was_left_is_there(make: Make) -> None:
    loader = make(Counted(), num_workers=2)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    other = make(Counted(), num_workers=2)
    other.load_state_dict(state)
    assert list(itertools.islice(loader, 3, None)) == list(other)


def test_iterator_has_its_own_state_and_the_loader_that_of_the_newest(make: Make) -> None:
    loader = make(Numbers(), num_workers=1)
    first, second = iter(loader), iter(loader)
    next(first)
    assert (first.state_dict()["batches"], second.state_dict()["batches"]) == (1, 0)
    assert loader.state_dict() == second.state_dict()
    loader.load_state_dict(first.state_dict())
    assert list(loader) == list(first)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
def test_state_after_an_earlier_batch_is_there_for_the_last_three(
    make: Make, kind: Callable[[], Any], num_workers: int
) -> None:
    loader = make(kind(40), num_workers=num_workers)
    batches = list(make(kind(40), num_workers=num_workers))
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    for number in (4, 5, 6):
        other = make(kind(40), num_workers=num_workers)
        other.load_state_dict(loader.state_dict(batches=number))
        assert list(other) == batches[number:]
    for number in (3, 7):
        with pytest.raises(hr.OptionError, match=f"batches={number}.*4, 5, 6"):
            loader.state_dict(batches=number)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_after_a_number_of_batches_is_not_at_the_end_when_a_wrapper_is(make: Make, num_workers: int) -> None:
    loader = make(Numbers(), num_workers=num_workers, shuffle=True)
    batches = list(loader)
    other = make(Numbers(), num_workers=num_workers, shuffle=True)
    other.load_state_dict(loader.state_dict(batches=len(batches) - 1))
    assert list(other) == batches[-1:]
    other.load_state_dict(loader.state_dict(batches=len(batches)))
    assert list(other) == []


def test_data_set_without_state_is_read_again_and_that_is_logged_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(Stream(), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(2):
            loader.load_state_dict(state)
            list(loader)
    assert [record.name for record in caplog.records] == ["headrace"]
    assert "1 batches are read once more" in caplog.text


def test_state_says_what_it_is_and_is_text_where_the_users_states_are(make: Make) -> None:
    loader = make(Counted(), shuffle=True, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    assert (state["version"], state["regime"], state["num_workers"]) == (1, "torch", 2)
    assert through_text(state) == state
