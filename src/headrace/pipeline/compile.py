"""Compilation of a stream's operators into a pipeline, with checks of their combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from headrace._util import check
from headrace._util.functions import as_it_is, is_async
from headrace.dataset.source import KeepsKey, SampleSource
from headrace.errors import OptionError, printable
from headrace.ops.operator import Batch, EachSample, GroupOperator, Operator
from headrace.ops.prefetch import NOTHING_SAID, DeliveryOperator
from headrace.ops.shuffle import EpochSize, PassOperator, Repeat, Shuffle, Take
from headrace.pipeline.needs import refusal
from headrace.pipeline.ordering import OrderBuilder, Ordering
from headrace.pipeline.pipeline import Pipeline, Regroup
from headrace.torch_compat.collate_by_torch import for_workers
from headrace.workers.tasks import Step

WINDOW_SAMPLES, WINDOW_BATCHES = 2048, 16  # default windows for shuffling derived samples
_SOURCE_MOST = 100  # characters of the source's text in error notes


def compiled(source: SampleSource, operators: Iterable[Operator]) -> Pipeline:
    """Sort the operators by what executes them.

    Raises:
        OptionError: Two operators cannot be combined.
    """
    compiler = _Compiler(source)
    for operator in operators:
        if not operator.is_implied:
            compiler.passed.append(operator.text)
        operator.add_to(compiler)
    return compiler.pipeline()


class _Compiler:
    """Adds operators one by one.

    The loader itself makes a batch that only functions of batches follow. If anything else follows, the batch becomes a
    grouping, and its results start another level of samples.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.passed = [printable(f"{source.text:.{_SOURCE_MOST}}")]  # source and operators so far, for errors
        self._order = OrderBuilder()
        self._keeps: list[KeepsKey] = []
        self._levels: list[tuple[GroupOperator | None, list[EachSample], int | None]] = [(None, [], None)]
        self._batch: Batch | None = None  # the last batching, while only functions of batches follow
        self._after: list[EachSample] = []
        self._limit: int | None = None  # limit of the last level
        self._is_given = self._is_batched = False
        self._makes_batches = source.makes_batches  # also if the last grouping makes batches of unknown number
        self._delivering = NOTHING_SAID

    def pipeline(self) -> Pipeline:
        order = self._order.ordering()
        self._source.check_order(order)
        _check_order(self._source, order)
        (_, each, _), *regroups = self._levels
        _check_behind((grouping, some) for grouping, some, _ in regroups)
        pipeline = Pipeline(
            self._source,
            order,
            tuple(self._keeps),
            tuple(each),
            self._limit,
            self._batch,
            _steps(self._after),
            self._is_given,
            tuple(Regroup(grouping, _steps(some), limit) for grouping, some, limit in regroups),
            self._is_batched or self._makes_batches,
            self._delivering,
        )
        if self._source.is_compressed and not pipeline.is_by_number:
            order.check_as_read()
        if pipeline.scatters is not None and (advice := self._source.only_in_order) is not None:
            raise refusal("random access", f".{pipeline.scatters}", self._source.name, remedy=advice)
        return pipeline

    @property
    def _each(self) -> list[EachSample]:
        return self._levels[-1][1]

    @property
    def _is_in_epoch(self) -> bool:
        """True if samples have their places in the epoch already, so that its order cannot change."""
        return self._order.has_passes or any(one.step.is_numbered for *_, each, _ in self._levels for one in each)

    @property
    def _is_of_source(self) -> bool:
        """True if each sample is still one of the source, with its number."""
        return self._is_counted and self._is_single

    @property
    def _is_single(self) -> bool:
        """True if each sample is one of the source. Filters may have removed others."""
        is_first = len(self._levels) == 1 and self._limit is None and not self._is_batched
        return is_first and all(operator.step.kind != "many" for operator in self._each)

    @property
    def _is_counted(self) -> bool:
        """True if each sample of the source has exactly one sample at this point."""
        return len(self._levels) == 1 and all(operator.step.keeps_count for operator in self._each)

    def add_each(self, operator: EachSample) -> None:
        step = replace(operator.step, passed=" → ".join(self.passed))
        if operator.is_collate:
            step = replace(step, fn=for_workers(step.fn) or step.fn)
        operator = replace(operator, step=step)
        if step.is_numbered and not self._is_of_source:
            self._add_numbered(operator, replace(step, is_shardable=False))
            return
        self._check_last(operator, keeps_count=step.keeps_count)
        if operator.is_collate and (self._is_batched or self._makes_batches):
            raise refusal("batches of lists", f".{operator.text}", "operators of batches")
        if self._batch is not None and step.kind == "map" and not is_async(step.fn):
            self._after.append(operator)
            return
        self._close()
        if operator.keeps_key is not None and self._asks_index:
            self._keeps.append(operator.keeps_key)
            return
        if self._limit is not None and not step.keeps_count:
            self._begin_level(None, [])
        self._each.append(operator)
        self._is_batched = self._is_batched and not operator.is_unbatch
        self._makes_batches = operator.is_collate or (self._makes_batches and not operator.is_unbatch)

    def add_batch(self, operator: Batch) -> None:
        self._check_last(operator)
        self._close()
        self._batch, self._is_batched, self._makes_batches = operator, True, False

    def add_group(self, operator: GroupOperator) -> None:
        self._check_last(operator)
        self._close()
        self._begin_level(replace(operator, passed=" → ".join(self.passed)), [])
        self._is_batched, self._makes_batches = False, operator.makes_batches

    def add_take(self, operator: Take) -> None:
        self._take(operator.samples * self._batch_size)

    def add_order(self, operator: PassOperator) -> None:
        is_planned = self._source.traits.numbered and self._is_of_source and not self._is_in_epoch
        if operator.by_number is not None and not is_planned:
            step, most = operator.by_number
            self._add_numbered(operator, step)
            if most is not None:
                self._take(most)
            return
        if self._is_in_epoch or not self._is_single or not (self._is_counted or operator.is_behind_filters):
            raise OptionError(
                f".{operator.text} selects samples of the source by their numbers: put it before .filter(), "
                ".flat_map(), .enumerate(), .repeat(), .epoch(), batches and limits of what these give"
            )
        self._order.add(operator)

    def _add_numbered(self, operator: Operator, step: Step) -> None:
        """Begin a level: its step gets the numbers of the samples that come out of the levels before."""
        self._check_last(operator, keeps_count=step.keeps_count)
        self._close()
        self._begin_level(None, [EachSample(replace(step, passed=" → ".join(self.passed)))])

    def add_shuffle(self, operator: Shuffle) -> None:
        is_first = not self._order.operators or (self._source.traits.numbered and not self._order.is_shuffled)
        is_planned = self._is_single and not self._is_in_epoch and is_first
        if is_planned and self._source.can_permute(operator.by):
            self._order.add_shuffle(operator)
        else:
            self._add_window_shuffle(operator)

    def _add_window_shuffle(self, operator: Shuffle) -> None:
        """Permute windows of samples in the order in which they come."""
        from headrace.ops.bucket import EvenBatcher, WindowShuffle

        if operator.by not in ("auto", "window"):
            raise OptionError(
                f".{operator.text}: these samples are made of others, have an order of their own or are shuffled "
                "already, and can be shuffled in windows only, by='window'"
            )
        is_batched = self._is_batched or self._makes_batches
        size = operator.window or (WINDOW_BATCHES if is_batched else WINDOW_SAMPLES)
        name = operator.in_words("window", f", samples={size}")
        batcher = partial(EvenBatcher, size, drop_last=False)
        self.add_group(GroupOperator(name, batcher, collate=as_it_is, makes_batches=is_batched))
        self._each.append(EachSample(Step("shuffle", "many", WindowShuffle(operator.seed))))

    def add_repeat(self, operator: Repeat) -> None:
        self._order.add_passes(operator)

    def add_epoch(self, operator: EpochSize) -> None:
        samples = operator.samples * self._batch_size
        if self._is_counted:
            self._order.add_passes(replace(operator, samples=samples))
            return
        self._take(samples)
        if self._source.traits.iterated:
            self._is_given = True
        elif self._order.operators or not self._source.is_endless:
            self._order.add_passes(Repeat(None))

    @property
    def _batch_size(self) -> int:
        """Samples in each result that the stream gives at this point."""
        return 1 if self._batch is None else self._batch.size

    def _close(self) -> None:
        """Turn the last batching into a grouping, since more than functions of batches follows."""
        if self._batch is not None:
            self._begin_level(self._batch.on_the_way, self._after)
            self._batch, self._after = None, []

    def _begin_level(self, grouping: GroupOperator | None, each: list[EachSample]) -> None:
        """Start a level of groups, or of single samples after a limit, that pass through `each`."""
        self._levels.append((grouping, each, self._limit))
        self._limit, self._is_given = None, False

    def _take(self, samples: int) -> None:
        if self._limit is not None or not self._is_counted:
            self._limit = samples if self._limit is None else min(self._limit, samples)
        else:
            self._order.add_take(samples)

    @property
    def _asks_index(self) -> bool:
        """True if an index can answer a key filter here, so that filtered samples are not read."""
        is_first = len(self._levels) == 1 and all(operator.opens for operator in self._each)
        if not is_first or not self._order.has_only_shuffles or not self._source.answers_keys:
            return False
        return not self._source.is_compressed  # a compressed source is read from its start

    def add_delivering(self, operator: DeliveryOperator) -> None:
        self._delivering = operator.of(self._delivering)

    def _check_last(self, operator: Operator, *, keeps_count: bool = False) -> None:
        grouping, *_ = self._levels[-1]
        if grouping is not None and grouping.max_wait_s is not None and not keeps_count:
            raise refusal("fixed groups", f".{operator.text}", f".{grouping.text}")
        if self._delivering.prefetch is not None:
            raise refusal("stream", f".{operator.text}", f".prefetch({self._delivering.prefetch})")


