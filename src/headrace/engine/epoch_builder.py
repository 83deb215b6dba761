"""Builds epochs from a pipeline: chains, stages and sources."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from headrace._util.context import RunningSample, begin_part, running_sample
from headrace._util.functions import is_async
from headrace._util.reads import Opens
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.open_readers import WINDOW_BYTES, EpochIO, TrainerCalls, apply
from headrace.engine.scheduler.epoch_spec import (
    BatchSpec,
    EpochSpec,
    GroupStage,
    InnerStage,
    Learned,
    LimitStage,
    LoopStage,
    WorkStage,
)
from headrace.fetch import Meter, Reader
from headrace.options import Settings
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Pipeline
from headrace.readers.by_key import AdaptiveConcurrency
from headrace.torch_compat import serialize
from headrace.torch_compat.collate_by_torch import collate_by_torch, for_workers
from headrace.workers.sample_chunks import Part
from headrace.workers.tasks import CHAINS, Chain, Step, StreamChains

if TYPE_CHECKING:
    from headrace.engine.scheduler.skip_rules import Skips
    from headrace.observe import LoaderMeters
    from headrace.session.runtime import Runtime

Wrap = Callable[[list[Any]], Part]
"""Makes a part from Python objects."""

_FINAL = 1  # number of the chain that makes batches
_LOOK_AHEAD = 2  # samples that may be ready beyond those to send, per concurrent read


class EpochBuilder:
    """Builds the epochs of a pipeline.

    It holds the user's data set and functions, so it belongs to the loader. Objects of the engine's thread must not
    keep it alive, as it may refer to the loader.

    Args:
        settings: Options of the loader.
        planning: Orders of the epochs. None: samples have no numbers.
        part: (number of ranks that share the samples, this rank).
        wrap: Makes a part of Python objects.
        meter: Counts how long coroutines block the loop.
        first_chain: Number of the first chain. Streams in the same workers have different numbers.
        is_input: True if its samples go to another epoch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        planning: Planning | None,
        part: tuple[int, int],
        wrap: Wrap,
        meter: Meter,
        *,
        first_chain: int = _FINAL,
        is_input: bool = False,
    ) -> None:
        pipeline = pipeline if planning is None else planning.pipeline  # equal, and avoids a second object
        self.pipeline, self.settings, self.planning, self.meter = pipeline, settings, planning, meter
        self.prefix, chains, inner = _stages(pipeline, settings, meter, wrap, first_chain, is_input=is_input)
        if is_input:
            del chains[first_chain]
        self.adaptive = AdaptiveConcurrency(settings.first_reads, settings.fetch_concurrency)
        begin = partial(begin_part, part)
        self.chains = StreamChains((number, replace(chain, begin=begin)) for number, chain in chains.items())
        self.batches = BatchSpec(
            inner=tuple(inner),
            chain=first_chain,
            batch_size=settings.batch_size,
            workers=max(1, settings.num_workers),
            drop_last=settings.drop_last,
            keeps_count=pipeline.keeps_count,
            look_ahead=_LOOK_AHEAD * settings.first_reads,
            in_order=settings.in_order,
            is_adaptive=not inner,  # the learned times exclude inner stages
            depth=settings.prefetch_factor,
            together=settings.together,
            publishes=pipeline.runs_user_code or not settings.use_slots,
            is_input=is_input,
        )
        self.learned = Learned(settings.use_slots)

    def window_bytes(self, plan: EpochPlan) -> int:
        """Bytes of samples buffered on this rank before the first is used. 0: not known."""
        if self.planning is not None:
            return self.planning.window_bytes // plan.steps.world
        is_shuffled = self.pipeline.source.traits.sharded and self.pipeline.order.shuffle is not None
        return WINDOW_BYTES if is_shuffled else 0

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        return self.pipeline.source.storage_options

    def data_set(self) -> str:
        """Return an identifier of the data for the read cache."""
        source, planning = self.pipeline.source, self.planning
        folder = next(iter(source.urls), "").partition("?")[0].rpartition("/")[0]
        return f"{source.name} {folder} {source.fingerprint() if planning is None else planning.fingerprint}"

    @property
    def opens(self) -> Opens | None:
        """The data set to open and close on the engine's loop, if any."""
        return self.pipeline.source.opens

    def forget_form(self) -> None:
        """Reset the sample spec for later epochs."""
        before = self.learned  # running epochs keep it
        self.learned = Learned(self.settings.use_slots, before.sample_s, batch_bytes=before.batch_bytes)

    def spec(self, plan: EpochPlan, reader: Reader, calls: TrainerCalls, meters: LoaderMeters) -> EpochSpec:
        """Return the spec of an epoch.

        Raises:
            OptionError: the samples cannot be read with these options.
        """
        gathered = self.batches.gathered(plan.batch_size)
        is_each = self.batches.begins_on_loop and self.pipeline.source.traits.iterated  # the next one may never come
        chunk = 1 if is_each else self.batches.chunk(gathered, self.learned.sample_s)
        rows = plan.packed_rows()
        source = self.pipeline.source.open(EpochIO(self, plan, reader, calls, gathered, chunk, rows))
        return EpochSpec(
            source=source,
            batches=replace(self.batches, batch_size=plan.batch_size),
            learned=self.learned,
            key=plan.key,
            boundaries=plan.boundaries(),
            position_map=plan.position_map(source.mark if self.planning is None else None, rows),
            limits=plan.left_to_keep,
            skips=self._skips(plan, calls, meters),
            pass_count=None if self.planning is None else self.planning.pass_count,
        )

    def _skips(self, plan: EpochPlan, calls: TrainerCalls, meters: LoaderMeters) -> Skips | None:
        policy = self.settings.skips
        if policy is None:
            return None
        from headrace.engine.scheduler.skip_rules import Quarantine, Skips

        counter = meters if policy.log is None else Quarantine(os.fspath(policy.log), plan, meters)
        return Skips(
            policy if policy.when is None else replace(policy, when=calls.decide),
            plan.number,
            counter,
            serialize.unpack_error,
            serialize.pack_error,
            plan.begin.skipped,
            needs_batches=plan.world > 1 and not plan.is_uneven,
        )

    async def prepare(self, runtime: Runtime) -> None:
        """Register the chains and open the data set. Called on the loop before the first epoch."""
        runtime.learn(self.chains)
        if self.opens is not None:
            await runtime.open(self.opens)


