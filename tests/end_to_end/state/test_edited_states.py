"""A state with any one edit is refused by a StateMismatchError, or gives the same samples."""

import copy
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders.loops import lists, rest_of, state_after
from drop_in.acting import Made
from drop_in.stateful_data import StreamOfPlaces
from unit.test_state_golden import LOADERS

import headrace as hr
from headrace.state.state import whole_check

Make = Callable[[], hr.DataLoader[Any]]
_DELETED = object()
_VALUES = [_DELETED, None, -1, 10**7, 2**70, 1.5, "x", "", [], [3], {}, True, False]
_MIB_MOST = 64


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


TORCH: dict[str, Make] = {
    "map-style": lambda: hr.DataLoader(Made(int, 23), batch_size=3, shuffle=True, generator=generator()),
    "iterable": lambda: hr.DataLoader(StreamOfPlaces(23), batch_size=3),
    "economic": lambda: hr.DataLoader(  # type: ignore[call-arg]
        Made(int, 23), 3, shuffle=True, generator=generator(), num_workers=2, economic=True, workers="thread"
    ),
}


def edits(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is edited, the edited state), for each value inside of a state, and each of several edits."""
    for path in paths(state):
        old = state
        for name in path:
            old = old[name]
        values = [*_VALUES]
        if isinstance(old, int):
            values += [old + 1, old - 1]
        if isinstance(old, str) and len(old) > 3:
            middle = len(old) // 2
            values += [old[:middle], old[:middle] + ("1" if old[middle] == "0" else "0") + old[middle + 1 :]]
        for value in values:
            edited = copy.deepcopy(state)
            inner = edited
            for name in path[:-1]:
                inner = inner[name]
            if value is _DELETED:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            if edited != state or str(edited) != str(state):
                yield f"{path} = {'(deleted)' if value is _DELETED else repr(value)}", edited


def paths(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*above, name)
        yield from paths(part, *above, name)


@pytest.mark.parametrize("make", [*TORCH.values(), *LOADERS.values()], ids=[*TORCH, *LOADERS])
def test_edited_state_is_refused_or_goes_on_with_the_same_samples(make: Make) -> None:
    state = state_after(make(), 2)
    rest = str(lists(rest_of(make(), state)))
    wrong, loader = [], make()
    tracemalloc.start()
    for what, edited in edits(state):
        try:
            loader.load_state_dict(edited)
            again = str(lists(loader))
        except hr.StateMismatchError as error:
            again = rest if error.field else "no field"
        except Exception as error:
            again = repr(error)
        if again != rest:
            wrong.append((what, again))
            loader.close()
            loader = make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    loader.close()
    assert not wrong, (len(wrong), wrong[:50])
    assert peak < _MIB_MOST * 2**20


@pytest.mark.parametrize("make", TORCH.values(), ids=TORCH)
def test_edited_state_without_its_check_is_refused_where_it_makes_no_sense(make: Make) -> None:
    """As states of earlier releases, or with a new checksum."""
    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
        wrong: list[tuple[str, object]] = [("batches", "x"), ("due", -1), ("turn", None), ("copies", 3)]
        wrong += [("base_seed", []), ("beyond", [[2]])]
        if state["is_map"]:
            wrong += [("sampler", None)]
            wrong += [("sampler", {**state["sampler"], name: 3}) for name in ("states", "is_over")]
        else:
            wrong += [("copies", [])]
            wrong += [("copies", [{**state["copies"][0], name: 3}]) for name in ("states", "is_over")]
        for name, value in wrong:
            unchecked = {**{k: v for k, v in state.items() if k != "check"}, name: value}
            for edited in (unchecked, {**unchecked, "check": whole_check(unchecked)}):
                with pytest.raises(hr.StateMismatchError) as told:
                    loader.load_state_dict(edited)
                assert told.value.field == name
