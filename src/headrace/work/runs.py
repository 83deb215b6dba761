"""The samples of a task on their way into a chain: one by one, or made ready for its first step many together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from headrace.failures import Placeholder
from headrace.formats.opening import BlockRows
from headrace.sent import SentPart
from headrace.tasks import Chain
from headrace.work.inputs import Inputs, block_rows
from headrace.work.messages import TaskMessage

_TOGETHER_BYTES = 128 * 1024  # lie in the processor's cache
_TOGETHER_AT_FIRST, _TOGETHER_MOST = 16, 1024

Run = tuple[int, Any]
"""How many of the chain's steps were done to some samples, and these; such as were done to are a list."""

OpensRows = Callable[[BlockRows, int, int], tuple[Sequence[object], int]]
OpensMany = Callable[[Sequence[object]], tuple[Sequence[object], int]]


def runs(chain: Chain, order: TaskMessage, inputs: Inputs, busy: dict[str, float]) -> Iterator[Run]:
    """The samples of a task, in order, some at a time."""
    parts = order.parts
    first = chain.steps[0] if chain.steps and not order.one_by_one else None
    if any(part.has_large and not part.shares_blocks for part in parts):
        yield 0, map(_unheld, inputs.samples(parts, busy))
        return
    for shares_blocks, some in itertools.groupby(parts, lambda part: part.shares_blocks):
        if first is not None and first.open_rows is not None and shares_blocks:
            for part in some:
                yield from _opened(first.name, first.open_rows, part, inputs, busy)
            continue
        samples = inputs.samples(list(some), busy)
        if first is not None and first.open_many is not None:
            yield from _opened_together(first.name, first.open_many, samples, busy)
        else:
            yield 0, samples


def _opened(name: str, open_rows: OpensRows, part: SentPart, inputs: Inputs, busy: dict[str, float]) -> Iterator[Run]:
    """Rows of blocks, of which those that must be opened by themselves have no step behind them."""
    began = time.perf_counter()
    found = part.undecoded(inputs)
    assert found is not None
    rows, bodies, urls = found
    some = block_rows(rows, urls, bodies)
    busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
    start, count = 0, _TOGETHER_AT_FIRST
    while start < len(rows):
        stop = min(start + count, len(rows))
        began = time.perf_counter()
        samples, nbytes = open_rows(some, start, stop)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        yield from _runs_of(samples, partial(_sample, some, start))
        count = _next(count, nbytes)
        start = stop


def _opened_together(
    name: str, open_many: OpensMany, samples: Iterator[object], busy: dict[str, float]
) -> Iterator[Run]:
    """The same of samples that lie by themselves, as many together as the cache holds."""
    count = _TOGETHER_AT_FIRST
    while together := list(itertools.islice(samples, count)):
        began = time.perf_counter()
        made, nbytes = open_many(together)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        count = _next(len(together), nbytes)
        yield from _runs_of(made, together.__getitem__)


def _runs_of(made: Sequence[object], source: Callable[[int], object]) -> Iterator[Run]:
    """What was opened together; those that must be opened by themselves have the first step before them."""
    if None not in made:
        yield 1, made
        return
    for number, sample in enumerate(made):
        yield (0, [source(number)]) if sample is None else (1, [sample])


def _sample(rows: BlockRows, start: int, number: int) -> object:
    return rows.sample(start + number)


def _next(count: int, nbytes: int) -> int:
    """How many samples are made ready together after so many, which were so many bytes."""
    return max(1, min(_TOGETHER_MOST, _TOGETHER_BYTES * count // max(nbytes, 1)))


class _Large(Placeholder):
    """A large sample until it goes through the steps: whoever holds this then does not hold it."""

    __slots__ = ("_sample",)

    is_final = False

    def __init__(self, sample: dict[str, object]) -> None:
        self._sample = sample

    def take(self) -> tuple[object, object]:
        sample, self._sample = self._sample, {}
        return sample, {name: sample.get(name) for name in ("__key__", "__url__")}


def _unheld(sample: object) -> object:
    return _Large(sample) if isinstance(sample, dict) else sample  # a failure among them stays one
