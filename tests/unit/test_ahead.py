"""What becomes of batches before they are given on: they keep their order, and errors come in their turn."""

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
def test_batches_are_taken_in_the_order_in_which_they_were_put(kind: str) -> None:
    ahead = MADE[kind]()
    for k in range(0, 6, ahead.depth):
        for n in range(k, k + ahead.depth):
            ahead.put(lambda n=n: torch.full((3,), n))
        for n in range(k, k + ahead.depth):
            batch = ahead.take(None)()
            complete(ahead)
            assert batch.tolist() == [n] * 3
    ahead.close()


def test_copies_of_three_batches_run_at_most() -> None:
    backend = FakeBackend()
    ahead = DeviceStage(Mover(backend))
    for n in range(3):
        ahead.put(partial(torch.ones, n))
    assert [event.is_done for event in backend.events] == [False, False, False]
    ahead.put(partial(torch.ones, 1))
    assert [event.is_done for event in backend.events] == [True, False, False, False]
    ahead.drain()


@all_kinds
def test_error_is_raised_in_its_turn_and_the_next_batch_comes(kind: str) -> None:
    ahead = MADE[kind]()
    puts = [lambda: torch.ones(2), failing, lambda: torch.zeros(2)]
    got: list[Any] = []
    for put in puts:
        ahead.put(put)
        try:
            got.append(ahead.take(None)())
        except KeyError as error:
            got.append(error.args)
    complete(ahead)
    ahead.close()
    assert [g if isinstance(g, tuple) else g.tolist() for g in got] == [[1, 1], ("bad",), [0, 0]]


def test_take_does_not_wait_when_it_is_not_to() -> None:
    gate = threading.Event()
    ahead = PinStage(doubled, None)

    def wait() -> torch.Tensor:
        gate.wait()
        return torch.ones(1)

    ahead.put(wait)
    with pytest.raises(anyio.WouldBlock):
        ahead.take(0)
    gate.set()
    assert ahead.take(None)().item() == 2
    ahead.close()


def test_close_ends_the_thread_when_batches_are_left() -> None:
    ahead = PinStage(doubled, None)
    ahead.put(lambda: torch.ones(1))
    ahead.put(lambda: torch.ones(1))
    ahead.close()
