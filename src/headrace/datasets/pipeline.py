"""A stream's operators, sorted by who carries them out: what is compiled from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.datasets.fields import Selection
from headrace.datasets.narrowing import narrowed
from headrace.datasets.operators import Batch, EachSample, GroupOperator, Operator
from headrace.datasets.order_operators import EpochSize, OrderOperator, PassOperator, Repeat, Shuffle, Take
from headrace.datasets.ordering import OrderBuilder, Ordering
from headrace.datasets.source import KeepsKey, SampleSource, Traits, Wanted
from headrace.errors import OptionError
from headrace.formats.columns import ColumnDecoder, SampleColumns
from headrace.functions import is_async
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

    @property
    def steps(self) -> tuple[Step, ...]:
        """For each sample."""
        return tuple(operator.step for operator in self.each)

    @property
    def is_in_place(self) -> bool:
        """Whether each sample of the source comes under its own number or key, and by itself."""
        return not self.order.operators and not self.keeps and self.keeps_count and self.group is None

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
    def changing(self) -> tuple[str, ...]:
        """The names of what leaves samples out, or may, or gives others."""
        names = [step.name for step in self.steps if not step.keeps_count]
        names += [name for regroup in self.regroups for name in regroup.names]
        return (*names, *_limit_names(self.limit))

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
        return self.order.by_numbers is not None

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


def compiled(source: SampleSource, operators: Iterable[Operator]) -> Pipeline:
    """The operators by who carries them out.

    Raises:
        OptionError: two of them do not go together.
    """
    compiler = _Compiler(source)
    for operator in operators:
        operator.add_to(compiler)
    return compiler.pipeline()


class _Compiler:
    """Takes operators in, one after the other.

    A batch that only functions of batches follow is what the loader itself makes. If anything else follows it is made
    on the way, and another level of samples begins: those that come of it.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._order = OrderBuilder()
        self._keeps: list[KeepsKey] = []
        self._levels: list[tuple[GroupOperator | None, list[EachSample], int | None]] = [(None, [], None)]
        self._batch: Batch | None = None  # the last one, as long as only functions of batches follow
        self._after: list[EachSample] = []
        self._limit: int | None = None  # of the last level
        self._is_given = self._is_batched = False
        self._makes_batches = False  # what puts samples together, of which nobody knows how many

    def pipeline(self) -> Pipeline:
        """What they are together."""
        order = self._order.ordering()
        self._source.check_order(order)
        self._order.check_passes()
        _check_order(self._source.traits, order)
        (_, each, _), *regroups = self._levels
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
        )
        if self._source.is_compressed and not pipeline.is_by_number:
            order.check_as_read()
        return pipeline

    @property
    def _each(self) -> list[EachSample]:
        return self._levels[-1][1]

    @property
    def _is_counted(self) -> bool:
        """Whether there is one sample yet for each of the source."""
        return len(self._levels) == 1 and all(operator.step.keeps_count for operator in self._each)

    def add_each(self, operator: EachSample) -> None:
        step = operator.step
        if operator.is_collate and self._is_batched:
            raise OptionError(f".{operator.text}: its samples are batches already; put it right behind .batch()")
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
        self._close()
        self._batch, self._is_batched, self._makes_batches = operator, True, False

    def add_group(self, operator: GroupOperator) -> None:
        self._close()
        self._begin_level(operator, [])
        self._is_batched, self._makes_batches = False, operator.makes_batches

    def add_take(self, operator: Take) -> None:
        self._take(operator.samples * (1 if self._batch is None else self._batch.size))

    def add_order(self, operator: PassOperator) -> None:
        self._check_place(operator)
        if not self._is_counted and not operator.is_behind_filters:
            raise OptionError(
                f".{operator.text} behind .filter(): it would count the samples of the source, those that are left out "
                "too; move it before that"
            )
        self._order.add(operator)

    def add_shuffle(self, operator: Shuffle) -> None:
        self._check_place(operator)
        self._order.add_shuffle(operator)

    def add_repeat(self, operator: Repeat) -> None:
        self._check_place(operator, is_of_one=False)
        self._order.add_passes(operator)

    def add_epoch(self, operator: EpochSize) -> None:
        if self._is_counted or self._is_batched:
            self._check_place(operator)
            self._order.add_passes(operator)
            return
        if any(limit is not None for *_, limit in self._levels):
            raise OptionError(
                f".{operator.text} behind .take() or .epoch(), behind which others are made of samples: there is no "
                "more to begin again with than was taken there; have .epoch() in the place of that"
            )
        self._take(operator.samples)
        if self._source.traits.iterated:
            self._is_given = True
        elif self._order.operators or not self._source.is_endless:
            self._order.add_passes(Repeat(None))

    def _close(self) -> None:
        """More follows the last batch than functions of batches."""
        if self._batch is not None:
            self._begin_level(self._batch.on_the_way, self._after)
            self._batch, self._after = None, []

    def _begin_level(self, grouping: GroupOperator | None, each: list[EachSample]) -> None:
        """Another level begins: groups, or samples one by one behind a limit, which go through these steps."""
        self._levels.append((grouping, each, self._limit))
        self._limit, self._is_given = None, False

    def _take(self, samples: int) -> None:
        if self._limit is not None or not self._is_counted:
            self._limit = samples if self._limit is None else min(self._limit, samples)
        else:
            self._order.add_take(samples)

    @property
    def _asks_index(self) -> bool:
        """Whether an index tells what is asked of a key now: then nothing is read of what is left out."""
        is_first = len(self._levels) == 1 and all(operator.opens for operator in self._each)
        if not is_first or not self._order.has_only_shuffles or not self._source.answers_keys:
            return False
        return not self._source.is_compressed  # then it is read from its start

    def _check_place(self, operator: OrderOperator, *, is_of_one: bool = True) -> None:
        """Whether what concerns the order may come here.

        Args:
            is_of_one: it is about samples one by one, and not about all of a pass.
        """
        call = f".{operator.text}"
        if self._is_batched:
            raise OptionError(f"{call} behind .batch(): it is about samples; move it before .batch()")
        if self._limit is not None:
            raise OptionError(f"{call} behind .filter() and .take(): shuffle before .take()")
        many = next((one.text for one in self._each if one.step.kind == "many"), None)
        grouping, _, limit = self._levels[-1]
        if len(self._levels) > 1 or (many is not None and is_of_one):
            before = many or (f"take({limit})" if grouping is None else grouping.text)
            raise OptionError(
                f"{call} behind .{before}: it is about samples of the source, and those have become others; "
                "move it before that"
            )


