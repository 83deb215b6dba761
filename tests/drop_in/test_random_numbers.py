"""A run with a fixed seed gives the same batches with either loader, and leaves the same random states behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
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