def _steps(operators: Iterable[EachSample]) -> tuple[Step, ...]:
    return tuple(operator.step for operator in operators)


def _check_order(source: SampleSource, order: Ordering) -> None:
    traits, advice = source.traits, source.without_numbers
    by = None if order.shuffle is None else order.shuffle.by
    if traits.numbered and by == "buffer":
        raise OptionError(".shuffle(by='buffer') is for samples without numbers; 'window' and 'global' mix better")
    if order.by_numbers is not None and by in ("window", "shards", "within"):
        raise check.conflict(f".{order.by_numbers.text}", f".shuffle(by={by!r})", "windows have no numbers")
    if order.by_numbers is not None and not traits.numbered:
        raise refusal("numbers", f".{order.by_numbers.text}", source.name, remedy=advice or "")
    if by == "global" and traits.sharded and not traits.numbered:
        raise OptionError(
            ".shuffle(by='global') of shards without an index, or that are compressed: by='window' is what can be "
            f"done; {source.only_in_order or advice}"
        )
    if not traits.numbered:
        order.check_as_read()


def _check_behind(levels: Iterable[tuple[GroupOperator | None, Sequence[EachSample]]]) -> None:
    """Raise OptionError if a step after row packing does not keep one sequence per row."""
    packing = None
    for grouping, each in levels:
        name = "take()" if grouping is None else grouping.name
        if packing is not None:
            raise refusal("documents", f".{name}", f".{packing}")
        if grouping is not None and grouping.packing is not None:
            packing = name
            wrong = next((operator for operator in each if not operator.step.keeps_count), None)
            if wrong is not None:
                raise refusal("documents", f".{wrong.text}", f".{packing}")
