"""One rank's progress through an epoch packed in lanes: reading order, and sequences.

Row j of the global batch is a lane. With G rows it has the documents at the positions j, j + G, j + 2 G, … of the
epoch, and fills its sequences from these only. A rank has whole lanes. So sequences depend on the documents and on G,
and not on the ranks, or on the order in which documents are read.
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

_SHARE = 0.1  # of a sequence: estimate for a document before any was read


class LaneRun:
    """The documents of a rank's lanes, from a position on.

    Documents are read in the order in which lanes need them. Lanes progress at different rates, so in the order of the
    epoch more and more documents would wait.

    Args:
        packing: How documents become sequences.
        lanes: This rank's lanes.
        size: Number of lanes on all ranks.
        end: End of the epoch.
        begin: Progress of the lanes. None: at the start.
        is_left_out: True for the positions of skipped documents. These are read, too, because states count all
            documents read. None: none are skipped.

    Attributes:
        count: Number of documents to read.
        size: Number of lanes on all ranks.
        batch: Number of lanes on this rank.
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
        self._next = [cursor.round for cursor in cursors]  # round of the next document to read
        self._ends = [max(0, -((lane - end) // size)) for lane in lanes]  # in rounds
        self.count = sum(max(0, stop - start) for start, stop in zip(self._next, self._ends, strict=True))
        self._under_way = [0] * len(lanes)
        self._asked: deque[int] = deque()  # requested positions
        self._stray: Document | None = None  # error of the source after its last document
        self._came = 0  # documents received, in order of their requests
        self._shares = 0.0  # total share of sequences in them
        self._given = 0  # sequences before the last state
        self._cursors, self._turn_given = list(cursors), self._turn
        # (lane, turn, cursor after it, tokens of each input) of each sequence
        self._journal: deque[tuple[int, int, LaneCursor, Sequence[int]]] = deque()
        for number in range(len(lanes)):
            self._end_if_over(number)

    def positions(self, start: int, stop: int) -> Ints:
        """Return positions of the documents to read, number `start` to `stop` - 1 in reading order.

        Each is fixed once requested, and forgotten once its document was received.
        """
        lacking = stop - self._came - len(self._asked)
        if lacking > 0:
            self._ask(lacking)
            # A source that ends with an error reports it in place of a sample.
            self._asked.extend([self._first] * (stop - self._came - len(self._asked)))
        return np.array(list(islice(self._asked, start - self._came, stop - self._came)), np.int64)

    def came(self, name: int, tokens: Sequence[int], failed: Sequence[bool]) -> list[bool]:
        """Add the results of the next document read: none, one or several documents.

        Args:
            name: Number of the first result; the others have the following numbers.
            tokens: Token count of each.
            failed: True for each that has failed.

        Returns:
            True for each that must be kept.

        Raises:
            StateMismatchError: It differs from the document where the state was saved.
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
        """Return the numbers of kept documents that turned out to be used already."""
        return ()

    def take(self, *, to_fail: bool = False) -> PackedSequence | None:
        """Return the next sequence. None: none remain, or documents must arrive first.

        Args:
            to_fail: A failed document fails its sequence immediately, without waiting for further documents.
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
        return self._stray is None and all(lane.is_over for lane in self._lanes)

    @property
    def failed(self) -> Document | None:
        """The first failed document that is in no sequence yet."""
        return next((lane.failed for lane in self._lanes if lane.failed is not None), self._stray)

    def after(self, sequences: int) -> LaneProgress:
        """Return the progress after this many sequences. Never moves back."""
        while self._journal and self._given < sequences:
            number, self._turn_given, self._cursors[number], tokens = self._journal.popleft()
            self._tokens_given = tuple(map(operator.add, self._tokens_given, tokens))
            self._given += 1
        return LaneProgress(self._turn_given, tuple(self._cursors), self._tokens_given)

    def _ask(self, count: int) -> None:
        share = self._shares / self._came if self._came else _SHARE

        def need(number: int) -> tuple[int, int, int]:
            """Order lanes by supply in whole sequences, then by their next document."""
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
        return self._next[number] * self.size + self._first + number

    def _place(self, position: int) -> tuple[int, int]:
        return position // self.size, position % self.size - self._first

    def _coming(self, number: int) -> int:
        """Return the number of a lane's requested documents that have not arrived."""
        return self._under_way[number]

    def _add(self, number: int, documents: Sequence[Document], position: int, tokens: int) -> list[bool]:  # noqa: ARG002
        return [self._lanes[number].add(document) for document in documents]

    def _cursor(self, number: int) -> LaneCursor:
        return self._lanes[number].cursor

    def _tokens_of(self, pieces: Sequence[PackedPiece]) -> Sequence[int]:  # noqa: ARG002
        return ()

    def _end_if_over(self, number: int) -> None:
        self._lanes[number].is_over = self._next[number] >= self._ends[number] and not self._under_way[number]
