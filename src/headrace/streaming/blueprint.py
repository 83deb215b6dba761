"""What a loader runs: the chains of its workers, how samples become batches, and what makes their sources.

It holds the user's data set and functions. It belongs to the loader and its iterators alone: what runs in the engine's
thread must not keep alive what may refer to the loader itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from headrace.datasets.pipeline import Pipeline
from headrace.fetch import Meter
from headrace.functions import is_async
from headrace.options import Settings
from headrace.parts import Part
from headrace.protocols import Opens
from headrace.running import RunningSample, running_sample
from headrace.runtime import Runtime
from headrace.scheduler.recipe import BatchSpec, GroupStage, InnerStage, Learned, LoopStage, WorkStage
from headrace.streaming.async_steps import apply
from headrace.streaming.sources import Sources
from headrace.tasks import Chain, Step
from headrace.torch_compat.collate import default_collate
from headrace.work.maker import stage_key
from headrace.work.task_runner import open_part

_FINAL = 1  # the number of the chain that makes batches
_LOOK_AHEAD = 2  # as many samples as may be on their way, times this, may lie ready beyond what may be sent


class Blueprint:
    """A pipeline with its settings.

    Args:
        wrap: makes a part of Python objects.
        meter: where it is counted how long coroutines hold the loop.

    Attributes:
        chains: what workers do, by number.
        batches: how samples become batches.
        learned: what its epochs have found out about them.
        sources: makes the source of each epoch.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings, wrap: Callable[[list[Any]], Part], meter: Meter) -> None:
        self._pipeline, self._settings, self._wrap = pipeline, settings, wrap
        prefix, self.chains, inner = _stages(pipeline, settings, meter, self._loop_stage)
        self.batches = BatchSpec(
            inner=tuple(inner),
            chain=_FINAL,
            batch_size=settings.batch_size,
            workers=max(1, settings.num_workers),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            look_ahead=_LOOK_AHEAD * settings.first_reads,
            in_order=settings.in_order,
            is_adaptive=not inner,  # what the inner stages take is not what is learned
            depth=settings.prefetch_factor,
        )
        self.learned = Learned(settings.use_slots)
        self.sources = Sources(pipeline, settings, prefix, meter)

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        """What the source's store is told."""
        return self._pipeline.source.storage_options

    @property
    def opens(self) -> Opens | None:
        """The data set that is opened and closed on the engine's loop, if there is one."""
        return self._pipeline.source.opens

    def forget_form(self) -> None:
        """Samples of the epochs that begin from now on may have another form."""
        before = self.learned  # epochs that have begun go by that
        self.learned = Learned(self._settings.use_slots, before.sample_s, batch_bytes=before.batch_bytes)

    def chunk(self, batch_size: int) -> int:
        """How many samples of a batch are handed on together."""
        return self.batches.chunk(batch_size, self.learned.sample_s)

    def _loop_stage(self, number: int, steps: Sequence[Step]) -> LoopStage:
        """Asynchronous steps; by the stage's number its samples' random numbers differ from others'."""
        return LoopStage(partial(self._through_loop, number, steps), _give_many(steps))

    async def _through_loop(
        self, number: int, steps: Sequence[Step], part: Part, positions: Sequence[int], key: int
    ) -> tuple[Part, Sequence[int]]:
        """All samples of a part through asynchronous steps, at once; which of them are left."""
        samples: list[object] = open_part(part)
        part.release()
        made: list[list[object]] = [[]] * len(samples)

        async def one(k: int) -> None:
            running_sample.set(RunningSample(stage_key(key, number), positions[k]))
            made[k] = await apply(steps, samples[k], positions[k])

        async with anyio.create_task_group() as group:
            for k in range(len(samples)):
                group.start_soon(one, k)
        kept = [k for k, some in enumerate(made) for _ in some]
        return self._wrap([sample for some in made for sample in some]), kept

    async def prepare(self, runtime: Runtime) -> None:
        """Teach the workers their chains, and open the data set; on the engine's loop, before the first epoch."""
        for number, chain in self.chains.items():
            runtime.learn(number, chain)
        if self.opens is not None:
            await runtime.open(self.opens)


def _give_many(steps: Sequence[Step]) -> bool:
    return any(step.kind == "many" for step in steps)


def _stages(
    pipeline: Pipeline, settings: Settings, meter: Meter, loop_stage: Callable[[int, Sequence[Step]], LoopStage]
) -> tuple[tuple[Step, ...], dict[int, Chain], list[InnerStage]]:
    """(asynchronous steps that the source does itself, the workers' chains, the stages before the last one)."""
    groups = _by_color(pipeline.narrowed_steps, meter)
    prefix: tuple[Step, ...] = ()
    if groups and groups[0][0] and (pipeline.is_by_number or pipeline.source.traits.iterated):
        is_map = all(step.kind == "map" for step in groups[0][1])
        prefix = groups.pop(0)[1] if is_map else ()
    last: tuple[Step, ...] = ()
    if groups and not groups[-1][0] and pipeline.keeps_count:
        last = groups.pop()[1]
    columns = pipeline.columns if last and settings.use_slots else None
    skips = settings.skips is not None
    chains = {_FINAL: Chain(last, settings.collate, pipeline.after, settings.init, columns, skips)}
    inner: list[InnerStage] = []

    def add(groups: Sequence[tuple[bool, tuple[Step, ...]]]) -> None:
        for is_on_loop, steps in groups:
            number = _FINAL + 1 + len(inner)
            if is_on_loop:
                inner.append(loop_stage(number, steps))
            else:
                chains[number] = Chain(steps, init=settings.init)
                inner.append(WorkStage(number, _give_many(steps)))

    def have_measured(measure: Callable[[Any], int]) -> None:
        """The last stage before a level of groups does it, where workers run that."""
        if not inner or _FINAL + len(inner) not in chains:
            add([(False, ())])
        number = _FINAL + len(inner)
        chains[number] = replace(chains[number], measure=measure)

    add(groups)
    for grouping, steps in ((regroup.grouping, regroup.steps) for regroup in pipeline.regroups):
        if grouping.measure is not None:
            have_measured(grouping.measure)
        groups, number = _by_color(steps, meter), _FINAL + 1 + len(inner)
        first = groups.pop(0)[1] if groups and not groups[0][0] else ()
        chains[number] = Chain((), grouping.collate or default_collate, first, settings.init, skips=skips)
        inner.append(GroupStage(number, grouping.batcher, grouping.text, grouping.measure is not None))
        add(groups)
    return prefix, chains, inner


def _by_color(steps: Sequence[Step], meter: Meter) -> list[tuple[bool, tuple[Step, ...]]]:
    """(whether they run on the loop, steps), of those that follow each other and run at one place."""
    return [
        (color, tuple(_watched(step, meter) if color else step for step in some))
        for color, some in itertools.groupby(steps, lambda step: is_async(step.fn))
    ]


def _watched(step: Step, meter: Meter) -> Step:
    return replace(step, fn=meter.held(step.name).watched(step.fn))
