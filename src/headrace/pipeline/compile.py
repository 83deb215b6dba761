"""Compilation of a stream's operators into a pipeline, with checks of their combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace._util.functions import is_async
from headrace.dataset.source import KeepsKey, SampleSource
from headrace.errors import printable
from headrace.ops.operator import EachSample, GroupOperator, Operator, OrderOperator, PassOperator
from headrace.pipeline.pipeline import Ordering, Pipeline, Regroup, refusal
from headrace.torch_compat.collate_by_torch import for_workers
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.ops.batch import Batch

_SOURCE_MOST = 100  # characters of the source's text in error notes


def compiled(source: SampleSource, operators: Iterable[Operator]) -> Pipeline:
    """Sort the operators by what executes them."""
    builder = PipelineBuilder(source)
    for operator in operators:
        if not operator.is_implied:
            builder.passed.append(operator.text)
        operator.add_to(builder)
    return builder.pipeline()


class PipelineBuilder:
    """A pipeline to which operators are added one by one, by `Operator.add_to`.

    The loader itself makes a batch that only functions of batches follow. If anything else follows, the batch becomes a
    grouping, and its results start another level of samples.

    Attributes:
        passed: Source and operators so far, for errors.
        is_given: See `Pipeline`.
        prefetch: See `Pipeline`.
        is_everywhere: See `Pipeline`.
    """

    def __init__(self, source: SampleSource) -> None:
        self.source, self.order = source, Ordering()
        self.passed = [printable(f"{source.text:.{_SOURCE_MOST}}")]
        self.is_given = self.is_everywhere = False
        self.prefetch: int | None = None
        self._keeps: list[KeepsKey] = []
        self._levels: list[tuple[GroupOperator | None, list[EachSample], int | None]] = [(None, [], None)]
        self._batch: Batch | None = None  # the last batching, while only functions of batches follow
        self._after: list[EachSample] = []
        self._limit: int | None = None  # limit of the last level
        self._is_batched = False
        self._makes_batches = source.makes_batches  # also if the last grouping makes batches of unknown number

    def pipeline(self) -> Pipeline:
        self.source.check_order(self.order)
        (_, each, _), *regroups = self._levels
        _check_after_packing((grouping, some) for grouping, some, _ in regroups)
        pipeline = Pipeline(
            self.source,
            self.order,
            tuple(self._keeps),
            tuple(each),
            self._limit,
            self._batch,
            _steps(self._after),
            self.is_given,
            tuple(Regroup(grouping, _steps(some), limit) for grouping, some, limit in regroups),
            self.has_batches,
            self.prefetch,
            self.is_everywhere,
        )
        _check_order(pipeline)
        return pipeline

    @property
    def each(self) -> list[EachSample]:
        """Steps of the last level."""
        return self._levels[-1][1]

    @property
    def is_in_epoch(self) -> bool:
        """True if samples have their places in the epoch already, so that its order cannot change."""
        return self.order.passes is not None or any(
            one.step.is_numbered for *_, each, _ in self._levels for one in each
        )

    @property
    def is_single(self) -> bool:
        """True if each sample is one of the source. Filters may have removed others."""
        is_first = len(self._levels) == 1 and self._limit is None and not self._is_batched
        return is_first and all(operator.step.kind != "many" for operator in self.each)

    @property
    def is_counted(self) -> bool:
        """True if each sample of the source has exactly one sample at this point."""
        return len(self._levels) == 1 and all(operator.step.keeps_count for operator in self.each)

    @property
    def has_batches(self) -> bool:
        return self._is_batched or self._makes_batches

    @property
    def batch_size(self) -> int:
        """Samples in each result that the stream gives at this point."""
        return 1 if self._batch is None else self._batch.size

    def add_each(self, operator: EachSample) -> None:
        step = replace(operator.step, passed=" → ".join(self.passed))
        if operator.is_collate:
            step = replace(step, fn=for_workers(step.fn) or step.fn)
        operator = replace(operator, step=step)
        if step.is_numbered and not (self.is_counted and self.is_single):
            self._add_numbered(operator, replace(step, is_shardable=False))
            return
        self._check_last(operator, keeps_count=step.keeps_count)
        if operator.is_collate and self.has_batches:
            raise refusal("batches of lists", f".{operator.text}", "operators of batches")
        if self._batch is not None and step.kind == "map" and not is_async(step.fn):
            self._after.append(operator)
            return
        self.close()
        if operator.keeps_key is not None and self._asks_index:
            self._keeps.append(operator.keeps_key)
            return
        if self._limit is not None and not step.keeps_count:
            self._begin_level(None, [])
        self.each.append(operator)
        self._is_batched = self._is_batched and not operator.is_unbatch
        self._makes_batches = operator.is_collate or (self._makes_batches and not operator.is_unbatch)

    def add_batch(self, operator: Batch) -> None:
        self._check_last(operator)
        self.close()
        self._batch, self._is_batched, self._makes_batches = operator, True, False

    def add_group(self, operator: GroupOperator) -> None:
        self._check_last(operator)
        self.close()
        self._begin_level(replace(operator, passed=" → ".join(self.passed)), [])
        self._is_batched, self._makes_batches = False, operator.makes_batches

    def add_order(self, operator: PassOperator) -> None:
        """Add a selection of samples: to the plan, or by the numbers of samples that others were made of."""
        is_planned = self.source.traits.numbered and self.is_counted and self.is_single and not self.is_in_epoch
        if operator.by_number is not None and not is_planned:
            step, most = operator.by_number
            self._add_numbered(operator, step)
            if most is not None:
                self.limit_samples(most)
            return
        if self.is_in_epoch or not self.is_single or not (self.is_counted or operator.is_behind_filters):
            made = ".filter(), .flat_map(), .enumerate(), .repeat(), .epoch(), batches, their limits, or another order"
            raise refusal("source's samples", f".{operator.text}", made)
        self.add_to_order(operator)

    def add_to_order(self, operator: OrderOperator) -> None:
        self.order = Ordering((*self.order.operators, operator))

    def limit_samples(self, samples: int) -> None:
        from headrace.ops.slice import Take

        if self._limit is None and self.is_counted:
            self.add_to_order(Take(samples))
        else:
            self._limit = samples if self._limit is None else min(self._limit, samples)

    def _add_numbered(self, operator: Operator, step: Step) -> None:
        """Begin a level: its step gets the numbers of the samples that come out of the levels before."""
        self._check_last(operator, keeps_count=step.keeps_count)
        self.close()
        self._begin_level(None, [EachSample(replace(step, passed=" → ".join(self.passed)))])

    def close(self) -> None:
        """Turn the last batching into a grouping, since more than functions of batches follows."""
        if self._batch is not None:
            self._begin_level(self._batch.on_the_way, self._after)
            self._batch, self._after = None, []

    def _begin_level(self, grouping: GroupOperator | None, each: list[EachSample]) -> None:
        """Start a level of groups, or of single samples after a limit, that pass through `each`."""
        self._levels.append((grouping, each, self._limit))
        self._limit, self.is_given = None, False

    @property
    def _asks_index(self) -> bool:
        """True if an index can answer a key filter here, so that filtered samples are not read."""
        is_first = len(self._levels) == 1 and all(operator.opens for operator in self.each)
        has_only_shuffle = len(self.order.operators) == (self.order.shuffle is not None)
        # a compressed source is read from its start
        return is_first and has_only_shuffle and self.source.answers_keys and not self.source.is_compressed

    def _check_last(self, operator: Operator, *, keeps_count: bool = False) -> None:
        grouping, *_ = self._levels[-1]
        if grouping is not None and grouping.max_wait_s is not None and not keeps_count:
            raise refusal("fixed groups", f".{operator.text}", f".{grouping.text}")
        if self.prefetch is not None:
            raise refusal("stream", f".{operator.text}", f".prefetch({self.prefetch})")


def _steps(operators: Iterable[EachSample]) -> tuple[Step, ...]:
    return tuple(operator.step for operator in operators)


def _check_order(pipeline: Pipeline) -> None:
    source, order = pipeline.source, pipeline.order
    if order.by_numbers is not None and not source.traits.numbered:
        raise refusal("numbers", f".{order.by_numbers.text}", source.name, remedy=source.without_numbers or "")
    if order.shuffle is not None:
        order.shuffle.check(pipeline)
    if pipeline.scatters is not None and source.only_in_order is not None:
        raise refusal("random access", f".{pipeline.scatters}", source.name, remedy=source.only_in_order)


def _check_after_packing(levels: Iterable[tuple[GroupOperator | None, Sequence[EachSample]]]) -> None:
    """Raise OptionError if a step after row packing does not keep one sequence per row."""
    packing = None
    for grouping, each in levels:
        name = each[0].text if grouping is None else grouping.name
        if packing is not None:
            raise refusal("documents", f".{name}", f".{packing}")
        if grouping is not None and grouping.packing is not None:
            packing = name
            wrong = next((operator for operator in each if not operator.step.keeps_count), None)
            if wrong is not None:
                raise refusal("documents", f".{wrong.text}", f".{packing}")
