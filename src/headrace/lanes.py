"""Progress of documents that are packed into lanes.

A lane is a row of the global batch. Its sequences are made of the documents at the lane's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class InputCursor(NamedTuple):
    """Progress of a lane in an input: number of positions drawn, and tokens of their documents."""

    round: int = 0
    tokens: int = 0


class LaneCursor(NamedTuple):
    """The resume point of a lane.

    Attributes:
        round: Index among the lane's positions: the first document to come is at this one or a later one.
        part: Number of documents of that position that are consumed.
        offset: Number of consumed tokens of the first document.
        taken: Consumed documents among those after the first: a bit for each, from the lowest on.
        inputs: For a mixture by tokens: progress in each input before that position was drawn. Else empty.
        check: Checksum, one byte, of the documents that `part`, `offset` and `taken` refer to. In a mixture by tokens,
            others may be drawn if a document's length has changed.
    """

    round: int = 0
    part: int = 0
    offset: int = 0
    taken: int = 0
    inputs: tuple[InputCursor, ...] = ()
    check: int = 0

    @property
    def drawn(self) -> int:
        """Number of the lane's positions that are consumed at least in part."""
        return self.round + bool(self.part or self.offset or self.taken)


class LaneProgress(NamedTuple):
    """Progress of several lanes.

    Attributes:
        turn: Number of turns so far. Lanes emit one sequence each in round-robin order. Exhausted lanes keep their
            turn.
        tokens: For a mixture by tokens: tokens emitted per input, in all these lanes. Else empty.
    """

    turn: int
    cursors: tuple[LaneCursor, ...]
    tokens: tuple[int, ...] = ()


class Document(NamedTuple):
    """A document that was read.

    Attributes:
        name: Arbitrary number that identifies the document.
        position: Position in the epoch of the sample that the document was made from.
        round: Index of that position among the lane's positions.
        part: Index among the documents made from that position.
        has_failed: True if it failed. It has no tokens, and its sequence gets the error.
        is_left_out: True if it is skipped: it counts as one without tokens.
    """

    name: int
    position: int
    round: int
    part: int
    tokens: int
    has_failed: bool = False
    is_left_out: bool = False
    input: int = 0


class PackedPiece(NamedTuple):
    document: Document
    start: int
    stop: int
    is_last: bool


class PackedSequence(NamedTuple):
    """A packed sequence. Each lane has one position per step."""

    position: int
    pieces: Sequence[PackedPiece]
