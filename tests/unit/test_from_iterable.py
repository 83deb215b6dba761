"""Synchronous iterables, and states of the loader with and without states of theirs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
import pytest
import torch
from builders.loops import lists, outcomes, resumed_anywhere

import headrace as hr

COUNT = 23


class Counting(torch.utils.data.IterableDataset[int]):
    """Starts each pass from 0, except the one after `load_state_dict`, and counts the passes."""

    def __init__(self) -> None:
        self.state, self.is_loaded = {"next": 0, "passes": 0}, False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.state = {"next": 0, "passes": self.state["passes"] + 1}
        self.is_loaded = False
        while self.state["next"] < COUNT:
            self.state["next"] += 1
            yield 100 * self.state["passes"] + self.state["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.is_loaded = dict(state), True


def loader_of(data: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(hr.from_iterable(data), batch_size=4)


def test_iterable_is_resumed_if_it_has_states() -> None:
    first, *_ = resumed_anywhere(lambda: loader_of(Counting()), epochs=3)
    assert first[0] == [100, 101, 102, 103]
    with loader_of(lambda: Counting()) as loader:  # a function is called in each epoch
        assert lists(loader) == lists(loader)
    with loader_of(range(COUNT)) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        with pytest.raises(hr.OptionError, match="state"):
            loader.state_dict()


def drawn() -> Iterator[float]:
    start = hr.rng().random()
    return (float(start - hr.rng().random()) if n < 100 else float(1 // 0) for n in range(101))


def test_quick_samples_are_read_together_and_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run_sync = list[object](), anyio.to_thread.run_sync
    monkeypatch.setattr(anyio.to_thread, "run_sync", lambda *args: calls.append(args) or run_sync(*args))
    data = hr.from_iterable(drawn).map(float)
    one, several = (outcomes(data, batch_size=size, collate_fn=list, seed=1) for size in (1, 20))
    assert len(calls) < 100 + 20
    assert [number for batch in one[:-1] for number in batch] == [number for batch in several[:-1] for number in batch]
    assert len(set(map(str, one))) == 101
    assert one[0] != [0.0], "the numbers of the first sample follow those of the function"
    assert isinstance(one[-1], ZeroDivisionError)
    assert isinstance(several[-1], ZeroDivisionError)


def lines() -> Iterator[int]:
    yield from range(5)


@pytest.mark.parametrize("iterator", [lines(), iter([1, 2]), map(str, [1]), itertools.count()])
def test_iterator_is_refused_without_one_epoch(iterator: Any) -> None:
    with pytest.raises(hr.OptionError, match="must be a function that returns a new iterator"):
        hr.from_iterable(iterator)


def test_second_epoch_of_an_iterator_is_an_error() -> None:
    used_up = lines()
    once = [hr.from_iterable(some, one_epoch=True) for some in (lines(), iter(range(5)))]
    for data in (*once, hr.from_iterable(lambda: used_up)):
        with hr.DataLoader(data, batch_size=4) as loader:
            assert lists(loader) == [[0, 1, 2, 3], [4]]
            with pytest.raises(hr.OptionError, match="an earlier loop has used up its samples"):
                list(loader)
