"""What the engine is to do for a loader: with the plan of each epoch it is all that goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.datasets.pipeline import Pipeline
from headrace.datasets.planning import Planning
from headrace.options import Settings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A pipeline with its settings: a value that pickles as far as the user's data set and functions do.

    Attributes:
        pipeline: the stream's.
        settings: what the loader was told, without the user's `on_error`.
        planning: the orders of the epochs; None: the samples have no numbers.
        asks: whether `on_error` is a function: it belongs to the trainer, may refer to all that is there, and is asked
            by `headrace.engine.calls.TrainerCalls`.
        part: how many ranks share the samples, and which of them this is.
    """

    pipeline: Pipeline
    settings: Settings
    planning: Planning | None
    asks: bool
    part: tuple[int, int] = (1, 0)

    @staticmethod
    def of(pipeline: Pipeline, settings: Settings, planning: Planning | None, part: tuple[int, int] = (1, 0)) -> Job:
        """The job of a loader."""
        pipeline = pipeline if planning is None else planning.pipeline  # as good, and then there is one of them
        skips = settings.skips
        if skips is None or skips.decide is None:
            return Job(pipeline=pipeline, settings=settings, planning=planning, asks=False, part=part)
        settings = replace(settings, skips=replace(skips, decide=None))
        return Job(pipeline=pipeline, settings=settings, planning=planning, asks=True, part=part)
