"""States of data sets that have a state of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from builders.loops import loaded, resumed_anywhere
from builders.numbers import Counting
from end_to_end.state import sources
from end_to_end.state.runs import QUICK, epoch_of
from end_to_end.state.sources import Seen, Written

import headrace as hr


def whole_and_resumed(make: Callable[[], Any], epochs: int = 3, **options: Any) -> None:
    resumed_anywhere(
        lambda: hr.DataLoader(make(), **{"timeout": 30, "fetch": QUICK, **options}), sources.rows, epochs=epochs
    )


class Grows(sources.Stateful):
    """Each epoch has one sample more."""

    async def aiter(self) -> AsyncIterator[dict[str, Any]]:
        if not self.is_told:
            self.total += 1
        async for sample in super().aiter():
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        super().load_state_dict(state)


SEVEN = Written([7])
STATEFUL: dict[str, Callable[[], Any]] = {
    "starts again": lambda: sources.Stateful(SEVEN).map(Seen()),
    "starts again, filtered": lambda: sources.Stateful(Written([30])).map(Seen()).filter(sources.some),
    "continues": lambda: Counting(make=sources.sample_of).map(Seen()).epoch(samples=6),
    "continues, taken": lambda: Counting(make=sources.sample_of).map(Seen()).take(7),
    "grows": lambda: Grows(SEVEN).map(Seen()),
    "has a function of all samples": lambda: sources.applied(sources.Keyed(SEVEN).map(Seen())),
    "has an iterator that knows": lambda: sources.WithStatefulIterator(SEVEN).map(Seen()),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("which", STATEFUL)
def test_data_set_with_a_state_goes_on_from_every_state(which: str, batch_size: int) -> None:
    whole_and_resumed(STATEFUL[which], batch_size=batch_size)


def test_padding_is_the_same_samples_with_the_same_random_numbers_when_it_comes_after_a_resume() -> None:
    """They are those of the begin: at their own positions, on any number of ranks."""
    make = lambda: sources.Keyed(Written([10])).shuffle().map(Seen())
    whole_and_resumed(make, epochs=2, batch_size=4, tail="pad")
    samples = [sample for batch in epoch_of(loaded(make(), batch_size=4, tail="pad")) for sample in batch]
    assert len(samples) == 12
    assert len(set(samples)) == 10
