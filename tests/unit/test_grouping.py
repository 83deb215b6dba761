"""Groups are those that batchers name. A state has the samples that wait for the next group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.batchers import KINDS

from headrace.engine.scheduler.group_level import FoundGroup, GroupFinder
from headrace.engine.scheduler.position_map import GroupOrigins
from headrace.errors import OptionError
from headrace.ops.bucket import BucketBatcher

MEASURES = st.lists(st.integers(0, 9), max_size=40)


class Nine:
    """Groups, in order, whose measures have a sum of nine or more."""

    def __init__(self) -> None:
        self._offered = list[int]()

    def offer(self, measure: int) -> Sequence[int]:
        self._offered.append(measure)
        return range(len(self._offered)) if sum(self._offered) >= 9 else ()

    def end(self) -> Sequence[int]:
        return range(len(self._offered))


def found(begin: Any, measures: Sequence[int], numbers: Sequence[int] | None = None) -> list[FoundGroup]:
    finder = GroupFinder(begin, "made()")
    offered = range(len(measures)) if numbers is None else numbers
    groups = [group for number in offered for group in finder.offer([number], [measures[number]])]
    return [*groups, *finder.end()]


@given(kind=st.sampled_from(sorted(KINDS)), measures=MEASURES)
def test_groups_equal_a_plain_program(kind: str, measures: list[int]) -> None:
    wanted = list(KINDS[kind].groups(list(enumerate(measures))))
    assert [list(group.numbers) for group in found(KINDS[kind].begin, measures)] == wanted


@pytest.mark.slow
@given(kind=st.sampled_from(sorted(KINDS)), measures=MEASURES, data=st.data())
def test_later_groups_do_not_depend_on_earlier_samples(kind: str, measures: list[int], data: st.DataObject) -> None:
    groups, origins = found(KINDS[kind].begin, measures), GroupOrigins()
    for group in groups:
        origins.formed(group.numbers)
    done = data.draw(st.integers(0, len(groups)))
    if data.draw(st.booleans()):
        origins.arrived(range(len(groups)))
        origins.forget(data.draw(st.integers(0, done)))
    begin = origins.begin(done)
    gone = {begin + k for start, stop in origins.used(done) for k in range(start, stop)}
    assert {*range(begin), *gone} == {number for group in groups[:done] for number in group.numbers}
    left = [number for number in range(begin, len(measures)) if number not in gone]
    assert found(KINDS[kind].begin, measures, left) == groups[done:]


@given(measures=MEASURES, size=st.sampled_from([None, 1, 3]), drop_last=st.booleans())
def test_reusable_batcher_is_offered_each_sample_once(measures: list[int], size: int | None, drop_last: bool) -> None:
    offered = list[int]()

    class Lasting(BucketBatcher):
        def offer(self, measure: int) -> Sequence[int]:
            offered.append(measure)
            return super().offer(measure)

    class Passing:  # not a batcher that lasts: each group is found by a new one
        def __init__(self) -> None:
            self._batcher = begin(BucketBatcher)
            self.offer, self.end = self._batcher.offer, self._batcher.end

    def begin(kind: type[BucketBatcher]) -> BucketBatcher:
        return kind([2, 5], size, 10 if size is None else None, drop_last=drop_last)

    lasting = found(lambda: begin(Lasting), measures)
    assert offered == measures
    assert lasting == found(Passing, measures)


def test_origins_of_groups_that_cannot_be_repeated_are_forgotten() -> None:
    origins = GroupOrigins()
    for number in range(1000):
        origins.formed([2 * number, 2 * number + 1])
        origins.arrived([number])
        origins.forget(number)
    assert len(origins._groups) <= 2
    assert len(origins._used) == 1


@pytest.mark.parametrize("named", [[2], [0, 0], [-1]])
def test_batcher_that_names_unknown_samples_is_an_error(named: list[int]) -> None:
    class Wrong(Nine):
        def offer(self, measure: int) -> Sequence[int]:
            super().offer(measure)
            return named if len(self._offered) == 2 else ()

    groups = found(Wrong, [1, 1, 1])
    assert [group.numbers for group in groups] == [[1], [2], [0]]
    assert [type(group.error) for group in groups] == [OptionError, OptionError, type(None)]
    assert "made(): of 2 samples that it was offered" in str(groups[0].error)


class Strict(Nine):
    def offer(self, measure: int) -> Sequence[int]:
        if measure > 5:
            raise ValueError(f"{measure} is too long")
        return super().offer(measure)


class Endless(Nine):
    def end(self) -> Any:
        raise ValueError("no end")


@pytest.mark.parametrize(("batcher", "measures", "expected"), [
    (Strict, [3, 9, 3, 3, 8], [([1], "9 is too long"), ([0, 2, 3], "None"), ([4], "8 is too long")]),
    (Endless, [1, 2], [([0, 1], "no end")]),
])  # fmt: skip
def test_error_replaces_its_samples(batcher: Any, measures: list[int], expected: list[tuple[list[int], str]]) -> None:
    groups = found(batcher, measures)
    assert [(list(group.numbers), str(group.error)) for group in groups] == expected
    assert groups[0].error is not None
    assert groups[0].error.__notes__ == ["stage: made(), while samples were put together"]


def test_samples_are_refused_when_too_many_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.scheduler.group_level._WAITING_MOST", 3)
    groups = found(Nine, [1] * 5)
    assert [list(group.numbers) for group in groups] == [[3], [4], [0, 1, 2]]
    assert [type(group.error) for group in groups] == [OptionError, OptionError, type(None)]


def test_samples_that_a_batcher_drops_at_its_end_stay_waiting() -> None:
    class LeavesOut(Nine):
        def end(self) -> Any:
            return None

    finder = GroupFinder(LeavesOut, "leaves_out()")
    assert [group.numbers for group in finder.offer([0, 1, 2], [9, 1, 1])] == [[0]]
    assert not list(finder.end())
    assert finder.waiting == [1, 2]
