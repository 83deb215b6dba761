"""Where sequences are that are packed in lanes: what states say after each batch, however it came about."""

from __future__ import annotations

from headrace.engine.scheduler.batch_bounds import EvenBoundaries
from headrace.engine.scheduler.row_level import RowMap
from headrace.order.packed_rows import PackedRows
from headrace.order.packing import Packing
from headrace.order.row_states import RowCursor, RowProgress
from headrace.workers.failures import PackedError


def packed(documents: int, tokens: int = 6) -> tuple[RowMap, PackedRows, int]:
    """(the map, the lanes, how many sequences there are) of documents of so many tokens in two lanes."""
    run = PackedRows(Packing(4, "concat"), range(2), 2, documents)
    positions = RowMap(100, run)
    assert positions.positions(0, documents) == range(documents)
    for name in range(documents):
        run.arrive(name, [tokens], [False])
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
        seen.append(delta.rows)
    assert seen == [
        RowProgress(2, (RowCursor(0, 0, 4, check=1), RowCursor(0, 0, 4, check=1))),
        RowProgress(4, (RowCursor(1, 0, 2, check=1), RowCursor(1, 0, 2, check=1))),
        RowProgress(6, (RowCursor(1, 1, check=1), RowCursor(1, 1, check=1))),
    ]
    assert positions.in_batches(4, 6) == range(104, 106)


def test_batch_that_an_error_has_ended_is_told_of_once_its_samples_are_known() -> None:
    positions, _, _ = packed(4)
    boundaries = EvenBoundaries(2)
    positions.arrived(1, [0])
    positions.cover(0, 0, 2, boundaries)
    assert positions.after(boundaries, (0, 0)).rows == RowProgress(0, (RowCursor(), RowCursor()))
    assert positions.late(boundaries, (0, 0)) is None
    positions.arrived(1, [1])
    late = positions.late(boundaries, (0, 0))
    assert late is not None
    assert late.rows == RowProgress(2, (RowCursor(0, 0, 4, check=1), RowCursor(0, 0, 4, check=1)))


def test_documents_that_were_left_out_are_told_with_their_sequence_and_once() -> None:
    positions, _, _ = packed(4)
    errors = [(3, PackedError(b"one")), (5, PackedError(b"other"))]
    positions.skip(1, errors)
    assert positions.left_out(0, 1) == []
    assert positions.left_out(1, 3) == errors
    assert positions.left_out(1, 3) == []
