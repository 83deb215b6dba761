"""States after samples that arrived together are those after samples that arrived alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.arrival import Arrived
from headrace.delivery.messages import AfterEach, Afters, AfterThese, ProgressDelta
from headrace.delivery.progress import Progress, ProgressSnapshot
from headrace.engine.scheduler.position_map import EvenBoundaries, PositionMap
from headrace.errors import OptionError
from headrace.order.cursor import united

messages = st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), min_size=1, max_size=20)), max_size=8)


def states(progress: Progress, last: int) -> list[object]:
    found: list[object] = []
    for batches in range(max(0, last - 18), last + 2):
        try:
            found.append(progress.state(batches)["step"])
        except OptionError:
            found.append(None)
    return found


def remembered(steps: Sequence[ProgressSnapshot], last: int) -> list[object]:
    known = {step.batches: step for step in steps[-17:] if not step.is_over}
    return [known.get(batches) for batches in range(max(0, last - 18), last + 2)]


def told(first: int, count: int, *, is_run: bool) -> Afters:
    marks = [("mark", first + k + 1) for k in range(count)]
    if is_run:
        return AfterEach(first, count, 1, (0, 0), marks)
    return AfterThese(ProgressDelta(((first + k, first + k + 1),), marks[k], (0, 0), 1) for k in range(count))


@pytest.mark.slow
@given(messages)
def test_states_of_samples_that_came_some_together_are_those_of_each_alone(
    messages: list[tuple[bool, list[bool]]],
) -> None:
    progress = Progress(ProgressSnapshot(), lambda received: {"step": received})
    steps, first, failed = [ProgressSnapshot()], 0, None

    def passed(samples: int) -> None:
        last, at = steps[-1], steps[-1].batches
        steps.append(
            replace(
                last,
                batches=at + 1,
                samples=last.samples + samples,
                used=last.used + 1,
                covers=tuple(united([*last.covers, (at, at + 1)])),
                mark=("mark", at + 1),
            )
        )

    for is_run, fails in messages:
        after = told(first, len(fails), is_run=is_run)
        for number, fail in enumerate(fails):
            progress.ask()
            if failed is not None:
                passed(0)
            failed = number if fail else None
            arrived = Arrived(lambda: None, 1, after, number)
            if fail:
                progress.fail(arrived)
            else:
                progress.receive(arrived)
                passed(1)
            assert progress.received == steps[-1]
        first += len(fails)
        assert states(progress, first) == remembered(steps, first)
    if failed is not None:
        passed(0)
    progress.end()
    assert progress.received == replace(steps[-1], is_over=True)
    assert progress.state() == {"step": replace(steps[-1], is_over=True)}


@pytest.mark.parametrize("marks", [True, False])
def test_progress_after_samples_together_is_that_after_one_at_a_time(marks: bool) -> None:
    asked = list[int]()

    def mark(position: int) -> Any:
        asked.append(position)
        return [position], position

    together, alone = (PositionMap(mark=mark if marks else None) for _ in range(2))
    boundaries = EvenBoundaries(1)
    for one in (together, alone):
        one.put(8)
    after = together.after_each(0, 5, 0, 1, (1, 0))
    assert after is not None
    each = list[ProgressDelta]()
    for number in range(5):
        alone.cover(number, number, number + 1, boundaries)
        each.append(alone.after(boundaries, (1, 0)))
    assert [delta for k in range(5) for delta in after.said(k, k + 1)] == each
    assert asked == [1, 2, 3, 4, 5] * 2 * marks, "a source forgets positions before its last mark"
    assert together.after_each(6, 1, 6, 1, (0, 0)) is None, "one before it was not delivered"
    assert (together.after_each(5, 4, 5, 1, (0, 0)) is None) == marks, "the source may end before"
