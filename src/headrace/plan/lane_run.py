"""One rank's way through an epoch whose documents are packed in lanes: what is read next, and what is made of it.

Row j of the global batch is a lane: with G rows it has the documents at the positions j, j + G, j + 2 G, … of the
epoch, and fills its sequences from these alone. A rank has whole lanes. So which sequences come follows from the
documents and from G, and not from the ranks, or from the order in which documents are read.
"""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from headrace.lanes import Document, LaneCursor, LaneProgress, PackedPiece, PackedSequence
from headrace.plan.lane_packing import LanePacking
from headrace.types import Ints

_SHARE = 0.1  # of a sequence: what a document adds, as long as none has come


class LaneRun:
    """The documents of a rank's lanes, from some place on.

    Those are read next that the lanes need most: some have used up more than others, and to read them in the order of
    the epoch would have ever more documents wait for the others.

    Args:
        packing: how they become sequences.
        lanes: the numbers of this rank's lanes.
        size: how many lanes all ranks have.
        end: where the epoch ends.
        begin: how far its lanes are; None: at the begin.
        is_left_out: whether the document at a position is; None: none is. It is read all the same: states count those
            that have come.

    Attributes:
        count: how many documents are to be read.
        size, batch: of a step, how many lanes there are, on all ranks and on this one.
    """

    def __init__(
        self,
        packing: LanePacking,
        lanes: range,
        size: int,
        end: int,
        begin: LaneProgress | None = None,
        is_left_out: Callable[[int], bool] | None = None,
    ) -> None:
        self.size, self.batch, self._is_left_out = size, len(lanes), is_left_out
        self._first = lanes.start
        begin = begin or LaneProgress(0, (LaneCursor(),) * len(lanes))
        self._turn, cursors, self._tokens_given = begin
        self._lanes = [packing.lane(cursor) for cursor in cursors]
        self._next = [cursor.round for cursor in cursors]  # that is to be read
        self._ends = [max(0, -((lane - end) // size)) for lane in lanes]  # rounds
        self.count = sum(max(0, stop - start) for start, stop in zip(self._next, self._ends, strict=True))
        self._under_way = [0] * len(lanes)
        self._asked: deque[int] = deque()  # positions that have been asked for
        self._stray: Document | None = None  # the error with which the source has ended, behind all documents
        self._came = 0  # documents before this one, by the order in which they were asked for, have come
        self._shares = 0.0  # of a sequence, that they gave
        self._given = 0  # sequences that states are behind of
        self._cursors, self._turn_given = list(cursors), self._turn
        # (lane, turn, where it is then, tokens of each input) of each sequence
        self._journal: deque[tuple[int, int, LaneCursor, Sequence[int]]] = deque()
        for number in range(len(lanes)):
            self._end_if_over(number)

    def positions(self, start: int, stop: int) -> Ints:
        """The positions of the documents from the `start`-th up to the `stop`-th that are read.

        Each is known once it is asked for, until it has come.
        """
        lacking = stop - self._came - len(self._asked)
        if lacking > 0:
            self._ask(lacking)
            # A source that ends with an error puts that where it has no more samples.
            self._asked.extend([self._first] * (stop - self._came - len(self._asked)))
        return np.array(list(islice(self._asked, start - self._came, stop - self._came)), np.int64)

    def came(self, name: int, tokens: Sequence[int], failed: Sequence[bool]) -> list[bool]:
        """What came of the next document that was read: none, one or several of them.

        Args:
            name: what the first one is called by; the next ones are called by the numbers that follow.
            tokens: how many each one has.
            failed: whether it has failed.

        Returns:
            Which of them are to be kept.

        Raises:
            StateMismatchError: another one was to come.
        """
        if self._came >= self.count:
            self._stray = next((Document(name, 0, 0, 0, 0, True) for has_failed in failed if has_failed), self._stray)
            return list(failed)
        position = self._asked.popleft()
        round_, number = self._place(position)
        self._came += 1
        self._under_way[number] -= 1
        is_left_out = self._is_left_out is not None and self._is_left_out(position)
        whole = sum(tokens)
        if is_left_out:
            tokens, failed = [0] * len(tokens), [False] * len(failed)
        self._shares += self._lanes[number].share(sum(tokens))
        kept = self._add(
            number,
            [
                Document(name + part, position, round_, part, count, has_failed, is_left_out)
                for part, (count, has_failed) in enumerate(zip(tokens, failed, strict=True))
            ],
            position,
            whole,
        )
        self._end_if_over(number)
        return kept

    def let_go(self) -> Sequence[int]:
        """The names of documents that were to be kept, and turned out to be used up already."""
        return ()

    def take(self, *, to_fail: bool = False) -> PackedSequence | None:
        """The next sequence; None: there is no more, or documents must come first.

        Args:
            to_fail: whether a document that has failed fails its sequence, for which no others must come then.
        """
        for _ in self._lanes:
            step, number = divmod(self._turn, self.batch)
            lane = self._lanes[number]
            pieces = lane.take(to_fail=to_fail)
            if pieces is None:
                return None
            self._turn += 1
            if pieces:
                self._journal.append((number, self._turn, self._cursor(number), self._tokens_of(pieces)))
                return PackedSequence(step * self.size + self._first + number, pieces)
        return None

    @property
    def is_over(self) -> bool:
        """Whether all documents have come."""
        return self._stray is None and all(lane.is_over for lane in self._lanes)

    @property
    def failed(self) -> Document | None:
        """The first document that has failed and is in no sequence yet."""
        return next((lane.failed for lane in self._lanes if lane.failed is not None), self._stray)

    def after(self, sequences: int) -> LaneProgress:
        """How far the lanes are behind the first so many sequences, or behind those asked for before."""
        while self._journal and self._given < sequences:
            number, self._turn_given, self._cursors[number], tokens = self._journal.popleft()
            self._tokens_given = tuple(map(operator.add, self._tokens_given, tokens))
            self._given += 1
        return LaneProgress(self._turn_given, tuple(self._cursors), self._tokens_given)

    def _ask(self, count: int) -> None:
        """Have some more documents be read."""
        share = self._shares / self._came if self._came else _SHARE

        def need(number: int) -> tuple[int, int, int]:
            """Lanes that lack a sequence come first; of those that have as many the one whose document comes first."""
            supply = self._lanes[number].supply + self._coming(number) * share
            return int(supply), self._next[number], number

        needs = [need(number) for number in range(self.batch) if self._next[number] < self._ends[number]]
        heapq.heapify(needs)
        while needs and count:
            number = needs[0][-1]
            self._asked.append(self._position(number))
            self._next[number] += 1
            self._under_way[number] += 1
            count -= 1
            if self._next[number] < self._ends[number]:
                heapq.heapreplace(needs, need(number))
            else:
                heapq.heappop(needs)

    def _position(self, number: int) -> int:
        """Of the document that a lane has read next."""
        return self._next[number] * self.size + self._first + number

    def _place(self, position: int) -> tuple[int, int]:
        """(which of its lane's documents is at a position, the lane)."""
        return position // self.size, position % self.size - self._first

    def _coming(self, number: int) -> int:
        """How many documents a lane is to have, beside those that it has."""
        return self._under_way[number]

    def _add(self, number: int, documents: Sequence[Document], position: int, tokens: int) -> list[bool]:  # noqa: ARG002
        """What came of a lane's next position; which of it is to be kept.

        Args:
            tokens: how many it has, those that are left out too.
        """
        return [self._lanes[number].add(document) for document in documents]

    def _cursor(self, number: int) -> LaneCursor:
        return self._lanes[number].cursor

    def _tokens_of(self, pieces: Sequence[PackedPiece]) -> Sequence[int]:  # noqa: ARG002
        """How many tokens of each input a sequence has."""
        return ()

    def _end_if_over(self, number: int) -> None:
        self._lanes[number].is_over = self._next[number] >= self._ends[number] and not self._under_way[number]
