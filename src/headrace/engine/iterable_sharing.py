"""One rank's samples of an iterable data set."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Self

from headrace._util.context import RunningSample, running_sample
from headrace.dataset.asynchronous import Asked, ShardInfo, running_shard
from headrace.engine.epoch_plan import EpochPlan
from headrace.errors import OptionError
from headrace.order import Cursor, Steps, sample_seed
from headrace.order.orders import ENDLESS
from headrace.pipeline.pipeline import Pipeline

_AHEAD = 1024  # positions computed at once


class Sharing:
    """Makes the iterators of an iterable data set for one rank and epoch."""

    def __init__(self, pipeline: Pipeline, plan: EpochPlan, samples: Callable[[], AsyncIterator[object]]) -> None:
        source = pipeline.source
        self._source, self._plan, self._samples = source, plan, samples
        self._is_by_position = plan.world > 1 and source.ranks_by == "position"
        self._steps: Steps | None = None
        if self._is_by_position:
            steps, count = plan.share or plan.steps, ENDLESS
            if plan.share is not None and pipeline.keeps_count:
                count = steps.begin.position + steps.left
            self._steps = Steps(Cursor.at(), count, steps.size, steps.tail, plan.rank, plan.world)

    def open(self, number: int, later: int = 0) -> AsyncIterator[object]:
        """Return an iterator over the samples of this rank.

        Args:
            number: Number of the first sample on this rank. The data set is positioned before it.
            later: Number of epochs after the plan's.
        """
        plan, epoch = self._plan, self._plan.number + later
        rank, world = (0, 1) if self._is_by_position else (plan.rank, plan.world)
        asked = Asked(ShardInfo(rank, world, epoch, plan.facts.seed))
        running_shard.set(asked)
        samples = self._samples()
        if self._steps is not None:
            return AtPositions(samples, self._steps, number, sample_seed(plan.facts.seed, epoch))
        return samples if world == 1 else OfItself(samples, asked, name_of(self._source.data))


class _Around:
    """An iterator wrapper that forwards states."""

    def __init__(self, samples: AsyncIterator[object]) -> None:
        self._samples = samples

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> object:
        if name not in ("state_dict", "load_state_dict", "aclose"):
            raise AttributeError(name)
        return getattr(self._samples, name)


class OfItself(_Around):
    """Samples of a data set that divides itself by rank. Checks that it asked for its rank."""

    def __init__(self, samples: AsyncIterator[object], asked: Asked, name: str) -> None:
        super().__init__(samples)
        self._asked, self._name = asked, name

    async def __anext__(self) -> object:
        sample = await anext(self._samples)
        if not self._asked.is_asked:
            raise OptionError(
                f"{self._name} has ranks_by='shard_info', but has given its first sample of the epoch without asking "
                "hr.shard_info(): each rank may get the same ones; ask it in aiter(), each time"
            )
        return sample


class AtPositions(_Around):
    """Selects one rank's positions from samples that are equal on all ranks.

    Args:
        samples: Continues after the sample before this rank's `number`-th.
        key: Seed of the data set's random numbers, equal on all ranks.
    """

    def __init__(self, samples: AsyncIterator[object], steps: Steps, number: int, key: int) -> None:
        super().__init__(samples)
        self._steps, self._number, self._key = steps, number, key
        self._at = int(steps.positions(number - 1, number)[0]) + 1 if number else 0  # position of the next sample
        self._mine = list[int]()  # next positions of this rank, in reverse order

    async def __anext__(self) -> object:
        if not self._mine:
            stop = min(self._number + _AHEAD, self._steps.count)
            if stop == self._number:
                raise StopAsyncIteration
            self._mine = self._steps.positions(self._number, stop).tolist()[::-1]
            self._number = stop
        mine, sample = self._mine.pop(), None
        while self._at <= mine:
            running_sample.set(RunningSample(self._key, self._at))
            sample = await anext(self._samples)
            self._at += 1
        return sample


def name_of(source: object) -> str:
    return type(source).__name__.lstrip("_")
