"""A stream's operators, sorted by who carries them out: what is compiled from them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.datasets.operators.delivering import NOTHING_SAID, Delivering
from headrace.datasets.operators.fields import Selection
from headrace.datasets.operators.narrowing import narrowed
from headrace.datasets.operators.values import Batch, EachSample, GroupOperator
from headrace.datasets.ordering import Ordering
from headrace.datasets.source import KeepsKey, SampleSource, Wanted
from headrace.formats.columns import ColumnDecoder, SampleColumns
from headrace.plan.lane_packing import LanePacking
from headrace.tasks import Step


@dataclass(frozen=True)
class Regroup:
    """Samples that are put together on the way, or counted, and what is done to each group, and to what comes of it.

    Attributes:
        grouping: puts them together; None: they go on one by one.
        steps: what is done then.
        limit: how many samples go into it at most; None: all that come.
    """

    grouping: GroupOperator | None
    steps: tuple[Step, ...]
    limit: int | None = None

    @property
    def name(self) -> str:
        """What it begins with."""
        return f"take({self.limit})" if self.grouping is None else self.grouping.text

    @property
    def names(self) -> tuple[str, ...]:
        """What a state says of it."""
        limit = () if self.grouping is None else _limit_names(self.limit)
        return (*limit, self.name, *(step.name for step in self.steps))


@dataclass(frozen=True)
class Pipeline:
    """The operators of a stream, sorted by who carries them out.

    Attributes:
        order: what decides which of the source's samples come, and when.
        keeps: of a source with an index, says of keys whether they are wanted.
        each: what is done to each sample.
        limit: how many samples come out of the last steps at most, where that is not the source's business.
        group: how the stream itself makes batches, if it does.
        after: for each of those batches.
        regroups: how samples are put together before that, one after the other, and taken apart; or go on one by one
            behind a limit.
        is_batched: whether what comes out are batches.
        is_given: whether the limit is what `.epoch()` says of an iterable data set, which begins again by itself.
        delivering: how what comes out is delivered.
    """

    source: SampleSource
    order: Ordering
    keeps: tuple[KeepsKey, ...]
    each: tuple[EachSample, ...]
    limit: int | None
    group: Batch | None
    after: tuple[Step, ...]
    is_given: bool = False
    regroups: tuple[Regroup, ...] = ()
    is_batched: bool = False
    delivering: Delivering = NOTHING_SAID

    @property
    def steps(self) -> tuple[Step, ...]:
        """For each sample."""
        return tuple(operator.step for operator in self.each)

    @property
    def is_in_place(self) -> bool:
        """Whether each sample of the source comes under its own number or key, and by itself."""
        is_of_source = not self.order.operators and not self.keeps and self.numbered is None
        return is_of_source and self.keeps_count and self.group is None

    @property
    def of_all(self) -> str | None:
        """What is about the epoch as a loader delivers it, and cannot be said of an input of several."""
        if self.numbered is not None:
            return self.numbered.name
        if self.delivering.is_everywhere:
            return "on_every_rank()"
        if self.unshardable is not None:
            return self.unshardable
        return None if self.delivering.prefetch is None else f"prefetch({self.delivering.prefetch})"

    @property
    def unshardable(self) -> str | None:
        """The first operator that ranks may not each do to samples of their own."""
        groups = [one.grouping for one in self.regroups if one.grouping is not None and not one.grouping.is_shardable]
        return next(
            (step.name for step in self._all_steps if not step.is_shardable), groups[0].text if groups else None
        )

    @property
    def separate(self) -> str | None:
        """The first operator that runs in worker processes alone."""
        return next((step.name for step in self._all_steps if step.is_separate), None)

    @property
    def _all_steps(self) -> tuple[Step, ...]:
        return (*self.steps, *(step for regroup in self.regroups for step in regroup.steps), *self.after)

    @property
    def prefetch(self) -> int | None:
        """How much of what comes out is made ahead at most; None: it is not said."""
        return self.delivering.prefetch

    @property
    def numbered(self) -> Step | None:
        """The step that gives samples the numbers of their places in the epoch."""
        return next((step for step in self.steps if step.is_numbered), None)

    @property
    def keeps_count(self) -> bool:
        """Whether each sample of the source becomes one sample of a batch."""
        return self.limit is None and not self.regroups and all(step.keeps_count for step in self.steps)

    @property
    def gives_many(self) -> str | None:
        """The first operator by which many samples may come of one, or one of many."""
        many = next((step.name for step in self.steps if step.kind == "many"), None)
        return many or next((regroup.name for regroup in self.regroups), None)

    @property
    def puts_together(self) -> str | None:
        """The first operator that puts samples together on the way."""
        return next((regroup.name for regroup in self.regroups if regroup.grouping is not None), None)

    @property
    def batched_by(self) -> str:
        """The operator that has made the batches that come out."""
        names = [regroup.name for regroup in self.regroups if regroup.grouping is not None]
        return names[-1] if names else "batch()"

    @property
    def timed(self) -> str | None:
        """What puts samples together that wait for one another for some time only."""
        return next((one.name for one in self.regroups if one.grouping and one.grouping.max_wait_s is not None), None)

    @property
    def changing(self) -> tuple[str, ...]:
        """The names of what leaves samples out, or may, or gives others."""
        names = [step.name for step in self.steps if not step.keeps_count]
        names += [name for regroup in self.regroups for name in regroup.names]
        return (*names, *_limit_names(self.limit))

    @property
    def packing(self) -> LanePacking | None:
        """How documents are packed in lanes; None: they are not, or it is known before what comes of them."""
        return next((one.grouping.packing for one in self.regroups if one.grouping and one.grouping.packing), None)

    @property
    def is_limited_within(self) -> bool:
        """Whether samples are counted, and no more than some number taken, before others are made of them."""
        return any(regroup.limit is not None for regroup in self.regroups)

    @property
    def has_numbers(self) -> bool:
        """Whether the samples have numbers before they are read."""
        return self.source.has_numbers(by_number=self.is_by_number, by_key=bool(self.keeps))

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """(how many passes an epoch is made of, how many samples `.epoch()` leaves of these); None: any number."""
        return (1, None) if self.order.passes is None else self.order.passes.passes

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end, as far as that can be told without asking how many samples there are."""
        return self.order.most is None and (self.passes[0] is None or self.source.is_endless)

    @property
    def given_count(self) -> int | None:
        """How many samples an epoch has whatever its source gives, and whatever filters leave; None: not said."""
        times, samples = self.passes
        if self.keeps_count:
            return None if samples is None else self.order.most
        if self.is_limited_within:
            return None
        if self.is_given:
            return self.limit
        is_bounded = self.order.most is not None or not (times is None or self.source.is_endless)
        return None if is_bounded else self.limit

    @property
    def is_by_number(self) -> bool:
        """Whether samples are got one by one, by their numbers; shards with an index can also be read as they lie."""
        if not self.source.traits.indexed:
            return self.source.traits.numbered
        shuffle = self.order.shuffle
        if shuffle is not None and (shuffle.by == "global" or not self.order.is_shuffled_first):
            return True
        # The rows of packed batches skip from document to document, which frames must be found for.
        return self.order.by_numbers is not None or (self.packing is not None and self.source.is_compressed)

    @property
    def wanted(self) -> Wanted | None:
        """Which fields of the source's samples the steps use, as far as that can be told; None: all."""
        selected = self._selected
        asked = tuple(frozenset((name,)) for operator in self.each for name in operator.asks)
        return None if selected is None else (*selected[1].wanted, *asked)

    @property
    def narrowed_steps(self) -> tuple[Step, ...]:
        """The same steps, but nothing is decoded, and no source is named, that is not asked for afterwards."""
        return tuple(operator.step for operator in self._narrowed)

    @property
    def columns(self) -> SampleColumns | None:
        """What does all that the steps do for whole row tables, where they are such that it can."""
        if len(self._narrowed) == 1:
            return self._narrowed[0].columns
        if len(self._narrowed) != 2:
            return None
        first, last = self._narrowed
        if first.decoder is None or last.selection is None or last.selection.keeps_source:
            return None
        return ColumnDecoder(first.decoder, last.selection.names)

    @property
    def _selected(self) -> tuple[int, Selection] | None:
        """(the number of the step, what it is) that selects fields, where those before it go by the field."""
        for k, operator in enumerate(self.each):
            if operator.selection is not None:
                return k, operator.selection
            if operator.decoder is None and not operator.names_source and not operator.opens_fields:
                return None
        return None

    @property
    def _narrowed(self) -> tuple[EachSample, ...]:
        if self._selected is None:
            return self.each
        first, selection = self._selected
        before = [narrow for operator in self.each[:first] if (narrow := narrowed(operator, selection)) is not None]
        return (*before, *self.each[first:])  # behind the selection there may be other fields of these names


def _limit_names(limit: int | None) -> tuple[str, ...]:
    return () if limit is None else (f"take({limit})",)
