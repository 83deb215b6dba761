"""The operators of a stream, sorted by what executes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from headrace.dataset.source import KeepsKey, SampleSource, Wanted
from headrace.errors import OptionError
from headrace.formats.decoders import ColumnDecoder, SampleColumns
from headrace.ops.operator import EachSample, EpochOperator, GroupOperator, OrderOperator, PassOperator
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.ops.batch import Batch
    from headrace.ops.select import Selection
    from headrace.ops.shuffle import Shuffle
    from headrace.order.packing import Packing


@dataclass(frozen=True)
class Ordering:
    """The operators that decide which samples of the source occur in an epoch, and when."""

    operators: tuple[OrderOperator, ...] = ()

    @cached_property
    def one_pass(self) -> tuple[PassOperator, ...]:
        """Operators that apply to each pass over the samples separately."""
        first = takewhile(lambda one: one.in_epoch is None, self.operators)
        return tuple(one for one in first if isinstance(one, PassOperator))

    @cached_property
    def passes(self) -> EpochOperator | None:
        """Operator that sets the number of passes. None: one."""
        return next((one.in_epoch for one in reversed(self.operators) if one.in_epoch is not None), None)

    @cached_property
    def shuffle(self) -> Shuffle | None:
        return next((one.shuffle for one in self.one_pass if one.shuffle is not None), None)

    @property
    def is_endless(self) -> bool:
        """True if the last operator repeats without end."""
        return bool(self.operators) and self.operators[-1] is self.passes and self.passes.passes == (None, None)

    @property
    def _of_all(self) -> Sequence[OrderOperator]:
        """Operators that apply to all passes together."""
        return self.operators[len(self.one_pass) :]

    @property
    def is_limited(self) -> bool:
        """True if `.take()` limits each pass."""
        return any(one.limit is not None for one in self.one_pass)

    @property
    def limits_of_all(self) -> list[int]:
        """Sample limits of `.take()` over all passes together."""
        return [one.limit for one in self._of_all if one.limit is not None and one is not self.passes]

    @property
    def by_numbers(self) -> PassOperator | None:
        """First operator that needs samples with numbers before they are read."""
        return next((one for one in self.one_pass if one.needs_numbers), None)

    @property
    def is_fixed(self) -> bool:
        """True if repeated calls for the same epoch give the same order."""
        return all(one.is_fixed for one in self.one_pass)

    @property
    def is_steady(self) -> bool:
        """True if the order is the same in every epoch, whatever the seed."""
        return all(one.is_steady for one in self.operators)

    @property
    def is_shuffled_first(self) -> bool:
        return self.shuffle is not None and self.shuffle is self.one_pass[0]

    @property
    def most(self) -> int | None:
        """Maximum number of samples in an epoch, whatever the source has. None: not set."""
        last = self.operators if self.passes is None else self._of_all
        return min((one.limit for one in last if one.limit is not None), default=None)

    def described(self, shuffle: str) -> list[str]:
        """Return the names of the operators in a state, with `shuffle` for the shuffle."""
        return [shuffle if one is self.shuffle else one.in_state for one in self.operators]


@dataclass(frozen=True)
class Regroup:
    """A grouping of samples, a limit on their number, or a step that counts them, and the steps after it.

    Attributes:
        grouping: Groups samples. None: they stay single.
        steps: Steps for each result.
        limit: Maximum number of samples that enter it. None: no limit.
    """

    grouping: GroupOperator | None
    steps: tuple[Step, ...]
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.names[0] if self.grouping is None else self.grouping.text

    @property
    def names(self) -> tuple[str, ...]:
        """Names in a state."""
        grouping = () if self.grouping is None else (self.grouping.text,)
        return (*_limit_names(self.limit), *grouping, *(step.name for step in self.steps))


@dataclass(frozen=True)
class Pipeline:
    """The operators of a stream, sorted by what executes them.

    Attributes:
        order: Operators that decide which samples of the source occur, and when.
        keeps: Key filters that an index answers.
        each: Steps for each sample.
        limit: Maximum number of samples after the last steps, if the source does not apply it.
        group: Final batching by the stream itself, if any.
        after: Steps for each of those batches.
        regroups: Groupings, unbatchings and limits before that, in order.
        is_batched: True if the results are batches.
        is_given: True if the limit is the `.epoch()` of an iterable data set, which repeats by itself.
        prefetch: Maximum number of results made ahead. None: the loader decides.
        is_everywhere: True if every rank gets all samples.
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
    prefetch: int | None = None
    is_everywhere: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(operator.step for operator in self.each)

    @property
    def is_in_place(self) -> bool:
        """True if each sample keeps the number or key of the source and stays single."""
        is_of_source = not self.order.operators and not self.keeps and self.numbered is None
        return is_of_source and self.keeps_count and self.group is None

    @property
    def is_in_passes(self) -> bool:
        """True if limits, counts or passes apply to a whole pass over the results, so that another pass is separate."""
        limits = (self.limit, *(regroup.limit for regroup in self.regroups))
        are_counted = any(step.is_numbered for step in self._all_steps) or any(limit is not None for limit in limits)
        is_read_to_limit = self.order.is_limited and (self.source.is_compressed or not self.source.traits.numbered)
        is_passed = self.order.passes is not None and not self.order.is_endless
        return is_passed or are_counted or is_read_to_limit

    @property
    def of_all(self) -> str | None:
        """First operator that concerns a whole epoch, so that the stream cannot be an input."""
        if self.numbered is not None:
            return self.numbered.name
        if self.is_everywhere:
            return "on_every_rank()"
        if self.unshardable is not None:
            return self.unshardable
        return None if self.prefetch is None else f"prefetch({self.prefetch})"

    @property
    def groupings(self) -> list[GroupOperator]:
        return [one.grouping for one in self.regroups if one.grouping is not None]

    @property
    def unshardable(self) -> str | None:
        """First operator that must see the samples of all ranks."""
        steps = (step.name for step in self._all_steps if not step.is_shardable)
        return next(steps, None) or next((one.text for one in self.groupings if not one.is_shardable), None)

    @property
    def counted_as_read(self) -> str | None:
        """First operator that selects samples by their numbers among those that come."""
        return next((step.name for step in self._all_steps if step.is_numbered and not step.keeps_count), None)

    @property
    def separate(self) -> str | None:
        return next((step.name for step in self._all_steps if step.is_separate), None)

    @property
    def _all_steps(self) -> tuple[Step, ...]:
        return (*self.steps, *(step for regroup in self.regroups for step in regroup.steps), *self.after)

    @property
    def runs_user_code(self) -> bool:
        """True if a function of the user runs in the workers."""
        return any(step.random is not None for step in self._all_steps)

    @property
    def numbered(self) -> Step | None:
        """Step that adds each sample's position in the epoch."""
        return next((step for step in self.steps if step.is_numbered), None)

    @property
    def keeps_count(self) -> bool:
        """True if each sample of the source becomes one sample of a batch."""
        return self.limit is None and not self.regroups and all(step.keeps_count for step in self.steps)

    @property
    def gives_many(self) -> str | None:
        """First operator that makes several samples of one, or one of several."""
        many = next((step.name for step in self.steps if step.kind == "many"), None)
        return many or next((regroup.name for regroup in self.regroups), None)

    @property
    def puts_together(self) -> str | None:
        return next((one.text for one in self.groupings), None)

    @property
    def batched_by(self) -> str:
        return self.groupings[-1].text if self.groupings else "batch()"

    @property
    def timed(self) -> str | None:
        return next((one.text for one in self.groupings if one.max_wait_s is not None), None)

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of the operators that may change the number of samples."""
        names = [step.name for step in self.steps if not step.keeps_count]
        names += [name for regroup in self.regroups for name in regroup.names]
        return (*names, *_limit_names(self.limit))

    @property
    def packing(self) -> Packing | None:
        """Row packing of documents. None: no packing, or it is planned before documents are read."""
        return next((one.packing for one in self.groupings if one.packing), None)

    @property
    def is_limited_within(self) -> bool:
        """True if a limit precedes a grouping or a step that changes the number of samples."""
        return any(regroup.limit is not None for regroup in self.regroups)

    @property
    def has_numbers(self) -> bool:
        return self.source.has_numbers(by_number=self.is_by_number, by_key=bool(self.keeps))

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """Number of passes in an epoch, and the sample limit of `.epoch()`. None: unlimited."""
        return (1, None) if self.order.passes is None else self.order.passes.passes

    @property
    def is_endless(self) -> bool:
        return self.order.most is None and (self.passes[0] is None or self.source.is_endless)

    @property
    def given_count(self) -> int | None:
        """Samples of an epoch, independent of the source's size and of filters. None: not fixed."""
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
        """True if samples are fetched one by one. Indexed shards can also be read sequentially."""
        if not self.source.traits.indexed:
            return self.source.traits.numbered
        shuffle = self.order.shuffle
        if shuffle is not None and (shuffle.by == "global" or not self.order.is_shuffled_first):
            return True
        if self.source.is_compressed:
            # Rows of packed batches jump between documents, so compression frames must be located.
            return self.order.by_numbers is not None or self.packing is not None
        return any(one.needs_numbers and not one.is_ascending for one in self.order.one_pass)

    @property
    def without_numbers(self) -> str | None:
        """Advice for errors if samples cannot be read by number, in the stream's order. None: they can."""
        shuffled = None if self.order.shuffle is None else self.source.only_in_order
        return self.source.without_numbers or shuffled

    @property
    def scatters(self) -> str | None:
        """First operator for which samples are fetched one by one, in another order than they are stored in."""
        return next((one.text for one in self.order.one_pass if self.is_by_number and not one.is_ascending), None)

    @property
    def wanted(self) -> Wanted | None:
        """Fields of the source's samples that the steps use, as far as known. None: all."""
        selected = self._selected
        asked = tuple(frozenset((name,)) for operator in self.each for name in operator.asks)
        return None if selected is None else (*selected[1].wanted, *asked)

    @property
    def narrowed_steps(self) -> tuple[Step, ...]:
        """Steps without the decoding and source naming that a later selection discards."""
        return tuple(operator.step for operator in self._narrowed)

    @property
    def columns(self) -> SampleColumns | None:
        """Applies all steps to whole row tables. None: the steps do not allow it."""
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
        """Index and value of the first selection, if all steps before it work field by field."""
        for k, operator in enumerate(self.each):
            if operator.selection is not None:
                return k, operator.selection
            if not operator.is_field_wise:
                return None
        return None

    @property
    def _narrowed(self) -> tuple[EachSample, ...]:
        if self._selected is None:
            return self.each
        first, selection = self._selected
        before = [narrow for operator in self.each[:first] if (narrow := operator.narrowed(selection)) is not None]
        return (*before, *self.each[first:])  # after the selection, other fields may have these names


