"""Iterates over the samples of a task, decoding many at once for the first step if possible."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.formats.opening import BlockRows, MemberRows
from headrace.workers.failures import Placeholder
from headrace.workers.messages import TaskMessage
from headrace.workers.task_inputs import Inputs, block_rows, member_rows
from headrace.workers.tasks import Chain
from headrace.workers.wire_chunks import SentPart

_TOGETHER_BYTES = 256 * 1024  # fits into the processor's cache
_TOGETHER_AT_FIRST, _TOGETHER_MOST = 64, 1024

Run = tuple[int, Any]
"""(number of steps already applied, samples). Samples with an applied step are a list."""

OpensRows = Callable[[Any, int, int], tuple[Sequence[object], int]]


def runs(chain: Chain, order: TaskMessage, inputs: Inputs, busy: dict[str, float]) -> Iterator[Run]:
    parts = order.parts
    first = chain.steps[0] if chain.steps and not order.one_by_one else None
    if any(not part.shares_blocks and part.has_large for part in parts):
        yield 0, map(_unheld, inputs.samples(parts, busy))
        return
    for part in parts:
        opens = None if first is None else first.open_rows if part.shares_blocks else first.open_many
        began = time.perf_counter()
        rows = None if opens is None else _rows(part, inputs)
        busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
        if rows is None:
            yield 0, inputs.samples([part], busy)
        else:
            assert first is not None
            assert opens is not None
            yield from _opened(first.name, opens, rows, busy)


def _rows(part: SentPart, inputs: Inputs) -> BlockRows | MemberRows | None:
    """Return samples that may be decoded together. None: they may not."""
    found = part.undecoded(inputs)
    if found is None:
        return None
    rows, bodies, urls = found
    return member_rows(rows, urls, bodies) if rows.block is None else block_rows(rows, urls, bodies)


def _opened(name: str, opens: OpensRows, rows: BlockRows | MemberRows, busy: dict[str, float]) -> Iterator[Run]:
    """Decode as many samples together as the cache holds. Others are yielded undecoded."""
    start, count = 0, _TOGETHER_AT_FIRST
    while start < len(rows.keys):
        stop = min(start + count, len(rows.keys))
        began = time.perf_counter()
        samples, nbytes = opens(rows, start, stop)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        if None not in samples:
            yield 1, samples
        else:
            for is_missing, some in itertools.groupby(enumerate(samples, start), lambda one: one[1] is None):
                if is_missing:
                    yield 0, (rows.sample(number) for number, _ in some)
                else:
                    yield 1, [sample for _, sample in some]
        count = max(1, min(_TOGETHER_MOST, _TOGETHER_BYTES * (stop - start) // max(nbytes, 1)))
        start = stop


class _Large(Placeholder):
    """A large sample, moved out when it enters the steps, so that this object does not hold it."""

    __slots__ = ("_sample",)

    is_final = False

    def __init__(self, sample: dict[str, object]) -> None:
        self._sample = sample

    def take(self) -> tuple[object, object]:
        sample, self._sample = self._sample, {}
        return sample, {name: sample.get(name) for name in ("__key__", "__url__")}


def _unheld(sample: object) -> object:
    return _Large(sample) if isinstance(sample, dict) else sample  # failures stay as they are
