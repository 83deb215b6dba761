"""All ranks of a world, in one process."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from end_to_end.state.runs import QUICK
from end_to_end.state.sources import rows

import headrace as hr

State = dict[str, Any]
Rows = tuple[Any, ...]


def steps_of(loaders: Sequence[Iterable[Any]], most: int | None = None) -> list[list[Any]]:
    """The ranks' batches of each step, of so many, or all; ranks end after the same one."""
    iterators, steps = [iter(loader) for loader in loaders], list[list[Any]]()
    while len(steps) != most:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            break
        assert not any(batch is None for batch in batches)
        steps.append(batches)
    return steps


@dataclass
class Ranks:
    """The loaders of all ranks of a world, in one process."""

    loaders: Sequence[hr.DataLoader[Any]]

    def run(self, most: int | None = None) -> list[list[Rows]]:
        return [
            [tuple(batch) if isinstance(batch, list) else rows(batch) for batch in step]
            for step in steps_of(self.loaders, most)
        ]

    def states(self) -> list[State]:
        states: list[State] = json.loads(json.dumps([loader.state_dict() for loader in self.loaders]))
        return states

    def state(self) -> State:
        state, *others = self.states()
        assert all(other == state for other in others), "ranks differ"
        return state


def as_rank(rank: int, size: int, ranks: hr.Ranks | None = None) -> hr.Ranks:
    """The options of one of several ranks."""
    return replace(ranks or hr.Ranks(), rank=rank, world_size=size)


def world(
    stack: ExitStack, size: int, make: Callable[[], Any], states: State | Sequence[State] | None = None, **options: Any
) -> Ranks:
    loaders = []
    for rank in range(size):
        # All ranks read from one server, in one process: with many reads ahead most time goes to what nobody takes.
        settings = {"fetch": replace(QUICK, concurrency=4), "timeout": 30, **options}
        loader = hr.DataLoader(make(), **{**settings, "ranks": as_rank(rank, size, options.get("ranks"))})
        stack.enter_context(loader)
        if states is not None:
            loader.load_state_dict(states if isinstance(states, dict) else states[rank])
        loaders.append(loader)
    return Ranks(loaders)


def ran(
    size: int,
    make: Callable[[], Any],
    states: State | Sequence[State] | None = None,
    most: int | None = None,
    **options: Any,
) -> tuple[list[list[Rows]], list[State]]:
    with ExitStack() as stack:
        ranks = world(stack, size, make, states, **options)
        return ranks.run(most), ranks.states()


def whole(steps: Sequence[Sequence[Rows]]) -> list[Rows]:
    return [tuple(sample for batch in step for sample in batch) for step in steps]


def samples(steps: Sequence[Sequence[Rows]]) -> Counter[Any]:
    return Counter(sample for batch in whole(steps) for sample in batch)


def elastic_run(told: str, rng: random.Random, make: Callable[[], Any], most_ranks: int, **options: Any) -> int:
    """Two epochs through several worlds, compared with those of a single rank; how many resumes there were."""
    tail = options["ranks"].last_batch
    with ExitStack() as stack:
        alone = world(stack, 1, make, **options)
        expected = [whole(alone.run()) for _ in range(2)]
    got: list[list[Rows]] = [[], []]
    state, epoch, resumes, worlds = None, 0, 0, list[int]()
    while epoch < 2:
        left = len(expected[epoch]) - len(got[epoch])
        near_end = left <= 2 and tail == "short"  # what is left may be too little for many ranks
        worlds.append(1 if near_end else rng.randint(1, most_ranks))
        most = None if near_end or rng.random() < 0.2 else rng.randint(0, max(0, left - 2))
        with ExitStack() as stack:
            ranks = world(stack, worlds[-1], make, state, **options)
            resumes += state is not None
            assert {loader.epoch for loader in ranks.loaders} == {epoch}
            got[epoch] += whole(ranks.run(most))
            state = ranks.state()
            assert len(json.dumps(state)) <= 1024
            if most is None:
                assert state["epoch"] == epoch + 1
                epoch += 1
    for wanted, found in zip(expected, got, strict=True):
        same = len(wanted) - 2 if tail == "short" else len(wanted)  # the last steps are shared by all ranks of a world
        assert found[:same] == wanted[:same], f"{told}; {worlds}"
        assert sorted(sum(found, ())) == sorted(sum(wanted, ())), f"{told}; {worlds}"
    return resumes
