"""Where sequences are that are packed in lanes: what states say after each batch, however it came about."""

from __future__ import annotations

from headrace.failures import PackedError
from headrace.lanes import LaneCursor, LaneProgress
from headrace.plan.lane_packing import LanePacking
from headrace.plan.lane_run import LaneRun
from headrace.scheduler.boundaries import EvenBoundaries
from headrace.scheduler.lane_map import LaneMap


def packed(documents: int, tokens: int = 6) -> tuple[LaneMap, LaneRun, int]:
    """(the map, the lanes, how many sequences there are) of documents of so many tokens in two lanes."""
    run = LaneRun(LanePacking(4, "concat"), range(2), 2, documents)
    positions = LaneMap(lambda start, stop: run.positions(start, stop).tolist(), 100, run)
    assert positions.positions(0, documents) == list(range(documents))
    for name in range(documents):
        run.came(name, [tokens], [False])
    count = 0
    while run.take() is not None:
        count += 1
    return positions, run, count


def test_state_after_a_batch_is_that_of_its_lanes_whatever_was_made_ahead() -> None:
    positions, _, count = packed(8)
    assert count == 12
    positions.arrived(1, range(count))
    boundaries, seen = EvenBoundaries(2), []
    for number in range(3):
        positions.cover(number, 2 * number, 2 * number + 2, boundaries)
        delta = positions.after(boundaries, (0, 0))
        assert (delta.covers, delta.used) == ((), 2)
        seen.append(delta.lanes)
    assert seen == [
        LaneProgress(2, (LaneCursor(0, 0, 4, check=1), LaneCursor(0, 0, 4, check=1))),
        LaneProgress(4, (LaneCursor(1, 0, 2, check=1), LaneCursor(1, 0, 2, check=1))),
        LaneProgress(6, (LaneCursor(1, 1, check=1), LaneCursor(1, 1, check=1))),
    ]
    assert positions.in_batches(4, 6) == range(104, 106)


def test_batch_that_an_error_has_ended_is_told_of_once_its_samples_are_known() -> None:
    positions, _, _ = packed(4)
    boundaries = EvenBoundaries(2)
    positions.arrived(1, [0])
    positions.cover(0, 0, 2, boundaries)
    assert positions.after(boundaries, (0, 0)).lanes == LaneProgress(0, (LaneCursor(), LaneCursor()))
    assert positions.late(boundaries, (0, 0)) is None
    positions.arrived(1, [1])
    late = positions.late(boundaries, (0, 0))
    assert late is not None
    assert late.lanes == LaneProgress(2, (LaneCursor(0, 0, 4, check=1), LaneCursor(0, 0, 4, check=1)))


def test_documents_that_were_left_out_are_told_with_their_sequence_and_once() -> None:
    positions, _, _ = packed(4)
    errors = [(3, PackedError(b"one")), (5, PackedError(b"other"))]
    positions.leave_out(1, errors)
    assert positions.left_out(0, 1) == []
    assert positions.left_out(1, 3) == errors
    assert positions.left_out(1, 3) == []
