"""Zipped branches of one fork: each sample is read once and passes through each branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.ops.cache import is_kept
from headrace.ops.fork_branch import Copies
from headrace.ops.operator import EachSample
from headrace.ops.select import on_field
from headrace.pipeline.needs import refusal
from headrace.workers.tasks import Step


def side_by_side(streams: Sequence[Stream]) -> Stream | None:
    """Return the zipped branches of one fork. None: the streams are not branches of one fork.

    Raises:
        OptionError: A branch does not keep samples aligned.
    """
    common = set.intersection(*(set(_forks(stream)) for stream in streams))
    if len(streams) < 2 or not common:
        return None
    last = next(fork for fork in reversed(_forks(streams[0])) if fork in common)
    before, after = zip(*(_divided(stream, last) for stream in streams), strict=True)
    check_apart(after, ".zip()")
    steps = [_steps(k, stream) for k, stream in enumerate(after)]
    made: Stream = before[0]._with(EachSample(Step(f"fork({len(streams)})", "map", Copies(len(streams)))))
    for step in (step for some in steps for step in some):
        made = made._with(EachSample(step))
    return made


def check_apart(streams: Sequence[Stream], call: str) -> None:
    """Check that no two inputs are branches of one fork.

    Raises:
        OptionError: Two are.
    """
    within = [_forks_within(stream) for stream in streams]
    forks = Counter(fork for some in within for fork in some)
    fork = next((fork for fork, count in forks.items() if count > 1), None)
    if fork is not None:
        same = [str(k) for k, some in enumerate(within) if fork in some]
        raise OptionError(
            f"inputs {' and '.join(same)} of {call} are branches of one .fork(), whose samples would be got once for "
            "each: branches come together sample by sample, by .zip() of them alone; zip these first, or take the "
            "stream itself in the place of its branches"
        )


def _forks(stream: Stream) -> list[str]:
    return [operator.fork for operator in stream.operators if operator.fork is not None]


def _forks_within(stream: Stream) -> set[str]:
    """Return the forks of a stream and of its inputs."""
    return set(_forks(stream)).union(*(_forks_within(one) for _, one in stream.pipeline().source.inputs))


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
