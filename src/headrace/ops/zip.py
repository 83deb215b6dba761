"""`.zip()`: tuples of samples at the same positions."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from headrace._util import check
from headrace._util.context import RunningSample, running_sample
from headrace._util.functions import as_it_is
from headrace.dataset.stream import Stream
from headrace.formats.pinned_object import for_each
from headrace.ops.combined import CombinedSpec, InputsDataset, check_objects, streams_of
from headrace.ops.fork import side_by_side
from headrace.ops.inputs import in_turns
from headrace.ops.operator import EachSample
from headrace.ops.run_inline import NamedSteps, split_steps, through
from headrace.order.combined import ZipOrder
from headrace.order.orders import ENDLESS, Order
from headrace.order.permutation import draw
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Pipeline
from headrace.types import Ints
from headrace.workers.tasks import Step

_NUMBERS_MOST = 2**60


def zipped(inputs: Sequence[object], *, strict: bool) -> Stream:
    streams = streams_of("zip", inputs)
    if (branches := side_by_side(streams)) is not None:
        return branches
    again = functools.partial(zipped, strict=strict)
    counted = in_turns("zip", streams, each_of_them, again, f"strict={strict}", is_tuple=True, strict=strict)
    return counted or in_tuples(ZipSpec(streams, strict=strict).checked())


def in_tuples(spec: ZipSpec) -> Stream:
    """Return the stream of tuples of checked inputs."""
    check_objects(spec)
    later = [split_steps(pipeline.narrowed_steps)[1] for pipeline in spec.pipelines]
    source = ZipDataset(spec)
    if not any(later):
        return Stream(source)
    random = any(step.random for steps in later for step in steps)
    each = ZipStep(spec.labels, [[(step.told, step.fn) for step in some] for some in later])
    return Stream(source, (EachSample(Step(spec.kind, "map", each, random, is_implied=True)),))


class ZipSpec(CombinedSpec):
    """Zipped streams: one sample of each at every position.

    The number of a tuple is composed of the numbers of its samples. All inputs in stored order share one component, the
    position, as otherwise numbers of a few inputs would exceed 60 bits.

    Attributes:
        strict: True if all inputs must have the same number of samples.
    """

    kind = "zip"

    def __init__(self, streams: Sequence[Stream], *, strict: bool) -> None:
        super().__init__(streams)
        self.strict = strict

    @property
    def arguments(self) -> str:
        return "" if self.strict else ", strict=False"

    @property
    def is_endless(self) -> bool:
        return all(pipeline.is_endless for pipeline in self.pipelines)

    @property
    def is_paired(self) -> bool:
        return self.is_endless or not all(map(_is_by_position, self.pipelines))

    @functools.cached_property
    def count(self) -> int:
        """Number of tuples, which is that of the shortest input."""
        least, most = min(self.sizes), max(self.sizes)
        if self.strict and least != most:
            few, many = self.sizes.index(least), self.sizes.index(most)
            has = "no end" if most == ENDLESS else f"{most} samples"
            remedy = ".zip(…, strict=False) ends with the shorter one, and .take(n) of an input shortens it"
            raise check.unequal(self.labels[few], f"{least} samples", self.labels[many], has, remedy)
        return least

    @property
    def full_count(self) -> int | None:
        passes = self._passes_of_endless()
        return None if passes is None else max(passes, default=0)

    @functools.cached_property
    def _alone(self) -> tuple[int, ...]:
        if self.count == ENDLESS:
            return tuple(range(len(self.names)))
        return tuple(k for k, pipeline in enumerate(self.pipelines) if not _is_by_position(pipeline))

    @functools.cached_property
    def radices(self) -> tuple[int, ...]:
        """Size of each component: the position, then each input with a component of its own."""
        radices = tuple(max(1, int(self.sources[k].starts[-1])) for k in self._alone)
        if len(self._alone) < len(self.names):
            radices = max(1, self.count), *radices
        if math.prod(radices) > _NUMBERS_MOST:
            needed = f"at most {_NUMBERS_MOST}: leave the orders of inputs as they are, and have .zip(…).shuffle()"
            raise check.invalid(f"{self.call}: pairs of samples of inputs with orders of their own", radices, needed)
        return radices

    def numbers_of(self, number: int) -> list[int]:
        digits = list[int]()
        for radix in reversed(self.radices):
            number, digit = divmod(number, radix)
            digits.append(digit)
        position = digits.pop() if len(digits) > len(self._alone) else 0
        alone = dict(zip(self._alone, reversed(digits), strict=True))
        return [alone[k] if k in alone else self._number_at(k, position) for k in range(len(self.names))]

    def _number_at(self, number: int, position: int) -> int:
        """Return the number of the sample at a position of an input in stored order."""
        if not self.pipelines[number].order.operators:
            return position
        planning, order = self._steady(number)
        return int(planning.numbers(order, np.array([position]))[0])

    @functools.cached_property
    def _steady(self) -> Callable[[int], tuple[Planning, Order]]:
        @functools.cache
        def steady(number: int) -> tuple[Planning, Order]:
            planning = Planning(self.pipelines[number], 0)
            return planning, planning.passes(0)

        return steady

    def arrange(
        self, inputs: Sequence[Order], key: tuple[int, ...], first_shards: Sequence[int], window: int
    ) -> ZipOrder:
        numbers = [functools.partial(_numbers, inputs[k], self.sources[k].starts) for k in self._alone]
        of_position: list[Callable[[Ints], Ints]] = [as_it_is] if len(self._alone) < len(self.names) else []
        return ZipOrder(self.count, list(zip(self.radices, [*of_position, *numbers], strict=True)))


def _is_by_position(pipeline: Pipeline) -> bool:
    """True if the position, and the order named in states, determine the sample."""
    order, source = pipeline.order, pipeline.source
    return order.is_steady and order.by_numbers is None and not pipeline.keeps and source.is_in_order


def _numbers(order: Order, starts: Ints, positions: Ints) -> Ints:
    shards, rows = order.locate(positions)
    return np.asarray(starts[shards] + rows, np.int64)


class ZipDataset(InputsDataset):
    """Tuples of samples of several inputs, fetched by composed number."""

    spec: ZipSpec

    def __reduce__(self) -> tuple[object, ...]:
        return ZipDataset, (self.spec,)

    def __len__(self) -> int:
        return math.prod(self.spec.radices)

    @property
    def starts(self) -> Ints:
        return np.array([0, len(self)])

    async def aget(self, key: int) -> object:
        numbers = self.spec.numbers_of(range(len(self))[key])
        tasks = [asyncio.ensure_future(self._of_its_own(k, number)) for k, number in enumerate(numbers)]
        try:
            # Await in order, so that of several errors the first input's is raised.
            return tuple([await task for task in tasks])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # no task outlives this call

    async def get_many(self, keys: Sequence[int]) -> Sequence[object]:
        numbers = list(zip(*map(self.spec.numbers_of, keys), strict=True))
        inputs = await for_each(len(numbers), lambda k: self.got_many(k, numbers[k]))
        return list(zip(*inputs, strict=True))

    async def _of_its_own(self, number: int, at: int) -> object:
        """Return a sample of one input, with a random key of its own."""
        running = running_sample.get()
        if running is not None:
            running_sample.set(RunningSample(_key_of(running.key, number), running.position))
        return await self.got(number, at)


@functools.lru_cache(1024)
def _key_of(key: int, number: int) -> int:
    return draw("input", key, number)


class ZipStep:
    """Applies to each sample of a tuple the named steps of its input."""

    def __init__(self, labels: Sequence[str], steps: Sequence[NamedSteps]) -> None:
        self.labels, self.steps = tuple(labels), tuple(map(tuple, steps))

    def __call__(self, samples: tuple[object, ...]) -> tuple[object, ...]:
        both = zip(self.labels, self.steps, samples, strict=True)
        return tuple([through(steps, sample, f"{label}; ") for label, steps, sample in both])


def each_of_them(taken: Sequence[int], ended: Sequence[bool]) -> Sequence[int]:
    return [] if any(ended) else range(len(taken))
