"""A state that one thread reads while another one loads is that from before or after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr


class Weights:
    """Weights of a mixture. One thread waits for them."""

    def __init__(self, web: float) -> None:
        self.web, self.waits = web, False
        self.entered, self.may_go = threading.Event(), threading.Event()

    def __call__(self, step: int) -> dict[str, float]:
        if self.waits and threading.current_thread().name == "loads":
            self.entered.set()
            self.may_go.wait()
        return {"web": self.web, "code": 1.0}


def loader_of(weights: Weights) -> hr.DataLoader[Any]:
    streams = {"web": hr.from_map(range(60)), "code": hr.from_map(range(40))}
    return hr.DataLoader(hr.mix(streams, weights, step=8), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "read",
    [lambda loader: loader.state_dict(), lambda loader: loader.position, lambda loader: loader.epoch],
    ids=["state_dict", "position", "epoch"],
)
def test_state_is_that_of_before_when_another_thread_loads_one_that_is_refused(read: Callable[[Any], Any]) -> None:
    with loader_of(Weights(3.0)) as other:
        batches = iter(other)
        for _ in range(3):
            next(batches)
        state = other.state_dict()
        del batches
    state = {**state, "epoch": 5}
    with loader_of(Weights(1.0)) as alike:
        before = read(alike)
    weights = Weights(1.0)  # another order: the state is refused, but only once that was asked for
    with loader_of(weights) as loader:
        weights.waits = True
        errors: list[BaseException] = []

        def load() -> None:
            try:
                loader.load_state_dict(state)
            except hr.StateMismatchError as error:
                errors.append(error)

        found: list[Any] = []
        loads = threading.Thread(target=load, name="loads")
        loads.start()
        assert weights.entered.wait(30)
        reads = threading.Thread(target=lambda: found.append(read(loader)))
        reads.start()
        reads.join(0.5)  # it would be done by then, if it did not wait
        weights.may_go.set()
        loads.join()
        reads.join()
        assert errors
        assert found == [before]
