"""Generators and samplers of the user when a loader in the torch regime resumes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drop_in.stateful_data import EpochSampler, Numbers, Places, Stream, begun, loader_of, resumed, through_text
from torch.utils.data import RandomSampler

import headrace as hr

KINDS: dict[str, Callable[[Any], hr.DataLoader[Any]]] = {
    "shuffled": lambda generator: hr.DataLoader(Numbers(), 4, shuffle=True, generator=generator),
    "in order": lambda generator: hr.DataLoader(Numbers(), 4, generator=generator),
    "sampler": lambda generator: hr.DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), generator=generator)),
    "economic": lambda generator: hr.DataLoader(
        Numbers(), 4, shuffle=True, generator=generator, num_workers=1, economic=True
    ),
    "stream": lambda generator: hr.DataLoader(Stream(), 4, generator=generator),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("had_one", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_state_is_refused_by_another_use_of_generators(
    kind: Callable[[Any], hr.DataLoader[Any]], had_one: bool, is_finished: bool
) -> None:
    with kind(torch.Generator() if had_one else None) as saved:
        _, state, rest = begun(saved)
        if is_finished:
            list(rest)
            state = through_text(saved.state_dict())
    with kind(None if had_one else torch.Generator()) as loader:
        for force in (False, True):
            with pytest.raises(hr.StateMismatchError, match=r"^generator: ") as told:
                loader.load_state_dict(state, force=force)
            assert told.value.field == "generator"
    with kind(torch.Generator() if had_one else None) as loader:
        loader.load_state_dict(state)


def test_state_is_refused_by_name_when_one_generator_was_for_both_and_now_there_are_two() -> None:
    def make(own: torch.Generator, other: torch.Generator) -> hr.DataLoader[Any]:
        return hr.DataLoader(Numbers(), sampler=RandomSampler(Numbers(), generator=other), generator=own)

    first, second = torch.Generator(), torch.Generator()
    loader = make(first, second)
    loader.load_state_dict(make(first, first).state_dict())
    with pytest.raises(hr.StateMismatchError, match="generator") as told:
        iter(loader)
    assert told.value.field == "generator"


def test_state_of_an_iterator_at_its_end_is_the_same_when_it_is_asked_for_more_in_the_next_epoch() -> None:
    loader = hr.DataLoader(Numbers(), 4, sampler=EpochSampler(23))
    over = iter(loader)
    assert len(list(over)) == 6
    state = over.state_dict()
    next(iter(loader))
    assert next(over, None) is None
    assert over.state_dict()["sampler"] == state["sampler"]


class DrawnPlaces(Places):
    """An iterator with a state, which draws its order at once from torch's global generator. Its state has that."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        self.state: dict[str, Any] = {"at": 0, "order": torch.randperm(count).tolist()}

    def __next__(self) -> Any:
        return self.state["order"][super().__next__()]


class SamplerOfDrawnPlaces(EpochSampler):
    """A sampler whose iterator has a state, and not the sampler itself."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return DrawnPlaces(self.count)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("received", [1, 3])
def test_resumed_sampler_keeps_the_global_generator(received: int, batch_size: int | None, num_workers: int) -> None:
    def make() -> hr.DataLoader[Any]:
        return loader_of(Numbers(), batch_size, sampler=SamplerOfDrawnPlaces(23), num_workers=num_workers)

    for is_asked in (False, True):
        loader = make()
        if is_asked:
            loader.state_dict()
        _, state, rest = begun(loader, received)
        expected = list(rest), list(loader), list(loader)
        torch.manual_seed(977)
        outside = torch.get_rng_state()
        other = resumed(make(), state)
        iterator = iter(other)
        assert torch.equal(torch.get_rng_state(), outside)
        assert (list(iterator), list(other), list(other)) == expected
        assert torch.equal(torch.get_rng_state(), outside)


class EagerEpochSampler(EpochSampler):
    """A sampler that counts its epochs, and draws an order at once from its generator."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.generator = torch.Generator()

    def __iter__(self) -> Any:
        self.turn += 1
        return iter(torch.randperm(self.count, generator=self.generator).tolist())


def test_order_is_still_to_be_drawn_when_the_state_is_that_before_the_first_batch() -> None:
    loader, other = (loader_of(Numbers(), sampler=EagerEpochSampler(23)) for _ in range(2))
    list(loader)
    loader.state_dict()
    _, state, rest = begun(loader, 0)
    expected = list(rest), list(loader)
    torch.manual_seed(977)
    resumed(other, state)
    assert (list(other), list(other)) == expected
