"""What a state counts: samples that failed, that a filter left, and what data sets with states of their own say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from builders.loops import resumed_anywhere
from end_to_end.state import sources
from end_to_end.state.runs import QUICK, epoch_of
from end_to_end.state.sources import KEYS, Places, Seen, Written

import headrace as hr


def whole_and_resumed(make: Callable[[], Any], epochs: int = 3, **options: Any) -> None:
    resumed_anywhere(
        lambda: hr.DataLoader(make(), **{"timeout": 30, "fetch": QUICK, **options}), sources.rows, epochs=epochs
    )


class OnAndOn(hr.AsyncIterableDataset):
    """Samples without end; each epoch goes on where the one before was left."""

    def __init__(self) -> None:
        self.next = 0

    async def aiter(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            self.next += 1
            yield sources.sample_of(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


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
    "begins anew": lambda: sources.Stateful(SEVEN).map(Seen()),
    "begins anew, filtered": lambda: sources.Stateful(Written([30])).map(Seen()).filter(sources.some),
    "goes on and on": lambda: OnAndOn().map(Seen()).epoch(samples=6),
    "goes on and on, taken": lambda: OnAndOn().map(Seen()).take(7),
    "grows": lambda: Grows(SEVEN).map(Seen()),
    "has an iterator that knows": lambda: sources.WithStatefulIterator(SEVEN).map(Seen()),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("which", STATEFUL)
def test_data_set_with_a_state_goes_on_from_every_state(which: str, batch_size: int) -> None:
    whole_and_resumed(STATEFUL[which], batch_size=batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_epoch_behind_a_filter_has_its_samples_when_some_failed_before_the_kill(places: Places, on_error: str) -> None:
    bad = frozenset({3, 8, 9, 20})
    written = places.write([30], bad)
    make = lambda: sources.source(KEYS, written).map(sources.as_it_is).filter(_any).map(Seen(bad)).epoch(samples=20)

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(make(), batch_size=4, on_error=on_error, timeout=30)

    with loader() as one:
        whole = epoch_of(one)
    for batches in range(len(whole) + 1):
        with loader() as one:
            iterator = iter(one)
            for _ in range(batches):
                _passed(iterator)
            if batches and whole[batches - 1] == ("ValueError",):
                continue  # it counts with the next one
            state = one.state_dict()
        with loader() as one:
            one.load_state_dict(json.loads(json.dumps(state)))
            assert epoch_of(one) == whole[batches:], batches


async def _any(sample: dict[str, Any]) -> bool:
    return True


def _passed(iterator: Any) -> None:
    with contextlib.suppress(ValueError):
        next(iterator)


def test_padding_is_the_same_samples_with_the_same_random_numbers_when_it_comes_after_a_resume() -> None:
    """They are those of the begin: at their own positions, on any number of ranks."""
    make = lambda: sources.Keyed(Written([10])).shuffle().map(Seen())
    whole_and_resumed(make, epochs=2, batch_size=4, tail="pad")
    with hr.DataLoader(make(), batch_size=4, tail="pad") as loader:
        samples = [sample for batch in epoch_of(loader) for sample in batch]
    assert len(samples) == 12
    assert len(set(samples)) == 10
