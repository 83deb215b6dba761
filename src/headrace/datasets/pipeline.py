"""A stream's operators, sorted by who carries them out: what is compiled from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.datasets.many import Unbatch
from headrace.datasets.operators import (
    Batch,
    EpochSize,
    Operator,
    OrderOperator,
    Repeat,
    Select,
    Shuffle,
    Take,
    ToTuple,
    is_async,
    is_key_filter,
)
from headrace.datasets.source import KeepsKey, SampleSource, Wanted
from headrace.errors import OptionError
from headrace.formats.opening import Opener
from headrace.formats.values import Decoder
from headrace.tasks import Step


@dataclass(frozen=True)
class Regroup:
    """Samples that are put together on the way, and what is done to each batch, and to what comes of it."""

    batch: Batch
    steps: tuple[Step, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What a state says of it."""
        last = ", drop_last=True" if self.batch.drop_last else ""
        return (f"batch({self.batch.size}{last})", *(step.name for step in self.steps))


@dataclass(frozen=True)
class Pipeline:
    """The operators of a stream, sorted by who carries them out.

    Attributes:
        order: what decides which of the source's samples come, and when.
        keeps: of a source with an index, says of keys whether they are wanted.
        steps: for each sample.
        limit: how many samples come out of the steps at most, where that is not the source's business.
        group: how the stream itself makes batches, if it does.
        after: for each of those batches.
        regroups: how samples are put together before that, one after the other, and taken apart.
        is_batched: whether what comes out are batches.
        is_given: whether the limit is what `.epoch()` says of an iterable data set, which begins again by itself.
    """

    source: SampleSource
    order: tuple[OrderOperator, ...]
    keeps: tuple[KeepsKey, ...]
    steps: tuple[Step, ...]
    limit: int | None
    group: Batch | None
    after: tuple[Step, ...]
    is_given: bool = False
    regroups: tuple[Regroup, ...] = ()
    is_batched: bool = False

    @property
    def keeps_count(self) -> bool:
        """Whether each sample of the source becomes one sample of a batch."""
        return self.limit is None and not self.regroups and all(step.keeps_count for step in self.steps)

    @property
    def gives_many(self) -> str | None:
        """The first operator by which many samples may come of one, or one of many."""
        many = next((step.name for step in self.steps if step.kind == "many"), None)
        return many or next((regroup.names[0] for regroup in self.regroups), None)

    @property
    def changing(self) -> tuple[str, ...]:
        """The names of what leaves samples out, or may, or gives others."""
        names = [step.name for step in self.steps if not step.keeps_count]
        names += [name for regroup in self.regroups for name in regroup.names]
        return (*names, *(() if self.limit is None else (f"take({self.limit})",)))

    @property
    def has_numbers(self) -> bool:
        """Whether the samples have numbers before they are read."""
        return self.source.has_numbers(by_number=self.is_by_number, by_key=bool(self.keeps))

    @property
    def shuffle(self) -> Shuffle | None:
        """How the samples are shuffled, if they are."""
        return next((operator for operator in self.order if isinstance(operator, Shuffle)), None)

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """(how many passes an epoch is made of, how many samples `.epoch()` leaves of these); None: any number."""
        times: int | None = 1
        limit: int | None = None
        for operator in self.order:
            if isinstance(operator, Repeat):
                times = operator.times
            elif isinstance(operator, EpochSize):
                times, limit = None, operator.samples
        return times, limit

    @property
    def given_count(self) -> int | None:
        """How many samples an epoch has whatever its source gives, and whatever filters leave; None: not said."""
        times, samples = self.passes
        repeats = [k for k, operator in enumerate(self.order) if isinstance(operator, Repeat | EpochSize)]
        last = repeats[0] if repeats else 0
        takes = [operator.samples for operator in self.order[last:] if isinstance(operator, Take)]
        if self.keeps_count:
            return None if samples is None else min([samples, *takes])
        if self.is_given:
            return self.limit
        is_bounded = samples is not None or bool(takes) or not (times is None or self.source.is_endless)
        return None if is_bounded else self.limit

    @property
    def is_by_number(self) -> bool:
        """Whether samples are got one by one, by their numbers; shards with an index can also be read as they lie."""
        if not self.source.traits.indexed:
            return self.source.traits.numbered
        shuffles = [k for k, operator in enumerate(self.order) if isinstance(operator, Shuffle)]
        is_global = any(isinstance(o, Shuffle) and o.by == "global" for o in self.order)
        return is_global or shuffles not in ([], [0]) or any(o.needs_numbers for o in self.order)

    @property
    def wanted(self) -> Wanted | None:
        """Which fields of the source's samples the steps use, as far as that can be told; None: all."""
        for step in self.steps:
            if isinstance(step.fn, Select | ToTuple):
                return tuple(frozenset(names.split(";")) for names in step.fn.names if not names.startswith("__"))
            if not isinstance(step.fn, Decoder) and not getattr(step.fn, "is_bare", False):
                return None
        return None

    @property
    def narrowed_steps(self) -> tuple[Step, ...]:
        """The same steps, but nothing is decoded, and no source is named, that is not asked for afterwards."""
        wanted = self.wanted
        if wanted is None:
            return self.steps
        first = next(k for k, step in enumerate(self.steps) if isinstance(step.fn, Select | ToTuple))
        selects: Any = self.steps[first].fn
        is_named = isinstance(selects, Select) or any("__source__" in names.split(";") for names in selects.names)
        fields = frozenset[str]().union(*wanted)
        before: list[Step] = []
        for step in self.steps[:first]:
            if isinstance(step.fn, Decoder):
                before.append(replace(step, fn=step.fn.only(fields)))
            elif is_named:
                before.append(step)
        return (*before, *self.steps[first:])  # behind the selection there may be other fields of these names