def _limit_names(limit: int | None) -> tuple[str, ...]:
    return () if limit is None else (f"take({limit})",)


def _steps(operators: Iterable[EachSample]) -> tuple[Step, ...]:
    return tuple(operator.step for operator in operators)


def _check_order(traits: Traits, order: Ordering) -> None:
    by = None if order.shuffle is None else order.shuffle.by
    if traits.numbered and by == "buffer":
        raise OptionError(".shuffle(by='buffer') is for samples without numbers; 'window' and 'global' mix better")
    if order.by_numbers is not None and by in ("window", "shards", "within"):
        raise OptionError(f".{order.by_numbers.text} takes samples by their numbers, which windows have none of")
    if order.by_numbers is not None and not traits.numbered:
        raise OptionError(f".{order.by_numbers.text} needs samples that have numbers: shards need an index for that")
    if not traits.numbered:
        if by is not None and not order.is_shuffled_first:
            raise OptionError(".take() before .shuffle() needs samples that are counted; put it behind .shuffle()")
        if traits.iterated and by not in (None, "buffer"):
            raise OptionError(
                ".shuffle() of an AsyncIterableDataset: it decides its order itself; by='buffer' can be done"
            )
        order.check_as_read()
    if traits.iterated and order.passes is not None and order.passes.passes[1] is None:
        raise OptionError(".repeat() of an AsyncIterableDataset: let its aiter() repeat; .epoch() bounds it")
