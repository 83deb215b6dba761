"""States of version 1, as they were saved once: they load, and the same samples follow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.tars import numbered_samples, tar

import headrace as hr
from headrace.fetch.stores import memory

FOLDER = Path(__file__).with_name("golden")
GOLDEN: dict[str, Any] = json.loads((FOLDER / "state_1.json").read_text())
MARKED: dict[str, Any] = json.loads((FOLDER / "state_1_marked.json").read_text())  # since marks have a check


class Numbers(hr.AsyncDataset):
    def __len__(self) -> int:
        return 60

    async def aget(self, key: int) -> int:
        return key


class Counter(hr.AsyncIterableDataset):
    """It resumes from its own state."""

    def __init__(self) -> None:
        self.next = 0

    async def aiter(self) -> AsyncIterator[int]:
        while self.next < 40:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def shards() -> hr.Stream:
    urls, first = [], 0
    for k, count in enumerate((9, 0, 14, 22)):
        urls.append(f"memory://golden/{k}.tar")
        memory.put(urls[-1], tar(numbered_samples(first, count, 20)))
        first += count
    return hr.stream(urls, index=None).map(number_of)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def is_odd(number: int) -> bool:
    return bool(number % 2)


def several(number: int) -> list[int]:
    return [number] * (number % 4)


def text(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number] * (number % 11)}


def tokens_of(sequence: dict[str, Any]) -> Any:
    return sequence["input_ids"]


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "in order, of all ranks": lambda: hr.DataLoader(Numbers().shuffle(), batch_size=4, rank=1, world_size=3, seed=7),
    "with holes": lambda: hr.DataLoader(Numbers().shuffle(), batch_size=7, tail="carry"),
    "of one rank": lambda: hr.DataLoader(Numbers(), batch_size=4, rank=1, world_size=3, in_order=False),
    "behind limits": lambda: hr.DataLoader(
        Numbers().shuffle().flat_map(several).take(40).batch(3).unbatch().filter(is_odd).take(30).flat_map(several),
        batch_size=4,
    ),
    "packed by rows": lambda: hr.DataLoader(
        Numbers().shuffle().filter(is_odd).map(text).pack(6, method="best_fit", pad_value=-1).map(tokens_of),
        batch_size=4,
    ),
    "behind a filter": lambda: hr.DataLoader(Numbers().shuffle().filter(is_odd), batch_size=4),
    "shards without an index": lambda: hr.DataLoader(shards().shuffle(window=8), batch_size=4),
    "an iterable data set": lambda: hr.DataLoader(Counter(), batch_size=4),
}


@pytest.mark.parametrize(("name", "golden"), [*GOLDEN.items(), *MARKED.items()])
def test_state_of_version_1_loads_and_the_same_samples_follow(name: str, golden: dict[str, Any]) -> None:
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        assert (loader.epoch, loader.position.batch) == (golden["state"]["epoch"], golden["state"]["batches"])
        assert [batch.tolist() for batch in loader] == golden["rest"]


@pytest.mark.parametrize("name", LOADERS)
def test_state_is_saved_as_it_was_once(name: str) -> None:
    """Another form of it would be another version."""
    golden = (GOLDEN | MARKED)[name]
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        iterator = iter(loader)
        assert iterator.state_dict() == golden["state"]
        next(iterator)
        assert json.loads(json.dumps(iterator.state_dict())) == golden["next"]


def test_states_of_version_1_have_all_fields() -> None:
    """A field that is in none of them could change unnoticed."""
    assert GOLDEN.keys() == LOADERS.keys()
    fields = set().union(*(golden["state"] for golden in (*GOLDEN.values(), *MARKED.values())))
    assert fields >= {"holes", "carried", "done", "rank", "mark", "check", "end", "step", "batch_size", "lanes", "tail"}
    assert fields >= {"world", "samples", "parts", "given", "packing", "marked"}