def compiled(source: SampleSource, operators: Iterable[Operator]) -> Pipeline:
    """The operators by who carries them out.

    Raises:
        OptionError: two of them do not go together.
    """
    compiler = _Compiler(source)
    for operator in operators:
        compiler.add(operator)
    return compiler.pipeline()


class _Compiler:
    """Takes operators in, one after the other.

    A batch that only functions of batches follow is what the loader itself makes. If anything else follows it is made
    on the way, and another level of samples begins: those that come of it.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._order: list[OrderOperator] = []
        self._keeps: list[KeepsKey] = []
        self._levels: list[tuple[Batch | None, list[Step]]] = [(None, [])]
        self._batch: Batch | None = None  # the last one, as long as only functions of batches follow
        self._after: list[Step] = []
        self._limit: int | None = None
        self._is_given = self._is_batched = False

    def add(self, operator: Operator) -> None:
        """The next one."""
        if isinstance(operator, Step):
            self._add_step(operator)
        elif isinstance(operator, Batch):
            self._close()
            self._batch, self._is_batched = operator, True
        elif isinstance(operator, Take):
            self._take(operator.samples * (1 if self._batch is None else self._batch.size))
        else:
            self._add_order(operator)

    def pipeline(self) -> Pipeline:
        """What they are together."""
        _check_order(self._source, self._order)
        (_, steps), *regroups = self._levels
        return Pipeline(
            self._source,
            tuple(self._order),
            tuple(self._keeps),
            tuple(steps),
            self._limit,
            self._batch,
            tuple(self._after),
            self._is_given,
            tuple(Regroup(batch, tuple(some)) for batch, some in regroups if batch is not None),
            self._is_batched,
        )

    @property
    def _steps(self) -> list[Step]:
        return self._levels[-1][1]

    @property
    def _is_counted(self) -> bool:
        """Whether there is one sample yet for each of the source."""
        return len(self._levels) == 1 and all(step.keeps_count for step in self._steps)

    def _add_step(self, step: Step) -> None:
        if self._batch is not None and step.kind == "map" and not is_async(step.fn):
            self._after.append(step)
            return
        self._close()
        if len(self._levels) == 1 and _is_about_keys(self._source, step, self._order, self._steps):
            self._keeps.append(step.fn.function)  # type: ignore[attr-defined]
            return
        if self._limit is not None and not step.keeps_count:
            which = "filter" if step.kind == "filter" else "do that"
            raise OptionError(f".{step.name} behind .filter() and .take(): {which} before .take()")
        self._steps.append(step)
        self._is_batched = self._is_batched and not isinstance(step.fn, Unbatch)

    def _close(self) -> None:
        """More follows the last batch than functions of batches."""
        if self._batch is None:
            return
        if self._limit is not None:
            raise OptionError(
                f".take() and .epoch() behind .filter() and .flat_map(), and before .{self._batch.text}, behind which "
                "batches are taken apart or put together again: put them behind that"
            )
        self._levels.append((self._batch, self._after))
        self._batch, self._after = None, []

    def _take(self, samples: int) -> None:
        if self._limit is not None or not self._is_counted:
            self._limit = samples if self._limit is None else min(self._limit, samples)
        else:
            self._order.append(Take(samples))

    def _add_order(self, operator: OrderOperator) -> None:
        call = f".{operator.text}"
        if self._is_batched:
            raise OptionError(f"{call} behind .batch(): it is about samples; move it before .batch()")
        if isinstance(operator, EpochSize) and not self._is_counted:
            self._take(operator.samples)
            if self._source.traits.iterated:
                self._is_given = True
            elif self._order or not self._source.is_endless:
                self._order.append(Repeat(None))
            return
        if self._limit is not None:
            raise OptionError(f"{call} behind .filter() and .take(): shuffle before .take()")
        many = next((step.name for step in self._steps if step.kind == "many"), None)
        if len(self._levels) > 1 or (many is not None and not isinstance(operator, Repeat)):
            raise OptionError(
                f"{call} behind .{many or 'batch()'}: it is about samples of the source, and those have become others; "
                "move it before that"
            )
        self._order.append(operator)


def _is_about_keys(source: SampleSource, step: Step, order: Sequence[OrderOperator], steps: Sequence[Step]) -> bool:
    """Whether an index can tell what a step asks: then nothing is read of what it leaves out."""
    is_first = all(isinstance(one.fn, Opener) for one in steps)
    is_first = is_first and all(isinstance(operator, Shuffle) for operator in order)
    if not is_first or not source.traits.indexed or not is_key_filter(step):
        return False
    return not source.is_compressed  # then it is read from its start


def _check_order(source: SampleSource, order: Sequence[OrderOperator]) -> None:
    shuffles = [k for k, operator in enumerate(order) if isinstance(operator, Shuffle)]
    if len(shuffles) > 1:
        raise OptionError("the stream is shuffled twice; once does it")
    source.check_order(order)
    repeats = [k for k, operator in enumerate(order) if isinstance(operator, Repeat | EpochSize)]
    if len(repeats) > 1:
        raise OptionError("of .repeat() and .epoch() a stream can have one")
    if repeats and not all(isinstance(operator, Take) for operator in order[repeats[0] + 1 :]):
        raise OptionError(".repeat() and .epoch() come behind what decides the order: only .take() can follow")
    if source.traits.numbered and any(isinstance(o, Shuffle) and o.by == "buffer" for o in order):
        raise OptionError(".shuffle(by='buffer') is for samples without numbers; 'window' and 'global' mix better")
    if any(operator.needs_numbers for operator in order) and any(
        o.by in ("window", "shards", "within") for o in order if isinstance(o, Shuffle)
    ):
        raise OptionError(".sample() and .slice() take samples by their numbers, which windows have none of")
    if not source.traits.numbered and any(operator.needs_numbers for operator in order):
        raise OptionError(".sample() and .slice() need samples that have numbers: shards need an index for that")
    if not source.traits.numbered and repeats and any(isinstance(o, Take) for o in order[: repeats[0]]):
        raise OptionError(".take() before .repeat() or .epoch() needs samples that are counted; put it behind them")
    if not source.traits.numbered and shuffles:
        if shuffles[0] > 0:
            raise OptionError(".take() before .shuffle() needs samples that are counted; put it behind .shuffle()")
        by = order[0].by  # type: ignore[union-attr]
        if source.traits.iterated and by != "buffer":
            raise OptionError(
                ".shuffle() of an AsyncIterableDataset: it decides its order itself; by='buffer' can be done"
            )
        if by in ("global", "within"):
            raise OptionError(
                f".shuffle(by={by!r}) of shards without an index: by='window' is what can be done, "
                "or make an index: headrace index URL…, and hr.stream(…, index='auto')"
            )
    if source.traits.iterated and any(isinstance(o, Repeat) for o in order):
        raise OptionError(".repeat() of an AsyncIterableDataset: let its aiter() repeat; .epoch() bounds it")
