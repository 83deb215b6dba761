"""Stages before the trainer keep the order of batches and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from unit.fake_device import FakeBackend

from headrace.delivery.device import Mover
from headrace.delivery.staging import Ahead, DeviceStage, PinStage


def doubled(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


def failing() -> Any:
    raise KeyError("bad")


MADE: dict[str, Callable[[], Ahead]] = {
    "opened": Ahead,
    "pinned": lambda: PinStage(lambda batch: batch.clone(), None),
    "moved": lambda: DeviceStage(Mover(FakeBackend())),
}
all_kinds = pytest.mark.parametrize("kind", MADE)


def complete(ahead: Ahead) -> None:
    if isinstance(ahead, DeviceStage):
        for event in ahead._mover._backend.events:  # type: ignore[attr-defined]
            event.complete()


@all_kinds
def test_batches_are_taken_in_the_order_of_put(kind: str) -> None:
    ahead = MADE[kind]()
    for k in range(0, 6, ahead.depth):
        for n in range(k, k + ahead.depth):
            ahead.put(lambda n=n: torch.full((3,), n))
        for n in range(k, k + ahead.depth):
            batch = ahead.take(None)()
            complete(ahead)
            assert batch.tolist() == [n] * 3
    ahead.close()


def test_at_most_three_batches_are_copied_at_once() -> None:
    backend = FakeBackend()
    ahead = DeviceStage(Mover(backend))
    for n in range(3):
        ahead.put(partial(torch.ones, n))
    assert [event.is_done for event in backend.events] == [False, False, False]
    ahead.put(partial(torch.ones, 1))
    assert [event.is_done for event in backend.events] == [True, False, False, False]
    ahead.drain()


@all_kinds
def test_error_is_raised_in_its_turn(kind: str) -> None:
    ahead = MADE[kind]()
    got: list[Any] = []
    for put in (lambda: torch.ones(2), failing, lambda: torch.zeros(2)):
        ahead.put(put)
        try:
            got.append(ahead.take(None)())
        except KeyError as error:
            got.append(error.args)
    complete(ahead)
    ahead.close()
    assert [g if isinstance(g, tuple) else g.tolist() for g in got] == [[1, 1], ("bad",), [0, 0]]


def test_take_without_waiting_and_close_with_batches_left() -> None:
    gate = threading.Event()
    ahead = PinStage(doubled, None)
    ahead.put(lambda: torch.ones(int(gate.wait())))
    with pytest.raises(anyio.WouldBlock):
        ahead.take(0)
    gate.set()
    assert ahead.take(None)().item() == 2
    ahead.put(lambda: torch.ones(1))
    ahead.put(lambda: torch.ones(1))
    ahead.close()
