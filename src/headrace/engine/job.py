"""The description of a loader's work for the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.datasets.pipeline import Pipeline
from headrace.datasets.planning import Planning
from headrace.options import Settings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A pipeline with its settings. Can be pickled if the user's data set and functions can.

    Attributes:
        settings: Options of the loader, without the user's `on_error`.
        planning: Orders of the epochs. None: samples have no numbers.
        asks: True if `on_error` is a function. It stays in the trainer and is called by `TrainerCalls`.
        part: (number of ranks that share the samples, this rank).
    """

    pipeline: Pipeline
    settings: Settings
    planning: Planning | None
    asks: bool
    part: tuple[int, int] = (1, 0)

    @staticmethod
    def of(pipeline: Pipeline, settings: Settings, planning: Planning | None, part: tuple[int, int] = (1, 0)) -> Job:
        pipeline = pipeline if planning is None else planning.pipeline  # equal, and avoids a second object
        skips = settings.skips
        if skips is None or skips.decide is None:
            return Job(pipeline=pipeline, settings=settings, planning=planning, asks=False, part=part)
        settings = replace(settings, skips=replace(skips, decide=None))
        return Job(pipeline=pipeline, settings=settings, planning=planning, asks=True, part=part)
