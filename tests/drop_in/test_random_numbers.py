"""A run with a fixed seed gives the same batches with either loader, and leaves the same random states behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.classes import in_processes
from drop_in.reading import plain
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

import headrace as hr

LENGTH = 37
SEED = 20_260

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Augmented(Dataset[Any]):
    """Samples that draw from each of the three global generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.randn(3),
            "numpy": np.random.rand(2),  # noqa: NPY002 (users' data sets do)
            "python": random.random(),
        }


class AugmentedStream(IterableDataset[Any]):
    """Shares its numbers out among the workers, and draws as `Augmented` does."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, LENGTH, step):
            yield Augmented()[index]


class Drawing(Sampler[int]):
    """Draws each index from the global generator at the moment it is asked for it."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))


def seed_all() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002


def states(generator: torch.Generator | None) -> list[Any]:
    """All random state of this process that a loader might touch."""
    numpy = np.random.get_state()  # noqa: NPY002
    own = None if generator is None else generator.get_state().tolist()
    return [torch.get_rng_state().tolist(), random.getstate(), plain(numpy), own]


def transcript(
    loader_class: type[Any],
    make_dataset: Callable[[], Any],
    make_options: Callable[[torch.Generator | None], dict[str, Any]],
    *,
    with_generator: bool = False,
    between: Callable[[], Any] = lambda: None,
    epochs: int = 3,
    batches: int | None = None,
) -> list[Any]:
    """Everything that a trainer sees of some epochs: batches, its own draws between them, random states."""
    seed_all()
    generator = torch.Generator().manual_seed(SEED + 1) if with_generator else None
    loader = loader_class(make_dataset(), generator=generator, **make_options(generator))
    seen: list[Any] = [states(generator)]
    for _ in range(epochs):
        iterator = iter(loader)
        seen.append(states(generator))
        for number, batch in enumerate(iterator):
            seen += [plain(batch), plain(between())]
            if number + 1 == batches:
                break
        del iterator
        seen.append(states(generator))
    return seen


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}
Case = tuple[Callable[[], Any], Callable[[torch.Generator | None], dict[str, Any]], dict[str, Any]]
CASES: dict[str, Case] = {
    "sequential": (Augmented, lambda _: {"batch_size": 5}, {}),
    "shuffled": (Augmented, lambda _: {"batch_size": 5, "shuffle": True}, {}),
    "own generator": (Augmented, lambda _: {"batch_size": 5, "shuffle": True}, {"with_generator": True}),
    "replacement": (
        Augmented,
        lambda own: {"sampler": RandomSampler(Augmented(), replacement=True, num_samples=50, generator=own)},
        {"with_generator": True},
    ),
    "iterable": (AugmentedStream, lambda _: {"batch_size": 4, "drop_last": True}, {"with_generator": True}),
    "single samples": (Augmented, lambda _: {"batch_size": None, "shuffle": True}, {}),
    # What was asked of workers before the break has advanced their generators: all of it, whatever their pace.
    "left early": (Augmented, lambda _: {"batch_size": 4, "shuffle": True}, {"batches": 3}),
    "drawn by the trainer, too": (
        Augmented,
        lambda _: {"batch_size": 4, "sampler": Drawing()},
        {"between": lambda: torch.rand(2), "batches": 3},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_batches_and_random_states_are_torchs_for_three_epochs(case: str, workers: str) -> None:
    make_dataset, make_options, more = CASES[case]
    torchs, ours = (
        transcript(kind, make_dataset, lambda own: {**make_options(own), **WORKERS[workers]}, **more)
        for kind in (torch.utils.data.DataLoader, hr.DataLoader)
    )
    assert ours == torchs


def int64(generator: torch.Generator | None = None) -> int:
    """The draw that torch makes for a base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class Seeds(Dataset[Any]):
    """What a worker was seeded with, looked at before anything is drawn from it."""

    def __init__(self) -> None:
        self.first: list[Any] | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Any]:
        worker = get_worker_info()
        if self.first is None:
            self.first = [random.getstate(), plain(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002
        return [None if worker is None else (worker.id, worker.seed), torch.initial_seed(), *self.first]


def as_is(samples: list[Any]) -> list[Any]:
    return samples


def test_shuffle_is_drawn_in_the_first_next_when_there_are_no_workers(loader_class: type[Any]) -> None:
    torch.manual_seed(SEED)
    int64()
    after_base_seed = torch.get_rng_state()
    int64()
    after_shuffle = torch.get_rng_state()

    torch.manual_seed(SEED)
    iterator = iter(loader_class(range(20), batch_size=4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), after_base_seed)
    next(iterator)
    assert torch.equal(torch.get_rng_state(), after_shuffle)


def test_shuffle_is_drawn_in_iter_when_there_are_workers(loader_class: type[Any]) -> None:
    torch.manual_seed(SEED)
    int64()
    int64()
    after_shuffle = torch.get_rng_state()

    torch.manual_seed(SEED)
    iterator = iter(loader_class(range(20), batch_size=4, shuffle=True, num_workers=1))
    assert torch.equal(torch.get_rng_state(), after_shuffle)
    next(iterator)
    assert torch.equal(torch.get_rng_state(), after_shuffle)


@in_processes
def test_workers_seed_is_base_seed_plus_number_for_all_three_generators(loader_class: type[Any]) -> None:
    torch.manual_seed(SEED)
    base = int64()
    torch.manual_seed(SEED)
    loader = loader_class(Seeds(), batch_size=1, num_workers=2, collate_fn=as_is)
    for number, [(who, initial, python, numpy, of_torch)] in enumerate(loader):
        seed = base + number % 2
        words = np.random.SeedSequence([number % 2, base & 0xFFFFFFFF, base >> 32, 0]).generate_state(4)
        assert who == (number % 2, seed)
        assert initial == seed
        assert python == random.Random(seed).getstate()
        assert numpy == plain(np.random.RandomState(words).get_state())
        assert of_torch == torch.Generator().manual_seed(seed).get_state().tolist()


def test_worker_seeds_stay_the_same_when_persistent_workers_begin_anew(loader_class: type[Any]) -> None:
    loader = loader_class(Seeds(), batch_size=1, num_workers=2, persistent_workers=True, collate_fn=as_is)
    first, second = ([batch[0][0] for batch in loader] for _ in range(2))
    assert first == second
    assert len({seed for _, seed in first}) == 2


@in_processes
def test_init_function_finds_the_generators_seeded_and_may_seed_them_itself(loader_class: type[Any]) -> None:
    def init(worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None and torch.initial_seed() == worker.seed
        torch.manual_seed(1000 + worker_id)

    loader = loader_class(Seeds(), batch_size=1, num_workers=2, collate_fn=as_is, worker_init_fn=init)
    assert [batch[0][1] for batch in loader] == [1000, 1001] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_replacement_is_drawn_in_chunks_of_32(loader_class: type[Any], num_workers: int) -> None:
    seed_all()
    int64()
    chunks = torch.Generator().manual_seed(int64())
    expected = [torch.randint(9, (n,), generator=chunks) for n in (32, 32, 6)]

    seed_all()
    sampler = RandomSampler(range(9), replacement=True, num_samples=70)
    loader = loader_class(range(9), batch_size=7, sampler=sampler, num_workers=num_workers)
    assert torch.equal(torch.cat(list(loader)), torch.cat(expected))


def test_draws_in_the_data_set_are_the_trainers_own_when_there_are_no_workers(loader_class: type[Any]) -> None:
    seed_all()
    batches = [batch["torch"] for batch in loader_class(Augmented(), batch_size=1)]
    seed_all()
    int64()
    assert all(torch.equal(batch[0], torch.randn(3)) for batch in batches)
    assert len(batches) == LENGTH
