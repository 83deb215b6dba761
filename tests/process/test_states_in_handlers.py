"""A signal handler may ask for the state, as those do that save it before a machine is taken away, at any moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from builders.numbers import Numbers

import headrace as hr

COUNT, BATCH = 400, 4
EVERY_S = 0.0005


def loader_of(regime: str, workers: int) -> hr.DataLoader[Any]:
    data: Any = Numbers(COUNT) if regime == "headrace" else list(range(COUNT))
    is_economic = regime == "economic"
    return hr.DataLoader(
        data, batch_size=BATCH, shuffle=regime == "headrace", num_workers=workers, economic=is_economic
    )


@contextmanager
def interrupted(handler: Any) -> Iterator[None]:
    """Within, the handler is called now and then, each time some time after it has ended."""

    def again(number: int, frame: FrameType | None) -> None:
        handler()
        signal.setitimer(signal.ITIMER_REAL, EVERY_S)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("regime", "workers"), [("headrace", 0), ("headrace", 2), ("torch", 0), ("torch", 2), ("economic", 2)]
)
def test_state_that_a_handler_takes_goes_on_where_the_trainer_was(regime: str, workers: int) -> None:
    taken: list[tuple[int, dict[str, object]]] = []
    epochs: list[list[list[int]]] = []
    with loader_of(regime, workers) as loader:

        def take() -> None:
            loader.stats()
            taken.append((sum(map(len, epochs)), loader.state_dict()))

        with interrupted(take):
            while len(taken) < 300:
                epochs.append([])
                for batch in loader:
                    epochs[-1].append(batch.tolist())
    came = [batch for epoch in epochs for batch in epoch]
    for had, state in taken[:: len(taken) // 5]:
        with loader_of(regime, workers) as again:
            again.load_state_dict(state)
            rest = next(iter(again), None)
        first = came[had : had + 2]  # it may have been interrupted as the next one was given
        assert rest is None or rest.tolist() in first or not first
