"""Loaders in the torch regime save their state, and others resume from it."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drop_in.stateful_data import (
    Batches,
    Counted,
    CountedInBulk,
    DrawingSampler,
    EagerSampler,
    EpochSampler,
    EpochStream,
    LateSampler,
    Numbers,
    SamplerOfPlaces,
    Stream,
    StreamOfPlaces,
    begun,
    identity,
    loader_of,
    resumed,
    through_text,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

import headrace as hr

KINDS: list[Callable[[], Any]] = [Numbers, Counted, CountedInBulk, Stream, EpochStream, StreamOfPlaces]
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled by a generator": lambda: {"shuffle": True, "generator": torch.Generator()},
    "stateful": lambda: {"sampler": EpochSampler(23)},
    "stateful, no batches": lambda: {"sampler": EpochSampler(23), "batch_size": None},
    "stateful iterator": lambda: {"sampler": SamplerOfPlaces(23)},
    "drawing": lambda: {"sampler": DrawingSampler(23)},
    "eager": lambda: {"sampler": EagerSampler(23)},
    "eager, no batches": lambda: {"sampler": EagerSampler(23), "batch_size": None},
    "makes its generator": lambda: {"sampler": LateSampler(range(23))},
    "random": lambda: {"sampler": RandomSampler(range(23))},
    "with replacement": lambda: {"sampler": RandomSampler(range(23), True, 50)},
    "with replacement, by a generator": lambda: {"sampler": RandomSampler(range(23), True, 50, torch.Generator())},
    "stateful batches": lambda: {"batch_sampler": Batches(23), "batch_size": 1},
    "torch's batches": lambda: {"batch_sampler": BatchSampler(EpochSampler(23), 4, True), "batch_size": 1},
    "no sampler at all": lambda: {"sampler": range(22, -1, -1)},
}
Make = Callable[..., hr.DataLoader[Any]]
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
EVERY = [None, 0, 1, 2, 5]


@pytest.fixture
def make(our_class: type[hr.DataLoader[Any]]) -> Make:
    def make(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
        return our_class(dataset, **{"collate_fn": identity, "batch_size": 4, **options})

    return make


def drawn(data: Any, **choices: Any) -> dict[str, Any]:
    return {name: data.draw(st.sampled_from(values)) for name, values in choices.items()}


def assert_goes_on(make: Callable[[], Any], data: Any) -> None:
    """Loaders that are left anywhere, each going on from the state of the one before, give what one loader gives."""
    torch.manual_seed(3)
    with make() as loader:
        whole = [list(loader) for _ in range(2)]
    stops = data.draw(st.lists(st.integers(0, len(whole[0])), min_size=1, max_size=2))
    torch.manual_seed(3)
    got: list[list[Any]] = [[]]
    state: dict[str, Any] = {}
    for stop in [*stops, None]:
        with make() as loader:
            loader.load_state_dict(state)
            while len(got) <= 2 and stop != 0:
                for batch in loader:
                    got[-1].append(batch)
                    stop = None if stop is None else stop - 1
                    if stop == 0:
                        break
                else:
                    got.append([])
            state = through_text(loader.state_dict())
        torch.manual_seed(977)  # what a new process begins with is another place
    assert got == [*whole, []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_resumed_loaders_give_what_one_gives_with_workers(kind: Callable[[], Any], data: Any) -> None:
    options = drawn(
        data,
        batch_size=[None, 1, 4],
        num_workers=[1, 3],
        snapshot_every_n_steps=EVERY,
        persistent_workers=[False, True],
        shuffle=[False, issubclass(kind, Numbers)],
        workers=["process", "thread"],
    )
    assert_goes_on(lambda: loader_of(kind(), **options), data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_resumed_loaders_give_what_one_gives_without_workers(kind: Callable[[], Any], data: Any) -> None:
    shuffle = [False, issubclass(kind, Numbers)]
    options = drawn(data, batch_size=[None, 1, 4, 23], snapshot_every_n_steps=EVERY, shuffle=shuffle)
    assert_goes_on(lambda: loader_of(kind(), **options), data)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=3)
@given(data=st.data())
def test_resumed_loaders_give_what_one_gives_for_every_sampler(sampler: str, data: Any) -> None:
    kind = data.draw(st.sampled_from([Numbers, Counted]))
    options = drawn(data, num_workers=[0, 2], snapshot_every_n_steps=[None, 1, 3])
    assert_goes_on(lambda: loader_of(kind(), **options | SAMPLERS[sampler]()), data)


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
    _, state, _ = begun(make(Numbers()))
    other = resumed(make(Numbers()), state)
    state["due"] = 4
    assert next(iter(other)) == [4, 5, 6, 7]


@pytest.mark.slow
@WORKERS
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


@WORKERS
def test_state_after_load_is_what_was_loaded(make: Make, num_workers: int) -> None:
    _, state, rest = begun(make(EpochStream(), num_workers=num_workers))
    other = resumed(make(EpochStream(), num_workers=num_workers), state)
    assert other.state_dict() == state
    iterator = iter(other)
    assert other.state_dict() == state
    assert list(iterator) == list(rest)


def test_empty_state_begins_anew(make: Make) -> None:
    loader = make(Numbers())
    _, state, _ = begun(loader)
    assert len(list(resumed(resumed(loader, state), {}))) == 6


def test_load_lets_go_of_persistent_workers_and_their_copies(make: Make) -> None:
    loader = make(EpochStream(), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    state = loader.state_dict()
    whole = list(iterator)
    next(iter(loader))
    assert iter(resumed(loader, state)) is not iterator
    assert list(resumed(loader, state)) == whole


def test_iterator_has_its_own_state_and_the_loader_that_of_the_newest(make: Make) -> None:
    loader = make(Numbers(), num_workers=1)
    first, second = iter(loader), iter(loader)
    next(first)
    assert (first.state_dict()["batches"], second.state_dict()["batches"]) == (1, 0)
    assert loader.state_dict() == second.state_dict()
    assert list(resumed(loader, first.state_dict())) == list(first)


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
def test_states_of_the_last_three_batches_are_known(make: Make, kind: Callable[[int], Any], num_workers: int) -> None:
    loader, *others = (make(kind(40), num_workers=num_workers) for _ in range(5))
    batches = list(others.pop())
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    for number, other in zip((4, 5, 6), others, strict=True):
        assert list(resumed(other, loader.state_dict(batches=number))) == batches[number:]
    for number in (3, 7):
        with pytest.raises(hr.OptionError, match=f"batches={number}.*4, 5, 6"):
            loader.state_dict(batches=number)


@WORKERS
def test_state_after_a_number_of_batches_is_not_at_the_end_when_a_wrapper_is(make: Make, num_workers: int) -> None:
    loader, other = (make(Numbers(), num_workers=num_workers, shuffle=True) for _ in range(2))
    batches = list(loader)
    for left in (1, 0):
        state = loader.state_dict(batches=len(batches) - left)
        assert list(resumed(other, state)) == batches[len(batches) - left :]


def test_data_set_without_state_is_read_again_with_one_log_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    loader = make(Stream(), num_workers=2)
    _, state, _ = begun(loader)
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(2):
            list(resumed(loader, state))
    assert [record.name for record in caplog.records] == ["headrace"]
    assert "1 batches are read once more" in caplog.text


def test_state_says_what_it_is_and_is_text_where_the_users_states_are(make: Make) -> None:
    loader = make(Counted(), shuffle=True, num_workers=2)
    _, text, _ = begun(loader)
    assert (text["version"], text["regime"], text["num_workers"]) == (2, "torch", 2)
    assert text == loader.state_dict()