def _limit_names(limit: int | None) -> tuple[str, ...]:
    return () if limit is None else (f"take({limit})",)


_BEFORE = "put {call} before {cause}"
_BOUND = "bound it first, by .take(n) or .epoch(samples=N)"

NEEDS = {  # need: why the operator needs it, and what to do
    "aligned branches": ("branches of .fork() have the same samples", "put {cause} before .fork(), or after {call}"),
    "async first": ("{call} runs `async def` functions before plain ones", "put {cause} before these, or after {call}"),
    "batches of lists": ("{call} makes batches of lists", "put {call} right after .batch()"),
    "documents": ("each row of a batch has one sequence", _BEFORE),
    "documents of this rank": ("the documents would depend on those of all ranks", _BEFORE),
    "end": ("{cause} has no end", _BOUND),
    "fixed groups": ("batches that time cuts differ in each run", ".map() may follow; put all else before it"),
    "global batches": ("it is about a whole epoch, and an input is a part of it", "put it after {call}"),
    "known number": ("the number of samples is known only after they are read", "put it after {call}"),
    "lasting numbers": ("samples have other numbers in each epoch, or those of several inputs", "put {call} before it"),
    "numbers": ("samples have no numbers before they are read", "make an index: headrace index URL…"),
    "passes": ("{cause} packs documents while they are read, and cannot begin again in an epoch", _BEFORE),
    "positions": ("samples would have other positions in the epoch", _BEFORE),
    "random access": ("samples are read in another order than they are stored in", _BEFORE),
    "same documents": ("each epoch would have other documents, or another number of sequences", _BEFORE),
    "same results": ("{call} would repeat them in each epoch", "put that step after {call}, or set random=False in it"),
    "separate inputs": ("samples would be read once for each branch", "zip them first, or give the stream itself"),
    "single samples": ("{call} takes single samples", _BEFORE),
    "source's samples": ("it goes by the numbers of the source's samples", "put it before them"),
    "steady order": ("pairs have the stored order of the left samples", "put {cause} after {call}"),
    "stored order": ("its inputs alternate, and documents are packed in their stored order", _BEFORE),
    "stream": ("{cause} is about the results of the whole stream", "put {cause} last"),
}


def refusal(need: str, call: str, cause: str, *, of: str = "", remedy: str = "") -> OptionError:
    """Return the error of an operator that cannot follow another.

    Args:
        need: What `call` needs and does not get: a key of `NEEDS`.
        call: The operator, as the user wrote it.
        cause: The earlier operator or source that does not provide it.
        of: The input that `cause` belongs to.
        remedy: What to do, if the table does not know it.
    """
    why, usual = (text.format(call=call, cause=cause) for text in NEEDS[need])
    return OptionError(f"{call} cannot follow {cause}{of and f' of {of}'}: {why}; {remedy or usual}")
