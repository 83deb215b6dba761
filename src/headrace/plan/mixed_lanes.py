"""Lanes that draw documents from the inputs of a mixture by tokens.

With G lanes and K inputs, lane j has the documents j, j + G, j + 2 G, … of each input's order, and draws from these
according to the tokens drawn so far. So its draws depend only on its own documents, not on when they arrive. Document t
of input k is at position t K + k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.lanes import Document, InputCursor, LaneCursor, LaneProgress, PackedPiece
from headrace.plan.lane_packing import LanePacking
from headrace.plan.lane_run import LaneRun
from headrace.plan.order import ENDLESS
from headrace.plan.token_mixing import TokenMixing


class MixedLaneRun(LaneRun):
    """A rank's lanes, which draw from several endless inputs. Arguments as in `LaneRun`."""

    def __init__(
        self,
        packing: LanePacking,
        lanes: range,
        size: int,
        begin: LaneProgress | None = None,
        is_left_out: Callable[[int], bool] | None = None,
    ) -> None:
        assert packing.mixing is not None
        self._mixing, self._width = packing.mixing, len(packing.mixing.names)
        if begin is None:
            start = LaneCursor(inputs=(InputCursor(),) * self._width)
            begin = LaneProgress(0, (start,) * len(lanes), (0,) * self._width)
        super().__init__(packing, lanes, size, ENDLESS, begin, is_left_out)
        self._draws = [
            _Draws(packing.mixing, lane, size, cursor) for lane, cursor in zip(lanes, begin.cursors, strict=True)
        ]
        self._let_go: list[int] = []
        self._come = [1] * self._width  # received positions of each input, and their tokens
        self._come_tokens = [1] * self._width

    def let_go(self) -> Sequence[int]:
        gone, self._let_go = self._let_go, []
        return gone

    def _position(self, number: int) -> int:
        draws, means = self._draws[number], [n / m for n, m in zip(self._come_tokens, self._come, strict=True)]
        return (draws.ask(means) * self.size + self._first + number) * self._width + draws.asked

    def _place(self, position: int) -> tuple[int, int]:
        return super()._place(position // self._width)

    def _coming(self, number: int) -> int:
        return self._draws[number].coming

    def _add(self, number: int, documents: Sequence[Document], position: int, tokens: int) -> list[bool]:
        source, draws, lane = position % self._width, self._draws[number], self._lanes[number]
        self._come[source] += 1
        self._come_tokens[source] += tokens
        draws.come(source, _Came(documents, tokens))
        while (drawn := draws.next()) is not None:
            round_, some = drawn
            for document in some:
                if not lane.add(document._replace(round=round_, input=document.position % self._width)) and _is_kept(
                    document
                ):
                    self._let_go.append(document.name)
        return [_is_kept(document) for document in documents]

    def _cursor(self, number: int) -> LaneCursor:
        cursor = self._lanes[number].cursor
        return cursor._replace(inputs=self._draws[number].before(cursor.round))

    def _tokens_of(self, pieces: Sequence[PackedPiece]) -> Sequence[int]:
        tokens = [0] * self._width
        for piece in pieces:
            tokens[piece.document.position % self._width] += piece.stop - piece.start
        return tokens


def _is_kept(document: Document) -> bool:
    return document.tokens > 0 or document.has_failed


class _Came(NamedTuple):
    """The documents of an input's position, and their token count, including skipped ones.

    So draws of a lane do not depend on skipped documents, or on where a run was resumed.
    """

    documents: Sequence[Document]
    tokens: int


class _Draws:
    """The draws of a lane from each input. `asked` is the input of the last requested document."""

    def __init__(self, mixing: TokenMixing, lane: int, lanes: int, begin: LaneCursor) -> None:
        self._phases = mixing.phases(lane, lanes)
        self._mixing, self._lanes = mixing, lanes
        self._round = begin.round
        self._rounds = [cursor.round for cursor in begin.inputs]  # documents drawn from each input
        self._tokens = [cursor.tokens for cursor in begin.inputs]
        self._next = [*self._rounds]  # next document of each input to read
        self._waiting: list[deque[_Came]] = [deque() for _ in begin.inputs]
        self._before = deque([(begin.round, begin.inputs)])  # progress of the inputs before each drawn position
        self._is_stuck = False  # True if the next draw needs an input that was not requested
        self.asked = 0

    def ask(self, means: Sequence[float]) -> int:
        """Choose the input to request from: the missing one, or the one that will lack most.

        Return the number of its document.

        Args:
            means: Approximate token count of a document of each input.
        """
        ahead, missing = self._ahead, self._missing
        if missing:  # nothing can be drawn before these arrive
            self.asked = missing[0]
        else:
            drawn = [
                tokens + sum(came.tokens for came in some) + mean * (count - len(some))
                for tokens, some, mean, count in zip(self._tokens, self._waiting, means, ahead, strict=True)
            ]
            lacking = self._mixing.lacking(self._lanes, drawn)
            self.asked = max(lacking, key=lambda k: (not ahead[k], lacking[k], -k))
        self._next[self.asked] += 1
        self._is_stuck = len(missing) > 1
        return self._next[self.asked] - 1

    @property
    def coming(self) -> int:
        """Number of requested documents. Those received count, too, unless the lane is stuck."""
        ahead = sum(self._next) - sum(self._rounds)
        return ahead - sum(map(len, self._waiting)) if self._is_stuck else ahead

    @property
    def _missing(self) -> list[int]:
        """Inputs needed for the next draw that have no document received or requested."""
        return [k for k in self._mixing.lacking(self._lanes, self._tokens) if self._next[k] == self._rounds[k]]

    @property
    def _ahead(self) -> list[int]:
        return [asked - drawn for asked, drawn in zip(self._next, self._rounds, strict=True)]

    def come(self, source: int, came: _Came) -> None:
        self._waiting[source].append(came)

    def next(self) -> tuple[int, Sequence[Document]] | None:
        """Draw the next documents, with their round. None: documents must arrive first."""
        heads = [some[0].tokens if some else None for some in self._waiting]
        source = self._mixing.choice(self._lanes, self._phases, self._tokens, heads)
        if source is None:
            self._is_stuck = bool(self._missing)
            return None
        if self._before[-1][0] != self._round:
            self._before.append((self._round, tuple(map(InputCursor, self._rounds, self._tokens))))
        came = self._waiting[source].popleft()
        self._rounds[source] += 1
        self._tokens[source] += came.tokens
        self._round += 1
        return self._round - 1, came.documents

    def before(self, round_: int) -> tuple[InputCursor, ...]:
        """Return the progress of inputs before a round was drawn. Rounds must not decrease."""
        while self._before[0][0] < round_:
            self._before.popleft()
        assert self._before[0][0] == round_, "a lane is behind a position that it has not drawn"
        return self._before[0][1]
