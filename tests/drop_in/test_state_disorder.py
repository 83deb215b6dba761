"""States of loaders in the torch regime whose batches were not dealt to workers in turn: nothing is lost or doubled."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from builders.loops import flat
from drop_in.stateful_data import Numbers, Stream, begun, loader_of, resumed, through_text
from torch.utils.data import get_worker_info

import headrace as hr


class Held(Numbers):
    """Numbers without a state; the first one is made when the trainer has closed the other end of a pipe."""

    def __init__(self, gate: int | None = None, count: int = 32) -> None:
        super().__init__(count)
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


def threads_on(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
    return loader_of(dataset, **{"num_workers": 2, "workers": "thread", **options})


def take(iterator: Any, batches: int) -> list[Any]:
    return flat(next(iterator) for _ in range(batches))


def goes_on(state: dict[str, Any], batches: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Some batches of a loader that resumes, and the state after them."""
    loader = resumed(threads_on(Logged(), **options), state)
    return take(iter(loader), batches), through_text(loader.state_dict())


def out_of_order(kind: type[Held], batches: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The samples of some batches that come before the first one, and the state after them."""
    gate, closing = os.pipe()
    try:
        got, state, iterator = begun(threads_on(kind(gate), in_order=False, **options), batches)
    finally:
        os.close(closing)
    list(iterator)
    os.close(gate)
    assert state["due"] == 0
    assert state["beyond"]
    return flat(got), state


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
    assert_complete(got + flat(resumed(threads_on(Logged(), in_order=False), state)))


@pytest.mark.parametrize(("was_in_order", "is_in_order"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("every", [None, 0, 3])
def test_copies_go_on_with_what_is_left_when_order_is_not_always_kept(
    every: int | None, was_in_order: bool, is_in_order: bool
) -> None:
    got, state = goes_on({}, 3, snapshot_every_n_steps=0) if was_in_order else out_of_order(Logged, 2)
    options: dict[str, Any] = {"in_order": is_in_order, "snapshot_every_n_steps": every}
    for batches in (1, 2, 1):
        more, state = goes_on(state, batches, **options)
        got += more
    assert_complete(got + flat(resumed(threads_on(Logged(), **options), state)))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_copies_have_given_nothing_when_a_state_of_another_number_of_workers_is_forced(num_workers: int) -> None:
    head, state = out_of_order(Logged, 3)
    options: dict[str, Any] = {"num_workers": num_workers, "snapshot_every_n_steps": 0}
    loader = resumed(threads_on(Logged(), **options), state, force=True)
    got = take(iter(loader), 2)
    got += flat(resumed(threads_on(Logged(), **options), through_text(loader.state_dict())))
    assert_logged(got)
    assert sorted(index for index, _, _ in head + got) == list(range(32))


@pytest.mark.parametrize("kind", [Held, Logged])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_nothing_is_doubled_without_workers_when_batches_came_out_of_order(kind: Any, back: int) -> None:
    head, state = out_of_order(kind, 3)
    options: dict[str, Any] = {"num_workers": 0, "snapshot_every_n_steps": 0}
    loader = resumed(threads_on(kind(), **options), state, force=True)
    iterator = iter(loader)
    got = take(iterator, 3)
    state = through_text(loader.state_dict(batches=6 - back))
    rest = flat(iterator)
    assert flat(resumed(threads_on(kind(), **options), state)) == got[len(got) - 4 * back :] + rest
    indices = [sample if kind is Held else sample[0] for sample in head + got + rest]
    assert sorted(indices) == list(range(32))


class HeldStream(Stream):
    """The numbers of each worker. Those of the first come when the trainer has closed the other end of a pipe."""

    def __init__(self, gate: int, count: int) -> None:
        super().__init__(count)
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        assert 0 not in numbers or os.read(self.gate, 1) == b""
        yield from numbers


@pytest.mark.parametrize(("kind", "count", "taken"), [(Held, 200, 150), (HeldStream, 12, 2)])
def test_unordered_samples_come_once_and_their_state_is_short(kind: Any, count: int, taken: int) -> None:
    gate, closing = os.pipe()
    dataset = kind(gate, count)
    head, state, iterator = begun(threads_on(dataset, batch_size=None, in_order=False), taken)
    if kind is Held:
        assert len(state["beyond"]) <= 4
        assert [number for start, stop in state["beyond"] for number in range(start, stop)] == sorted(head)
    os.close(closing)
    rest = list(iterator)
    assert 0 in rest
    assert sorted(resumed(threads_on(dataset, batch_size=None, in_order=False), state)) == sorted(rest)
    assert sorted(head + rest) == list(range(count))
    os.close(gate)
