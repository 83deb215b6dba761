"""`.take()`, `.slice()`, `.skip()` and `.shard()`: samples selected by a range of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace._util import check
from headrace.ops.operator import PassOperator
from headrace.order.orders import ENDLESS, FirstOf, Order, StretchOrder
from headrace.pipeline.compile import PipelineBuilder
from headrace.workers.tasks import Step


@dataclass(frozen=True, slots=True)
class Take(PassOperator):
    is_constant = is_steady = is_ascending = True
    needs_numbers = False
    samples: int

    @property
    def text(self) -> str:
        return f"take({self.samples})"

    @property
    def limit(self) -> int:
        return self.samples

    def count(self, count: int) -> int:
        return min(count, self.samples)

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return FirstOf(order, self.samples)

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.limit_samples(self.samples * builder.batch_size)


@dataclass(frozen=True, slots=True)
class Stretch(PassOperator):
    """The samples with numbers in a range, which depends on the number of all samples."""

    is_steady = is_ascending = True
    in_state = "pick"  # the check in a state covers the selected samples
    name: str
    numbers: Callable[[int], range]
    is_behind_filters: bool = False

    @property
    def text(self) -> str:
        return self.name

    @property
    def by_number(self) -> tuple[Step, int | None] | None:
        if self.is_behind_filters:
            return None
        numbers = self.numbers(ENDLESS)
        step = Step(self.name, "filter", partial(_is_in, numbers), is_numbered=True, is_shardable=False)
        return step, len(numbers) if numbers.stop < ENDLESS else None

    def count(self, count: int) -> int:
        return len(self.numbers(count))

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return StretchOrder(order, self.numbers(order.count))


def take(n: int) -> Take:
    return Take(check.whole(".take(): n", n))


def skip(n: int) -> Stretch:
    check.whole(".skip(): n", n)
    return Stretch(f"skip({n})", partial(_slice, n, None, 1))


def slice_of(start: int, stop: int | None, step: int) -> Stretch:
    check.whole(".slice(): start", start)
    check.whole_or_none(".slice(): stop", stop, start)
    check.whole(".slice(): step", step, 1)
    return Stretch(f"slice({start}, {stop}, {step})", partial(_slice, start, stop, step))


def shard(index: int, count: int) -> Stretch:
    check.whole(".shard(): index", index)
    check.whole(".shard(): count", count, index + 1)
    return Stretch(f"shard({index}, {count})", partial(_part, index, count), True)


def _is_in(numbers: range, numbered: tuple[int, object]) -> bool:
    return numbered[0] in numbers


def _slice(start: int, stop: int | None, step: int, count: int) -> range:
    return range(start, count if stop is None else min(stop, count), step)


def _part(index: int, parts: int, count: int) -> range:
    return range(index * count // parts, (index + 1) * count // parts)
