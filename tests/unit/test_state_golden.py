"""States of version 2 load, the same samples follow, and an edited state is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.numbers import Counting, Numbers, is_odd
from builders.tars import put_shards

import headrace as hr
from headrace.state.state import _DEFAULTS, State, is_as_saved, whole_check

GOLDEN: dict[str, Any] = json.loads((Path(__file__).with_name("golden") / "state_2.json").read_text())


NEVER_SAVED_HERE = {"lanes", "resplit", "skipped", "skip_batches", "used"}


class Counter(Counting):
    """States have the name of this class."""


def shards() -> hr.Stream:
    return hr.stream(put_shards("golden", (9, 0, 14, 22), 20), index=None).map(number_of)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def several(number: int) -> list[int]:
    return [number] * (number % 4)


def text(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number] * (number % 11)}


def tokens_of(sequence: dict[str, Any]) -> Any:
    return sequence["input_ids"]


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "in order, of all ranks": lambda: hr.DataLoader(
        Numbers(60).shuffle(), batch_size=4, ranks=hr.Ranks(rank=1, world_size=3), seed=7
    ),
    "with holes": lambda: hr.DataLoader(Numbers(60).shuffle(), batch_size=7, ranks=hr.Ranks(last_batch="carry")),
    "of one rank": lambda: hr.DataLoader(
        Numbers(60), batch_size=4, ranks=hr.Ranks(rank=1, world_size=3), in_order=False
    ),
    "behind limits": lambda: hr.DataLoader(
        Numbers(60).shuffle().flat_map(several).take(40).batch(3).unbatch().filter(is_odd).take(30).flat_map(several),
        batch_size=4,
    ),
    "packed by rows": lambda: hr.DataLoader(
        Numbers(60).shuffle().filter(is_odd).map(text).pack(6, method="best_fit", pad_value=-1).map(tokens_of),
        batch_size=4,
    ),
    "behind a filter": lambda: hr.DataLoader(Numbers(60).shuffle().filter(is_odd), batch_size=4),
    "shards without an index": lambda: hr.DataLoader(shards().shuffle(window=8), batch_size=4),
    "an iterable data set": lambda: hr.DataLoader(Counter(40), batch_size=4),
}


@pytest.mark.parametrize(("name", "golden"), GOLDEN.items())
def test_state_of_version_2_loads_and_the_same_samples_follow(name: str, golden: dict[str, Any]) -> None:
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        assert (loader.epoch, loader.position.batch) == (golden["state"]["epoch"], golden["state"]["batches"])
        assert [batch.tolist() for batch in loader] == golden["rest"]


@pytest.mark.parametrize("name", LOADERS)
def test_saved_state_equals_the_golden_one(name: str) -> None:
    """Another form of it would be another version."""
    golden = GOLDEN[name]
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        iterator = iter(loader)
        assert iterator.state_dict() == golden["state"]
        next(iterator)
        assert json.loads(json.dumps(iterator.state_dict())) == golden["next"]


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from names_in(part)


def test_states_of_version_2_have_all_fields() -> None:
    """A field that is in none of them could change unnoticed."""
    assert GOLDEN.keys() == LOADERS.keys()
    states = [golden["state"] for golden in GOLDEN.values()]
    assert {*names_in(states)} >= {*_DEFAULTS, "source_state", "check"} - NEVER_SAVED_HERE
    assert max(len(json.dumps(state)) for state in states) < 1000


@pytest.mark.parametrize("version", [1, 3])
def test_other_versions_are_refused(version: int) -> None:
    name = "an iterable data set"
    with LOADERS[name]() as loader, pytest.raises(hr.StateMismatchError, match="reads version 2 only") as caught:
        loader.load_state_dict({**GOLDEN[name]["state"], "version": version})
    assert caught.value.field == "version"


WRONG: list[dict[str, Any]] = [
    {"version": 2.0}, {"epoch": 1.5}, {"batches": 2**70}, {"skipped": [-1, 0]},
    {"fingerprint": {"seed": [1], "data": ""}},
    {"source": {"position": 0, "pending": [30, 5]}}, {"source": {"received": [-5, 3]}}, {"source": {"carried": [3, 5]}},
    {"ranks": {"global_batch_size": 4, "world_size": 3, "resplit": {"global_batch_size": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_numbers_that_no_state_has_are_refused(wrong: dict[str, Any]) -> None:
    state: dict[str, Any] = {k: v for k, v in GOLDEN["an iterable data set"]["state"].items() if k != "check"}
    edited = {name: {**state[name], **value} if isinstance(value, dict) else value for name, value in wrong.items()}
    with pytest.raises(hr.StateMismatchError):
        State.from_json({**state, **edited})


PLAIN = {"batches": 3, "sampler": None, "copies": [{"p": 7}]}
ANY = {**PLAIN, "copies": [{"p": np.int64(7), "of": {1, 2}}]}


@pytest.mark.parametrize(("state", "default"), [
    (PLAIN, None),
    ({**PLAIN, "copies": [{"p": np.int64(7)}]}, int),
    (ANY, lambda value: sorted(value) if isinstance(value, set) else int(value)),
])  # fmt: skip
def test_state_that_was_edited_differs_from_one_stored_in_a_file(state: dict[str, Any], default: Any) -> None:
    saved = {**state, "check": whole_check(state)}
    assert is_as_saved(saved)
    assert is_as_saved(json.loads(json.dumps(saved, default=default)))
    assert not is_as_saved({**saved, "batches": 4})
    assert not is_as_saved({name: value for name, value in saved.items() if name != "batches"})
