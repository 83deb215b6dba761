"""All ranks of a world, in one process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from end_to_end.state.runs import QUICK
from end_to_end.state.sources import rows

import headrace as hr

State = dict[str, Any]
Rows = tuple[Any, ...]


@dataclass
class Ranks:
    """The loaders of all ranks of a world, in one process."""

    loaders: Sequence[hr.DataLoader[Any]]

    def run(self, most: int | None = None) -> list[list[Rows]]:
        """So many steps, or all: of each one the batches of all ranks. All of them end after the same step."""
        iterators, steps = [iter(loader) for loader in self.loaders], list[list[Rows]]()
        while most is None or len(steps) < most:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * len(batches)
                return steps
            steps.append([rows(batch) for batch in batches])
        return steps

    def states(self) -> list[State]:
        states: list[State] = json.loads(json.dumps([loader.state_dict() for loader in self.loaders]))
        return states


def world(
    stack: ExitStack, size: int, make: Callable[[], Any], states: State | Sequence[State] | None = None, **options: Any
) -> Ranks:
    """The ranks of a world, each of which goes on from its own state or from the one of all."""
    loaders = []
    for rank in range(size):
        # All ranks read from one server, in one process: with many reads ahead most time goes to what nobody takes.
        settings = {"fetch": QUICK, "fetch_concurrency": 4, "timeout": 30, **options}
        loader = hr.DataLoader(make(), rank=rank, world_size=size, **settings)
        stack.enter_context(loader)
        if states is not None:
            loader.load_state_dict(states if isinstance(states, dict) else states[rank])
        loaders.append(loader)
    return Ranks(loaders)


def whole(steps: Sequence[Sequence[Rows]]) -> list[Rows]:
    """The global batches: of each step the ranks' batches, one behind the other."""
    return [tuple(sample for batch in step for sample in batch) for step in steps]


def samples(steps: Sequence[Sequence[Rows]]) -> Counter[Any]:
    return Counter(sample for batch in whole(steps) for sample in batch)