async def _through_loop(
    number: int, steps: Sequence[Step], wrap: Wrap, parts: Sequence[Part], positions: Sequence[int], key: int
) -> tuple[Part, Sequence[int]]:
    """Run steps on all samples of some parts at once. Returns results and the input index of each."""
    from headrace.workers.chain_runner import stage_key
    from headrace.workers.task_runner import open_part

    samples = list[object]()
    for part in parts:
        samples += open_part(part)
        part.release()
    made: list[list[object]] = [[]] * len(samples)

    async def one(k: int) -> None:
        running_sample.set(RunningSample(stage_key(key, number % CHAINS), positions[k]))
        made[k] = await apply(steps, samples[k], positions[k])

    async with anyio.create_task_group() as group:
        for k in range(len(samples)):
            group.start_soon(one, k)
    kept = [k for k, some in enumerate(made) for _ in some]
    return wrap([sample for some in made for sample in some]), kept


def _give_many(steps: Sequence[Step]) -> bool:
    return any(step.kind == "many" for step in steps)


def _stages(
    pipeline: Pipeline, settings: Settings, meter: Meter, wrap: Wrap, first_chain: int, *, is_input: bool
) -> tuple[tuple[Step, ...], dict[int, Chain], list[InnerStage]]:
    """Return (asynchronous steps run by the source, chains of workers, stages before the last)."""
    groups = _by_color(pipeline.narrowed_steps, meter)
    prefix: tuple[Step, ...] = ()
    if groups and groups[0][0] and pipeline.is_by_number:
        is_map = all(step.kind == "map" for step in groups[0][1])
        prefix = groups.pop(0)[1] if is_map else ()
    last: tuple[Step, ...] = ()
    if groups and not groups[-1][0] and pipeline.keeps_count and not is_input:
        last = groups.pop()[1]
    skips, collate = settings.skips is not None, for_workers(settings.collate)
    columns = pipeline.columns
    final = Chain(last, collate, pipeline.after, settings.init, columns if last else None, skips)
    chains = {first_chain: replace(final, unchanged=settings.unchanged)}
    inner: list[InnerStage] = []

    def add(groups: Sequence[tuple[bool, tuple[Step, ...]]], columns: Callable[..., Any] | None = None) -> None:
        for is_on_loop, steps in groups:
            number = first_chain + 1 + len(inner)
            if is_on_loop:
                inner.append(LoopStage(partial(_through_loop, number, steps, wrap), _give_many(steps)))
            else:
                chains[number] = Chain(steps, init=settings.init, columns=columns)
                inner.append(WorkStage(number, _give_many(steps)))

    def have_measured(measure: Step) -> None:
        if not inner or first_chain + len(inner) not in chains:
            add([(False, ())])
        number = first_chain + len(inner)
        chains[number] = replace(chains[number], measure=measure)

    add(groups, columns)  # `columns` covers all of them
    for grouping, steps in ((regroup.grouping, regroup.steps) for regroup in pipeline.regroups):
        if grouping is None:
            inner.append(LimitStage())
            add(_by_color(steps, meter))
            continue
        if grouping.measure is not None:
            have_measured(Step(grouping.text, "map", grouping.measure, passed=grouping.passed))
        groups, number = _by_color(steps, meter), first_chain + 1 + len(inner)
        first = groups.pop(0)[1] if groups and not groups[0][0] else ()
        chains[number] = Chain((), for_workers(grouping.collate) or collate_by_torch, first, settings.init, skips=skips)
        is_measured = grouping.measure is not None
        inner.append(GroupStage(number, grouping.batcher, grouping.text, is_measured, grouping.max_wait_s))
        add(groups)
    return prefix, chains, inner


def _by_color(steps: Sequence[Step], meter: Meter) -> list[tuple[bool, tuple[Step, ...]]]:
    return [
        (color, tuple(replace(step, fn=meter.held(step.name).watched(step.fn)) if color else step for step in some))
        for color, some in itertools.groupby(steps, lambda step: is_async(step.fn))
    ]
