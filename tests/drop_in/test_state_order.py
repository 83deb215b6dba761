"""The order of a resumed loader in the torch regime: samplers, random numbers, batches out of order, economic mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drop_in.classes import ThreadLoader
from drop_in.stateful_data import Numbers, Stream, identity, through_text
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, get_worker_info

import headrace as hr

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def epochs(loader: hr.DataLoader[Any], count: int) -> list[Any]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def shuffled(num_workers: int) -> hr.DataLoader[Any]:
    return hr.DataLoader(Numbers(), 4, shuffle=True, num_workers=num_workers)


@pytest.mark.slow
@WORKERS
def test_epochs_go_on_from_the_global_generator_where_that_was_restored(num_workers: int) -> None:
    def run(loader: hr.DataLoader[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            for batch in loader:
                yield batch.tolist(), torch.rand(1).item()  # a trainer that draws, too

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
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 5
    assert torch.equal(torch.get_rng_state(), before)


@WORKERS
def test_seed_that_the_user_sets_before_each_epoch_counts_after_a_resume(num_workers: int) -> None:
    def epoch(loader: hr.DataLoader[Any], seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return epochs(loader, 1)[0]

    first = shuffled(num_workers)
    torch.manual_seed(1)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    other = shuffled(num_workers)
    other.load_state_dict(state)
    assert epoch(other, 9) == [batch.tolist() for batch in iterator]
    assert [epoch(other, seed) for seed in (2, 3)] == [epoch(first, seed) for seed in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("is_told_by_the_loader", [False, True])
@WORKERS
def test_epoch_that_is_set_after_a_state_was_asked_for_is_the_next_one(
    num_workers: int, is_told_by_the_loader: bool
) -> None:
    def make() -> tuple[Any, hr.DataLoader[Any]]:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=1, rank=0)
        return sampler, hr.DataLoader(Numbers(), 3, sampler=sampler, num_workers=num_workers, collate_fn=identity)

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
        other.load_state_dict(saved)
        assert list(other) == expected


@pytest.mark.slow
def test_epoch_that_is_set_after_a_state_was_asked_for_is_the_next_one_in_economic_mode() -> None:
    options: dict[str, Any] = {"num_workers": 1, "economic": True, "seed": 3, "collate_fn": identity}
    with hr.DataLoader(Drawing(), **options) as loader, hr.DataLoader(Drawing(), **options) as other:
        loader.state_dict()
        loader.set_epoch(5)
        other.set_epoch(5)
        assert list(loader) == list(other)


@pytest.mark.parametrize("is_nested", [False, True])
@WORKERS
def test_samplers_that_know_epochs_are_told_the_one_of_the_state(num_workers: int, is_nested: bool) -> None:
    def make() -> hr.DataLoader[Any]:
        sampler: Any = DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=3)
        given: Any = {"batch_sampler": BatchSampler(sampler, 3, False)} if is_nested else {"sampler": sampler}
        return hr.DataLoader(Numbers(), **given, num_workers=num_workers, collate_fn=identity)

    loader = make()
    loader.set_epoch(5)
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert list(other) == list(iterator)
    assert other.epoch == 5


class Held(Numbers):
    """Its first sample is made when the trainer allows it."""

    def __init__(self, allowed: threading.Event) -> None:
        super().__init__(12)
        self.allowed = allowed

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.allowed.wait(60)
        return index


class HeldStream(IterableDataset[int]):
    """A stream of each worker; that of the first waits until the trainer allows it."""

    def __init__(self, allowed: threading.Event) -> None:
        self.allowed = allowed

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        if worker.id == 0:
            assert self.allowed.wait(60)
        yield from range(10 * worker.id, 10 * worker.id + 6)


@pytest.mark.parametrize("kind", [Held, HeldStream])
def test_nothing_is_lost_or_doubled_when_batches_come_out_of_order(kind: Callable[[threading.Event], Any]) -> None:
    allowed = threading.Event()
    options: dict[str, Any] = {"num_workers": 2, "in_order": False, "batch_size": None}
    loader = ThreadLoader(kind(allowed), **options)
    iterator = iter(loader)
    head = [int(next(iterator)) for _ in range(2)]
    state = through_text(loader.state_dict(batches=2))
    allowed.set()
    rest = [int(batch) for batch in iterator]
    assert 0 in rest
    other = ThreadLoader(kind(allowed), **options)
    other.load_state_dict(state)
    assert sorted(int(batch) for batch in other) == sorted(rest)
    assert len({*head, *rest}) == len(head) + len(rest) == 12


def test_state_stays_small_when_batches_come_out_of_order() -> None:
    allowed = threading.Event()
    dataset = Held(allowed)
    dataset.count = 200
    loader = ThreadLoader(dataset, num_workers=2, in_order=False, batch_size=None)
    iterator = iter(loader)
    head = [int(next(iterator)) for _ in range(150)]
    state = through_text(loader.state_dict())
    assert len(state["beyond"]) <= 4
    assert [number for start, stop in state["beyond"] for number in range(start, stop)] == sorted(head)
    allowed.set()
    rest = [int(batch) for batch in iterator]
    loader.load_state_dict(state)
    assert sorted(int(batch) for batch in loader) == sorted(rest)
    assert sorted(head + rest) == list(range(200))


class Drawing(Numbers):
    """Numbers with random ones."""

    def __getitem__(self, index: int) -> Any:
        return index, hr.rng().random()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 3}, {"persistent_workers": True}, {"workers": "thread"}, {"num_workers": 1}],
    ids=["default", "seed", "persistent", "threads", "another number of workers"],
)
def test_economic_mode_goes_on_with_the_same_samples_and_random_numbers(options: dict[str, Any]) -> None:
    def make(**changed: Any) -> hr.DataLoader[Any]:
        given = {"num_workers": 2, "economic": True, "prefetch_factor": 3, "shuffle": True, "batch_size": 4}
        return hr.DataLoader(Drawing(), **{**given, **changed}, collate_fn=identity)

    with make(**{**options, "num_workers": 2}) as first, make(**options) as second:
        list(first)
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        state = through_text(first.state_dict())
        expected = list(iterator), list(first)
        torch.manual_seed(977)
        second.load_state_dict(state)
        assert (list(second), list(second)) == expected
        state = through_text(first.state_dict())
        expected_next = list(first)
        second.load_state_dict(state)
        assert list(second) == expected_next


def test_economic_mode_counts_batches_that_have_failed() -> None:
    class Failing(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 1:
                raise ValueError("bad sample")
            return index

    options: dict[str, Any] = {"num_workers": 1, "economic": True, "batch_size": None}
    with hr.DataLoader(Failing(), **options) as first, hr.DataLoader(Failing(), **options) as second:
        iterator = iter(first)
        next(iterator)
        with pytest.raises(ValueError, match="bad sample"):
            next(iterator)
        second.load_state_dict(first.state_dict())
        assert [int(batch) for batch in second] == list(range(2, 23))


@WORKERS
def test_async_iteration_counts_as_well(num_workers: int) -> None:
    import asyncio

    loader = hr.DataLoader(Stream(), num_workers=num_workers, collate_fn=identity)

    async def read() -> list[Any]:
        got = []
        async for batch in loader:
            got.append(batch)
            if len(got) == 3:
                break
        return got

    head = asyncio.run(read())
    other = hr.DataLoader(Stream(), num_workers=num_workers, collate_fn=identity)
    other.load_state_dict(loader.state_dict())
    assert head + list(other) == list(hr.DataLoader(Stream(), num_workers=num_workers, collate_fn=identity))
