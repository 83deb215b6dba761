"""The levels of an epoch's inner stages."""

from __future__ import annotations

from headrace.scheduler.budget import Budget
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.group_level import GroupLevel
from headrace.scheduler.inner import InnerHost, Level
from headrace.scheduler.lane_level import LaneLevel
from headrace.scheduler.lane_map import LaneMap
from headrace.scheduler.recipe import GroupStage, InnerStage, LimitStage
from headrace.scheduler.wiring import EpochSpec


def levels_of(spec: EpochSpec, dispatch: Dispatch, budget: Budget, host: InnerHost) -> list[Level]:
    """The inner stages: another level begins where samples are put together, and behind a limit."""
    levels: list[list[InnerStage]] = [[]]
    for stage in spec.batches.inner:
        if isinstance(stage, GroupStage | LimitStage):
            levels.append([])
        levels[-1].append(stage)
    grouped = LaneLevel if isinstance(spec.position_map, LaneMap) else GroupLevel
    return [
        (grouped if any(isinstance(stage, GroupStage) for stage in stages) else Level)(
            number, stages, spec, dispatch, budget, host
        )
        for number, stages in enumerate(levels)
    ]
