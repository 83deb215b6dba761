"""`.fork()`: branches of a stream. Zipped branches read each sample once."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace._util import check
from headrace.dataset.stream import Stream
from headrace.ops.cache import is_kept
from headrace.ops.combined import check_apart, forks_of
from headrace.ops.map import on_field
from headrace.ops.operator import EachSample, Operator
from headrace.pipeline.pipeline import refusal
from headrace.workers.tasks import Step


def fork(stream: Stream, n: int) -> tuple[Stream, ...]:
    check.whole(".fork(): n", n, 1)
    name = uuid.uuid4().hex
    return tuple([stream._with(Branch(name, number, n)) for number in range(n)])


@dataclass(frozen=True, slots=True)
class Branch(Operator):
    """Marks the following operators as a branch of the fork with a unique name. Changes nothing."""

    where = "plan"
    name: str
    number: int
    branches: int

    @property
    def text(self) -> str:
        return f"fork({self.branches})[{self.number}]"

    @property
    def fork(self) -> str:
        return self.name

    def add_to(self, builder: Any) -> None: ...


class Copies:
    """Copies a sample for each branch, so that changes in place stay within a branch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, sample: object) -> tuple[object, ...]:
        try:
            return (*(copy.deepcopy(sample) for _ in range(self._count - 1)), sample)
        except Exception as error:
            error.add_note(f"fork: the sample, a {type(sample).__name__}, cannot be copied for each branch")
            raise


def side_by_side(streams: Sequence[Stream]) -> Stream | None:
    """Return the zipped branches of one fork. None: the streams are not branches of one fork."""
    common = set.intersection(*(set(forks_of(stream)) for stream in streams))
    if len(streams) < 2 or not common:
        return None
    last = next(fork for fork in reversed(forks_of(streams[0])) if fork in common)
    before, after = zip(*(_divided(stream, last) for stream in streams), strict=True)
    check_apart(after, ".zip()")
    steps = [_steps(k, stream) for k, stream in enumerate(after)]
    made: Stream = before[0]._with(EachSample(Step(f"fork({len(streams)})", "map", Copies(len(streams)))))
    for step in (step for some in steps for step in some):
        made = made._with(EachSample(step))
    return made


def _divided(stream: Stream, fork: str) -> tuple[Stream, Stream]:
    """Split a branch into the stream before the fork, and the branch alone."""
    at = next(k for k, operator in enumerate(stream.operators) if operator.fork == fork)
    return Stream(stream.source, stream.operators[:at]), Stream(stream.source, stream.operators[at + 1 :])


def _steps(number: int, branch: Stream) -> list[Step]:
    """Return the steps of a branch, applied to its element of a tuple."""
    pipeline = branch.pipeline()
    others = [*(operator.text for operator in pipeline.order.operators), *pipeline.changing]
    others += [] if pipeline.of_all is None else [pipeline.of_all]
    others += [] if pipeline.group is None else [pipeline.group.text]
    others += [step.name for step in pipeline.steps if is_kept(step)]
    if others or pipeline.keeps or pipeline.is_batched:
        raise refusal("aligned branches", ".zip()", f".{others[0] if others else 'filter()'}", of=f"branch {number}")
    return [
        replace(step, name=f"{step.name} of branch {number}", fn=on_field(step.fn, number))
        for step in pipeline.narrowed_steps
    ]
