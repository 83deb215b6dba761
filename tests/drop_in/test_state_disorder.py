"""States of loaders in the torch regime whose batches were not dealt to workers in turn: nothing is lost or doubled."""

from __future__ import annotations

import os
from typing import Any

import pytest
from drop_in.classes import ThreadLoader
from drop_in.stateful_data import Numbers, identity, through_text
from torch.utils.data import get_worker_info

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Held(Numbers):
    """Numbers without a state; the first one is made when the trainer has closed the other end of a pipe."""

    def __init__(self, gate: int | None = None) -> None:
        super().__init__(32)
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self.gate is not None:
            assert os.read(self.gate, 1) == b""
        return index


class Logged(Held):
    """Each number with the worker and the numbers that its copy has given, which are its state."""

    def __init__(self, gate: int | None = None) -> None:
        super().__init__(gate)
        self.log: list[int] = []

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        worker, before = get_worker_info(), tuple(self.log)
        self.log.append(index)
        return index, worker.id if worker else 0, before

    def state_dict(self) -> dict[str, Any]:
        return {"log": list(self.log)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log = list(state["log"])


def loader_of(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
    given: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "collate_fn": identity, **options}
    return ThreadLoader(dataset, **given)


def take(iterator: Any, batches: int) -> list[Any]:
    return [sample for _ in range(batches) for sample in next(iterator)]


def out_of_order(kind: type[Held], batches: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some batches that come before the first one, and the state after them."""
    gate, closing = os.pipe()
    try:
        loader = loader_of(kind(gate), in_order=False, **options)
        iterator = iter(loader)
        got = take(iterator, batches)
        state = through_text(loader.state_dict())
    finally:
        os.close(closing)
    list(iterator)
    os.close(gate)
    assert state["due"] == 0
    assert state["beyond"]
    return got, state


def assert_complete(got: list[Any]) -> None:
    assert sorted(index for index, _, _ in got) == list(range(32))
    assert_logged(got)


def assert_logged(got: list[Any]) -> None:
    logs: dict[int, tuple[int, ...]] = {}
    for index, worker, before in got:
        assert before == logs.get(worker, ())
        logs[worker] = (*before, index)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 0, 1, 3])
@pytest.mark.parametrize("batches", [1, 4])
def test_copies_go_on_with_what_is_left_when_batches_come_out_of_order(batches: int, every: int | None) -> None:
    got, state = out_of_order(Logged, batches, snapshot_every_n_steps=every)
    loader = loader_of(Logged(), in_order=False)
    loader.load_state_dict(state)
    assert_complete(got + [sample for batch in loader for sample in batch])


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("every", [None, 0, 3])
def test_copies_go_on_with_what_is_left_when_order_was_once_not_kept(every: int | None, in_order: bool) -> None:
    got, state = out_of_order(Logged, 2)
    for batches in (1, 2, 1):
        loader = loader_of(Logged(), in_order=in_order, snapshot_every_n_steps=every)
        loader.load_state_dict(state)
        got += take(iter(loader), batches)
        state = through_text(loader.state_dict())
    loader.load_state_dict(state)
    assert_complete(got + [sample for batch in loader for sample in batch])


@pytest.mark.parametrize("every", [None, 0, 3])
def test_copies_go_on_with_what_is_left_when_order_is_not_kept_any_more(every: int | None) -> None:
    loader = loader_of(Logged(), snapshot_every_n_steps=0)
    got = take(iter(loader), 3)
    state = through_text(loader.state_dict())
    for batches in (1, 2):
        loader = loader_of(Logged(), in_order=False, snapshot_every_n_steps=every)
        loader.load_state_dict(state)
        got += take(iter(loader), batches)
        state = through_text(loader.state_dict())
    loader.load_state_dict(state)
    assert_complete(got + [sample for batch in loader for sample in batch])


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_copies_have_given_nothing_when_a_state_of_another_number_of_workers_is_forced(num_workers: int) -> None:
    head, state = out_of_order(Logged, 3)
    options: dict[str, Any] = {"num_workers": num_workers, "snapshot_every_n_steps": 0}
    loader = loader_of(Logged(), **options)
    loader.load_state_dict(state, force=True)
    got = take(iter(loader), 2)
    state = through_text(loader.state_dict())
    loader = loader_of(Logged(), **options)
    loader.load_state_dict(state)
    got += [sample for batch in loader for sample in batch]
    assert_logged(got)
    assert sorted(index for index, _, _ in head + got) == list(range(32))


@pytest.mark.parametrize("kind", [Held, Logged])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_nothing_is_doubled_without_workers_when_batches_came_out_of_order(kind: Any, back: int) -> None:
    head, state = out_of_order(kind, 3)
    options: dict[str, Any] = {"num_workers": 0, "snapshot_every_n_steps": 0}
    loader = loader_of(kind(), **options)
    loader.load_state_dict(state, force=True)
    iterator = iter(loader)
    got = take(iterator, 3)
    state = through_text(loader.state_dict(batches=6 - back))
    rest = [sample for batch in iterator for sample in batch]
    loader = loader_of(kind(), **options)
    loader.load_state_dict(state)
    assert [sample for batch in loader for sample in batch] == got[len(got) - 4 * back :] + rest
    indices = [sample if kind is Held else sample[0] for sample in head + got + rest]
    assert sorted(indices) == list(range(32))
