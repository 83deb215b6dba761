"""Data sets and samplers with states, and without; and how a loader over them is saved and made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drop_in.acting import Made
from torch.utils.data import IterableDataset, RandomSampler, Sampler, get_worker_info

import headrace as hr


def identity(samples: Any) -> Any:
    return samples


class Numbers(Made):
    def __init__(self, count: int = 23) -> None:
        super().__init__(int, count)


class Counted(Numbers):
    """Each number with the count of samples that this copy has given, which is its state."""

    given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return index, self.given

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class CountedInBulk(Counted):
    """Whole batches at once; with each, how many batches this copy has given."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(index, self.given) for index in indices] if self[0] else []


def shard(count: int) -> range:
    worker = get_worker_info()
    number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
    bounds = [count * k * k // workers**2 for k in range(workers + 1)]
    return range(bounds[number], bounds[number + 1])


class Stream(IterableDataset[int]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from shard(self.count)


class EpochStream(Stream):
    """Numbers with the number of the epoch; a generator, whose data set keeps the state."""

    at, epoch = 0, 0

    def __iter__(self) -> Iterator[Any]:
        mine = shard(self.count)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1], self.epoch
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Places:
    def __init__(self, values: Any) -> None:
        self.values, self.state = values, {"at": 0}

    def __iter__(self) -> Places:
        return self

    def __next__(self) -> Any:
        if self.state["at"] >= len(self.values):
            raise StopIteration
        self.state["at"] += 1
        return self.values[self.state["at"] - 1]

    def state_dict(self) -> dict[str, Any]:
        return self.state  # the object itself, which changes later

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class StreamOfPlaces(Stream):
    def __iter__(self) -> Iterator[Any]:
        return Places(shard(self.count))


class EpochSampler(Sampler[int]):
    """A sampler with a state: each epoch begins one number later."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.turn = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at += 1
            yield (self.at - 1 + self.turn) % self.count
        self.at = 0
        self.turn += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.turn = state["at"], state["turn"]


class SamplerOfPlaces(EpochSampler):
    """A sampler whose iterator has a state, and not the sampler itself."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return Places(range(self.count))


class DrawingSampler(EpochSampler):
    """A sampler without a state, which draws its order from torch's global generator when it is asked for its first."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count).tolist()


class EagerSampler(DrawingSampler):
    """A `DrawingSampler` that draws its order already at `iter`."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())


class LateSampler(RandomSampler):
    """A sampler that makes its generator when it is iterated over for the first time."""

    def __iter__(self) -> Any:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(3)
        return super().__iter__()


class Batches(EpochSampler):
    def __iter__(self) -> Iterator[Any]:
        for at in super().__iter__():
            yield [at, (at + 1) % self.count]


def through_text(state: Any) -> Any:
    return json.loads(json.dumps(state))


def loader_of(dataset: Any, batch_size: int | None = 4, **options: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(dataset, batch_size, **{"collate_fn": identity, **options})


def begun(loader: hr.DataLoader[Any], batches: int = 1) -> tuple[list[Any], dict[str, Any], Iterator[Any]]:
    """Some batches, the state after them, and the iterator, which has the rest."""
    iterator = iter(loader)
    got = [next(iterator) for _ in range(batches)]
    return got, through_text(loader.state_dict()), iterator


def resumed(loader: hr.DataLoader[Any], state: dict[str, Any], **options: Any) -> hr.DataLoader[Any]:
    loader.load_state_dict(state, **options)
    return loader


def refused(loader: hr.DataLoader[Any], state: Any, text: str, field: str, **options: Any) -> None:
    with pytest.raises(hr.StateMismatchError, match=text) as caught:
        loader.load_state_dict(state, **options)
    assert caught.value.field == field
