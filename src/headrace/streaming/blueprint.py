"""What a loader runs: the chains of its workers, how samples become batches, and what makes their sources.

It holds the user's data set and functions. It belongs to the loader and its iterators alone: what runs in the engine's
thread must not keep alive what may refer to the loader itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.mixture import Mixture
from headrace.datasets.operators import ToTuple, is_async
from headrace.datasets.shards import IndexedShards, Shards
from headrace.datasets.stream import Files, Pipeline
from headrace.formats.columns import ColumnDecoder
from headrace.formats.values import Decoder
from headrace.machinery import Machinery
from headrace.options import Settings
from headrace.scheduler.recipe import LoopStage, Recipe, WorkStage
from headrace.streaming.async_steps import apply
from headrace.streaming.sources import Sources
from headrace.tasks import Chain, Part, Step
from headrace.types import RunningSample, running_sample
from headrace.work.workbench import open_part, stage_key

_FINAL = 1  # the number of the chain that makes batches
_LOOK_AHEAD = 2  # as many samples as may be on their way, times this, may lie ready beyond what may be sent


class Blueprint:
    """A pipeline with its settings.

    Args:
        wrap: makes a part of Python objects.

    Attributes:
        chains: what workers do, by number.
        recipe: how samples become batches.
        sources: makes the source of each epoch.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings, wrap: Callable[[list[Any]], Part]) -> None:
        self._pipeline, self._settings, self._wrap = pipeline, settings, wrap
        prefix, self.chains, inner = _stages(pipeline, settings)
        self.recipe = Recipe(
            inner=tuple(self._inner_stage(number, stage) for number, stage in enumerate(inner, _FINAL + 1)),
            chain=_FINAL,
            batch_size=settings.batch_size,
            workers=max(1, settings.num_workers),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            look_ahead=_LOOK_AHEAD * settings.first_reads,
            in_order=settings.in_order,
            use_slots=settings.use_slots,
            is_adaptive=not inner,  # what the inner stages take is not what is learned
            depth=settings.prefetch_factor,
        )
        self.sources = Sources(pipeline, settings, prefix, self.recipe.chunk)

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """What the source's store is told."""
        source = self._pipeline.source
        return source.storage_options if isinstance(source, Shards | IndexedShards | Files | Mixture) else None

    @property
    def opens(self) -> AsyncDataset | AsyncIterableDataset | None:
        """The data set that is opened and closed on the engine's loop, if there is one."""
        source = self._pipeline.source
        return None if isinstance(source, Shards) else source

    def _inner_stage(self, number: int, stage: int | tuple[Step, ...]) -> WorkStage | LoopStage:
        return WorkStage(stage) if isinstance(stage, int) else LoopStage(partial(self._through_loop, number, stage))

    async def _through_loop(
        self, number: int, steps: Sequence[Step], part: Part, positions: Sequence[int], key: int
    ) -> tuple[Part, Sequence[int]]:
        """All samples of a part through asynchronous steps, at once; which of them are left."""
        samples: list[Any] = open_part(part)
        part.release()
        kept = [True] * len(samples)

        async def one(k: int) -> None:
            running_sample.set(RunningSample(stage_key(key, number), positions[k]))
            samples[k], kept[k] = await apply(steps, samples[k], positions[k])

        async with anyio.create_task_group() as group:
            for k in range(len(samples)):
                group.start_soon(one, k)
        left = [k for k, keep in enumerate(kept) if keep]
        return self._wrap([samples[k] for k in left]), left

    async def prepare(self, machinery: Machinery) -> None:
        """Teach the workers their chains, and open the data set; on the engine's loop, before the first epoch."""
        for number, chain in self.chains.items():
            machinery.learn(number, chain)
        if self.opens is not None:
            await machinery.open(self.opens)


def _stages(
    pipeline: Pipeline, settings: Settings
) -> tuple[tuple[Step, ...], dict[int, Chain], list[int | tuple[Step, ...]]]:
    """(asynchronous steps that the source does itself, the workers' chains, the stages before the last one)."""
    groups = [
        (color, tuple(steps)) for color, steps in itertools.groupby(pipeline.narrowed_steps, lambda s: is_async(s.fn))
    ]
    prefix: tuple[Step, ...] = ()
    if groups and groups[0][0] and (pipeline.is_by_number or isinstance(pipeline.source, AsyncIterableDataset)):
        is_map = all(step.kind == "map" for step in groups[0][1])
        prefix = groups.pop(0)[1] if is_map else ()
    last: tuple[Step, ...] = ()
    if groups and not groups[-1][0] and pipeline.keeps_count:
        last = groups.pop()[1]
    columns = _columns(last) if settings.use_slots else None
    chains = {_FINAL: Chain(last, settings.collate, pipeline.after, settings.init, columns, settings.skips is not None)}
    inner: list[int | tuple[Step, ...]] = []
    for number, (is_on_loop, steps) in enumerate(groups, _FINAL + 1):
        if is_on_loop:
            inner.append(steps)
        else:
            chains[number] = Chain(steps, init=settings.init)
            inner.append(number)
    return prefix, chains, inner


def _columns(steps: Sequence[Step]) -> ColumnDecoder | None:
    """What decodes whole row tables, where the steps are such that it may."""
    functions = [step.fn for step in steps]
    if len(functions) == 2 and isinstance(functions[0], Decoder) and isinstance(functions[1], ToTuple):
        return ColumnDecoder(functions[0], functions[1].names)
    return None
