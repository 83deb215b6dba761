"""Samples of which one step alone is left to be done: each in its turn, with nothing between that they do not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headrace.failures import Failure, Placeholder
from headrace.tasks import Step
from headrace.work.uses_random import are_leaves, generators_of, is_plain


class ProgressPlace(Protocol):
    """Memory of one number, at 0: the index of the sample that is begun, -1 when none is."""

    def __setitem__(self, at: int, index: int, /) -> None: ...


def needs_no_more(step: Step, samples: Sequence[object], draws: frozenset[str], *, is_plain_asked: bool) -> bool:
    """Whether all of some samples need nothing but a call of the step's function.

    Args:
        draws: the global generators that must be set for each of them, should they be plain.
        is_plain_asked: whether those must be set for samples that are not.
    """
    kinds = set(map(type, samples))
    if step.kind != "map" or step.is_numbered or any(issubclass(kind, Placeholder) for kind in kinds):
        return False
    if not step.random:
        return True
    return not draws and (not is_plain_asked or are_leaves(kinds) or all(map(is_plain, samples)))


def make_in_turn(
    step: Step,
    samples: Sequence[object],
    made: list[object],
    first: int,
    progress: ProgressPlace,
    failed: Callable[[int, BaseException], Failure],
) -> None:
    """Put what a step makes of each of some samples in `made`, which is empty, as it is made.

    Args:
        first: the index in the task of the first of them.
        progress: told the index of each before it is made.
        failed: gives what stands in the place of one, by its index in `samples`.
    """
    function, put = step.fn, made.append
    for progress[0], sample in enumerate(samples, first):  # it costs as much as all the rest to call a function
        try:
            result = function(sample)
        except StopIteration as error:
            raised = RuntimeError(f"{step.name} raised StopIteration")
            raised.__cause__ = error
            result = failed(len(made), raised)
        except BaseException as error:
            result = failed(len(made), error)
        put(result)


def apart(samples: Sequence[object], at_once: int) -> Iterator[list[object]]:
    """Samples that are made already, so many at a time."""
    for start in range(0, len(samples), at_once):
        yield list(samples[start : start + at_once])


def generators_of_steps(steps: Sequence[Step]) -> frozenset[str]:
    """Which generators the steps may draw from that have random numbers, where the first of them gets a plain sample.

    What is between them counts too: the next one must get nothing that is not understood.
    """
    numbers = [k for k, step in enumerate(steps) if step.random]
    between = steps[numbers[0] : numbers[-1] + 1] if numbers else ()
    return frozenset[str]().union(*(generators_of(step.fn) for step in between))
