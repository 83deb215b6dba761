"""The order of a resumed loader in the torch regime: samplers, generators, random numbers, economic mode."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.acting import Acting, raising
from drop_in.stateful_data import (
    EpochSampler,
    Numbers,
    Places,
    Stream,
    begun,
    loader_of,
    refused,
    resumed,
    through_text,
)
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import headrace as hr

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def shuffled(num_workers: int) -> hr.DataLoader[Any]:
    return loader_of(Numbers(), shuffle=True, num_workers=num_workers)


@pytest.mark.slow
@WORKERS
def test_epochs_go_on_from_the_global_generator_where_that_was_restored(num_workers: int) -> None:
    def run(loader: hr.DataLoader[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            for batch in loader:
                yield batch, torch.rand(1).item()  # a trainer that draws, too

    torch.manual_seed(8)
    expected = list(run(shuffled(num_workers), 3))
    torch.manual_seed(8)
    loader = shuffled(num_workers)
    first = run(loader, 3)
    head = [next(first) for _ in range(8)]
    state, of_torch = loader.state_dict(), torch.get_rng_state()
    torch.manual_seed(9)
    other = shuffled(num_workers)
    other.load_state_dict(state)
    torch.set_rng_state(of_torch)
    assert head + list(run(other, 2)) == expected


@WORKERS
def test_saving_and_resuming_leave_the_global_generator_alone(num_workers: int) -> None:
    loader = shuffled(num_workers)
    next(iter(loader))
    before = torch.get_rng_state()
    other = shuffled(num_workers)
    torch.set_rng_state(before)  # where the sampler has drawn, it does not any more
    assert len(list(resumed(other, loader.state_dict()))) == 5
    assert torch.equal(torch.get_rng_state(), before)


@WORKERS
def test_seed_that_the_user_sets_before_each_epoch_counts_after_a_resume(num_workers: int) -> None:
    def epoch(loader: hr.DataLoader[Any], seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return list(loader)

    first = shuffled(num_workers)
    torch.manual_seed(1)
    _, state, rest = begun(first)
    other = resumed(shuffled(num_workers), state)
    assert epoch(other, 9) == list(rest)
    assert [epoch(other, seed) for seed in (2, 3)] == [epoch(first, seed) for seed in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("is_told_by_the_loader", [False, True])
@WORKERS
def test_epoch_set_after_a_state_was_requested_is_the_next_one(num_workers: int, is_told_by_the_loader: bool) -> None:
    def make() -> tuple[Any, hr.DataLoader[Any]]:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=1, rank=0)
        return sampler, loader_of(Numbers(), 3, sampler=sampler, num_workers=num_workers)

    sampler, loader = make()
    early = loader.state_dict()
    (loader if is_told_by_the_loader else sampler).set_epoch(5)
    state = loader.state_dict()
    got = list(loader)
    sampler, other = make()
    whole = list(other)
    sampler.set_epoch(5)
    assert got == list(other) != whole
    assert (early["epoch"], state["epoch"]) == (0, 5)
    for saved, expected in ((early, whole), (state, got)):
        assert list(resumed(other, saved)) == expected


@pytest.mark.slow
def test_epoch_that_is_set_after_a_state_was_asked_for_is_the_next_one_in_economic_mode() -> None:
    options: dict[str, Any] = {"num_workers": 1, "economic": True, "seed": 3}
    with loader_of(Drawing(), **options) as loader, loader_of(Drawing(), **options) as other:
        loader.state_dict()
        loader.set_epoch(5)
        other.set_epoch(5)
        assert list(loader) == list(other)


@pytest.mark.parametrize("is_nested", [False, True])
@WORKERS
def test_samplers_that_know_epochs_are_told_the_one_of_the_state(num_workers: int, is_nested: bool) -> None:
    def make() -> hr.DataLoader[Any]:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=3)
        if is_nested:
            return loader_of(Numbers(), 1, batch_sampler=BatchSampler(sampler, 3, False), num_workers=num_workers)
        return loader_of(Numbers(), 1, sampler=sampler, num_workers=num_workers)

    loader = make()
    loader.set_epoch(5)
    _, state, rest = begun(loader)
    other = resumed(make(), state)
    assert list(other) == list(rest)
    assert other.epoch == 5


class Drawing(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, hr.rng().random(), torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


class DrawingOwn(Drawing):
    """Global generators are not a sample's own in threads."""

    def __getitem__(self, index: int) -> Any:
        return index, hr.rng().random()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 3},
        {"persistent_workers": True},
        {"workers": "thread"},
        {"num_workers": 1},
        {"num_batch_workers": 2},
    ],
    ids=["default", "seed", "persistent", "threads", "another number of workers", "number of batch workers"],
)
def test_economic_mode_goes_on_with_the_same_samples_and_random_numbers(options: dict[str, Any]) -> None:
    def make(**changed: Any) -> hr.DataLoader[Any]:
        data = DrawingOwn() if "workers" in options else Drawing()
        return loader_of(data, **{"num_workers": 2, "economic": True, "prefetch_factor": 3, "shuffle": True, **changed})

    with make(**{**options, "num_workers": 2, "num_batch_workers": None}) as first, make(**options) as second:
        list(first)
        _, state, rest = begun(first, 3)
        expected = list(rest), list(first)
        torch.manual_seed(977)
        resumed(second, state)
        assert (list(second), list(second)) == expected
        state = through_text(first.state_dict())
        assert list(first) == list(resumed(second, state))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_go_on_without_workers_and_are_those_of_the_begin_with_them(num_workers: int) -> None:
    """Without workers the user restores the generators."""

    def make() -> hr.DataLoader[Any]:
        return loader_of(Drawing(), 2, num_workers=num_workers, generator=torch.Generator())

    def drawn(batches: list[Any]) -> list[Any]:
        return [[sample[2:] for sample in batch] for batch in batches]

    loader, other = make(), make()
    head, state, rest = begun(loader, 3)
    outside = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    whole, after = head + list(rest), list(loader)
    torch.manual_seed(977)
    resumed(other, state)
    torch.set_rng_state(outside[0])
    np.random.set_state(outside[1])  # noqa: NPY002
    random.setstate(outside[2])
    got = list(other)
    assert [[sample[0] for sample in batch] for batch in got] == [
        [sample[0] for sample in batch] for batch in whole[3:]
    ]
    same = drawn(whole)[3:] if num_workers == 0 else drawn(whole)[: len(got) - 1]
    assert drawn(got)[: len(same)] == same
    assert drawn(list(other)) == drawn(after)


def test_economic_mode_counts_batches_that_have_failed() -> None:
    options: dict[str, Any] = {"num_workers": 1, "economic": True, "batch_size": None}
    data = Acting(raising(lambda: ValueError("bad sample")), at=(1,))
    with hr.DataLoader(data, **options) as first, hr.DataLoader(data, **options) as second:
        iterator = iter(first)
        next(iterator)
        with pytest.raises(ValueError, match="bad sample"):
            next(iterator)
        assert list(resumed(second, first.state_dict())) == list(range(2, 20))


@WORKERS
def test_async_iteration_counts_as_well(num_workers: int) -> None:
    loader, other, whole = (loader_of(Stream(), 1, num_workers=num_workers) for _ in range(3))

    async def read() -> list[Any]:
        iterator = aiter(loader)
        return [await anext(iterator) for _ in range(3)]

    head = asyncio.run(read())
    assert head + list(resumed(other, loader.state_dict())) == list(whole)


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
            refused(loader, state, "^generator: ", "generator", force=force)
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
