"""Plain values of documents that are packed in lanes: what plan, scheduler and states tell each other of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class InputCursor(NamedTuple):
    """How far a lane is with an input of a mixture by tokens.

    Attributes:
        round: how many of the lane's documents of the input it has drawn, as positions: of some came several, or none.
        tokens: how many those have.
    """

    round: int = 0
    tokens: int = 0


class LaneCursor(NamedTuple):
    """What of a lane's documents is to come: a lane is a row of the global batch, whose sequences are made of those.

    Attributes:
        round: the first document to come is of this one of the lane's positions, or of a later one.
        part: how many documents that came of that position are used up.
        offset: how many tokens of the first document are.
        taken: of those that follow it, which are used up: a bit for each, from the lowest on.
        inputs: of a mixture by tokens, how far it was with each before it drew that position; empty of others.
        check: which documents `part`, `offset` and `taken` are of, in a byte: of a mixture by tokens others may be
            drawn where one has another length than before.
    """

    round: int = 0
    part: int = 0
    offset: int = 0
    taken: int = 0
    inputs: tuple[InputCursor, ...] = ()
    check: int = 0

    @property
    def drawn(self) -> int:
        """How many of the lane's positions have documents of which something is used up."""
        return self.round + bool(self.part or self.offset or self.taken)


class LaneProgress(NamedTuple):
    """How far some lanes are.

    Attributes:
        turn: how many turns there were: lanes give a sequence one after the other, and again from the first one on.
            Those that have no more take theirs, too.
        cursors: of each lane.
        tokens: of a mixture by tokens, how many of each input have been given, in all of these lanes; empty of others.
    """

    turn: int
    cursors: tuple[LaneCursor, ...]
    tokens: tuple[int, ...] = ()


class Document(NamedTuple):
    """A document that has come.

    Attributes:
        name: whatever it is called by.
        position: in the epoch, of what it came of.
        round: which of the lane's positions that is.
        part: which of those that came of that position.
        tokens: how many it has.
        has_failed: it has none, and whoever gets the sequence that it would be in is told why.
        is_left_out: it counts as one that has none, whatever it has.
        input: which one of a mixture by tokens it is of.
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
    """Tokens [start, stop) of a document; whether these are its last ones."""

    document: Document
    start: int
    stop: int
    is_last: bool


class PackedSequence(NamedTuple):
    """A sequence.

    Attributes:
        position: its number among all of the epoch, where each lane has one in each step.
        pieces: what it is made of.
    """

    position: int
    pieces: Sequence[PackedPiece]
