"""The samples of an iterable data set as one rank gets them: its own, or those at its positions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Self

from headrace.datasets.pipeline import Pipeline
from headrace.datasets.sharing import Asked, ShardInfo, running_shard
from headrace.engine.epoch_plan import EpochPlan
from headrace.errors import OptionError
from headrace.plan import Cursor, Steps, sample_seed
from headrace.plan.order import ENDLESS
from headrace.running import RunningSample, running_sample

_AHEAD = 1024  # positions that are found at once


class Sharing:
    """Makes the iterators of an iterable data set in one epoch, each of which is told its part.

    Args:
        pipeline: the data set's.
        plan: the epoch's.
        samples: makes an iterator over all that the data set gives here.
    """

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
        """The samples of this rank.

        Args:
            number: of the first one, as this rank counts them: the data set stands before it.
            later: how many epochs later than the plan's they are of.
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
    """An iterator around another one, with the states of that."""

    def __init__(self, samples: AsyncIterator[object]) -> None:
        self._samples = samples

    def __aiter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> object:
        if name not in ("state_dict", "load_state_dict", "aclose"):
            raise AttributeError(name)
        return getattr(self._samples, name)


class OfItself(_Around):
    """Samples of a data set that gives each rank its own, if it has asked which they are."""

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
    """Of samples that are the same on all ranks, those at the positions of one of them; the others are left.

    Args:
        samples: they go on behind the sample before the `number`-th of this rank.
        steps: what is this rank's.
        number: of the first sample that is given.
        key: of the random numbers that the data set draws: the same on all ranks.
    """

    def __init__(self, samples: AsyncIterator[object], steps: Steps, number: int, key: int) -> None:
        super().__init__(samples)
        self._steps, self._number, self._key = steps, number, key
        self._at = int(steps.positions(number - 1, number)[0]) + 1 if number else 0  # of the next one of all
        self._mine = list[int]()  # the next positions of this rank, in reverse

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
    """What errors call it."""
    return type(source).__name__.lstrip("_")
