"""How many results of steps are alive at once, where those are objects of the trainer's process."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest
from builders.numbers import Numbers

import headrace as hr

MIB = 2**20
SAMPLES, BUDGET = 160, 8  # of 1 MiB each


class Live:
    """Makes large arrays, and counts those that are alive."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()

    def make(self, _: Any) -> np.ndarray[Any, Any]:
        made = np.zeros(MIB, np.uint8)
        weakref.finalize(made, self._count, -1)
        self._count(1)
        return made

    async def make_on_the_loop(self, sample: Any) -> np.ndarray[Any, Any]:
        return self.make(sample)

    def _count(self, change: int) -> None:
        with self._lock:
            self.now += change
            self.most = max(self.most, self.now)


def is_kept(_: Any) -> bool:
    return True


async def is_kept_by_the_loop(_: Any) -> bool:
    return True


def first(sample: Any) -> int:
    return int(sample[0])


KINDS: dict[str, Any] = {
    "in slots": lambda live: (Numbers(SAMPLES).map(live.make), {}),
    "collated": lambda live: (Numbers(SAMPLES).map(live.make), {"collate_fn": np.stack}),
    "filtered": lambda live: (Numbers(SAMPLES).map(live.make).filter(is_kept), {}),
    "filtered by the loop": lambda live: (Numbers(SAMPLES).map(live.make).filter(is_kept_by_the_loop), {}),
    "by the loop": lambda live: (Numbers(SAMPLES).map(str).map(live.make_on_the_loop).map(first), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [{}, {"workers": "thread", "num_workers": 2}])
def test_results_in_threads_are_as_few_as_the_budget_allows(kind: str, workers: dict[str, Any]) -> None:
    live = Live()
    data, options = KINDS[kind](live)
    count = 0
    with hr.DataLoader(data, batch_size=8, memory_budget=f"{BUDGET}MiB", **options, **workers) as loader:
        for batch in loader:
            count += len(batch)
    assert count == SAMPLES
    # The budget, the batch that is always let in, one that is taken, and what each thread has in hand.
    assert live.most <= BUDGET + 8 + 8 + 2 * 4, live.most
