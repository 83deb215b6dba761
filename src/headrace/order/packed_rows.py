"""Packing of documents whose lengths become known by reading, row by row.

Row j of the global batch is a packed row. With G rows and K inputs, it has the documents j, j + G, j + 2 G, … of each
input's order, and fills its sequences from these only. Document t of input k is at position t K + k of the epoch. Only
mixtures by tokens have several inputs. A rank has whole rows. So sequences depend on the documents and on G, and not on
the ranks, or on when documents arrive.
"""

from __future__ import annotations

import heapq
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from headrace.errors import StateMismatchError
from headrace.order.row_states import InputCursor, RowCursor, RowProgress
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.order.combined import TokenMixing
    from headrace.order.packing import Packing

CHOICE = 12
"""Number of documents among which the best fit is searched."""

_SHARE = 0.1  # of a sequence: estimate for a document before any was read


@dataclass(slots=True, eq=False)
class Document:
    """A document that was read.

    Attributes:
        name: Arbitrary number that identifies the document.
        position: Position in the epoch of the sample that the document was made from.
        round: Index among the row's drawn positions.
        part: Index among the documents made from that position.
        has_failed: True if it failed. It has no tokens, and its sequence gets the error.
        is_skipped: True if it is skipped: it counts as one without tokens.
        waits: True until it is used up.
        is_used: True if it is used up. A document without tokens neither waits nor is used.
    """

    name: int
    position: int
    round: int
    part: int
    tokens: int
    has_failed: bool = False
    is_skipped: bool = False
    input: int = 0
    waits: bool = False
    is_used: bool = False


class PackedPiece(NamedTuple):
    document: Document
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.document.tokens


class PackedSequence(NamedTuple):
    """A packed sequence. Each row has one position per step."""

    position: int
    pieces: Sequence[PackedPiece]


class PackedRow(ABC):
    """The documents that a row has drawn since `begin`, until they are used up."""

    def __init__(self, length: int, begin: RowCursor) -> None:
        self._length, self._begin, self._offset = length, begin, begin.offset
        self._arrived = 0  # documents since `begin`
        self._last = begin.round, begin.part - 1, 0  # round, part and check of the last used document
        self._check = 0  # of the arrived documents, up to the last one that the state had used
        self._documents: deque[Document] = deque()  # starts with the first waiting one
        self._waiting = 0  # number of waiting documents
        self._tokens = 0  # remaining tokens of waiting documents
        self.is_over = False

    @property
    @abstractmethod
    def supply(self) -> float:
        """Approximate number of sequences that the waiting documents fill."""

    @abstractmethod
    def share(self, tokens: float) -> float:
        """Return how much a document with this many tokens adds to `supply`, approximately."""

    @abstractmethod
    def _chosen(self) -> tuple[Sequence[int], int | None] | None:
        """Choose documents of the next sequence, as for `_use`. None: more must arrive first."""

    @property
    def failed(self) -> Document | None:
        return next((document for document in self._coming() if document.has_failed), None)

    @property
    def cursor(self) -> RowCursor:
        """Position after the sequences taken. It depends only on these, not on documents that have arrived."""
        taken = sum(1 << k - 1 for k, document in enumerate(self._documents) if document.is_used)
        if not taken and not self._offset:
            round_, part, check = self._last
            return RowCursor(round_, part + 1, check=check)
        first, check = self._documents[0], 0
        for document in islice(self._documents, taken.bit_length() + 1):
            check = _extended(check, document, first.round)
        return RowCursor(first.round, first.part, self._offset, taken, check=check)

    def add(self, document: Document) -> bool:
        """Add the row's next document. Return True if its content must be kept.

        Raises:
            StateMismatchError: It differs from the document where the state was saved.
        """
        begin = self._begin
        if (document.round, document.part) < begin[:2]:
            self._last = *self._last[:2], _alone(document)
            return False
        if self._arrived <= begin.taken.bit_length():
            self._check_next(document)
        document.is_used = self._arrived > 0 and bool(begin.taken >> self._arrived - 1 & 1)
        document.waits = not document.is_used and (document.tokens > 0 or document.has_failed)
        self._arrived += 1
        if document.is_used:
            self._last = document.round, document.part, _alone(document)
        if self._documents or document.waits:
            self._documents.append(document)
        if document.waits:
            self._tokens += document.tokens - (self._offset if self._waiting == 0 else 0)
            self._waiting += 1
        return document.waits

    def take(self, *, to_fail: bool = False) -> list[PackedPiece] | None:
        """Use up and return the next sequence; empty at the end. None: documents must arrive first.

        Args:
            to_fail: A failed document fails its sequence immediately, without waiting for further documents.
        """
        if self._arrived <= self._begin.taken.bit_length() and not self.is_over:
            return None  # wait for the documents that the state had used: they are identified by position
        chosen = self._chosen()
        if chosen is None and to_fail:
            chosen = self._failing()
        return None if chosen is None else self._use(*chosen)

    def _check_next(self, document: Document) -> None:
        """Compare the next document with the state's partly used documents."""
        begin = self._begin
        if not begin.offset and not begin.taken:  # the state was between documents; its position may have further ones
            if begin.part and self._last[2] != begin.check:
                raise _mismatch()
            return
        if not self._arrived:
            if document.has_failed or document.is_skipped:
                self._offset = 0
            elif (document.round, document.part) != begin[:2] or document.tokens <= self._offset:
                raise _mismatch()
        self._check = _extended(self._check, document, begin.round)
        if self._arrived == begin.taken.bit_length() and self._check != begin.check:
            raise _mismatch()

    def _coming(self) -> Iterator[Document]:
        return (document for document in self._documents if document.waits)

    def _failing(self) -> tuple[Sequence[int], int | None] | None:
        """Return the documents of the next sequence so far, if a failed one is certainly in it."""
        tokens = -self._offset
        for k, document in enumerate(self._coming()):
            if document.has_failed:
                return range(k + 1), None
            tokens += document.tokens
            if tokens >= self._length:
                return None
        return None

    def _use(self, chosen: Sequence[int], stop: int | None) -> list[PackedPiece]:
        """Use up waiting documents, by number; of the last one only `stop` tokens. None: all."""
        pieces, waiting = list[PackedPiece](), list(self._coming())
        for k in chosen:
            document, start = waiting[k], self._offset if k == 0 else 0
            end = document.tokens if stop is None or k != chosen[-1] else stop
            pieces.append(PackedPiece(document, start, end))
            self._tokens -= end - start
            if k == 0:
                self._offset = 0
            if end < document.tokens:
                self._offset = end  # of the document that waits first then
            else:
                document.waits, document.is_used = False, True
                self._waiting -= 1
                # Later documents may have been used before this one.
                self._last = max(self._last, (document.round, document.part, _alone(document)))
        while self._documents and not self._documents[0].waits:
            self._documents.popleft()
        return pieces


class ConcatRow(PackedRow):
    """Concatenated documents, cut where a sequence is full. The last sequence may be shorter."""

    @property
    def supply(self) -> float:
        return self._tokens / self._length

    def share(self, tokens: float) -> float:
        return tokens / self._length

    def _chosen(self) -> tuple[Sequence[int], int | None] | None:
        if self._tokens < self._length and not self.is_over:
            return None
        end, count = self._offset + self._length, 0
        for document in self._coming():
            count += 1
            if document.tokens >= end:
                return range(count), end
            end -= document.tokens
        return range(count), None


class BestFitRow(PackedRow):
    """Whole documents: the oldest waiting one, plus those that leave the least padding.

    A document longer than a sequence is cut into whole sequences and a rest. Documents are added in order while the
    next `CHOICE` all fit. Then the subset of the next `CHOICE` that fits best is added, of equal ones the older.
    """

    @property
    def supply(self) -> float:
        return (self._waiting + self._offset / self._length) / (CHOICE + 1)

    def share(self, tokens: float) -> float:
        return 1 / (CHOICE + 1)

    def _chosen(self) -> tuple[Sequence[int], int | None] | None:
        documents = self._coming()
        first = next(documents, None)
        if first is None:
            return ([], None) if self.is_over else None
        room = self._length - (first.tokens - self._offset)
        if room <= 0:
            return [0], self._offset + self._length
        sizes = [document.tokens for document in documents]
        ends = [0, *accumulate(sizes)]
        chosen = 0  # documents that follow the first, without a choice
        while chosen < len(sizes) or not self.is_over:
            if len(sizes) < chosen + CHOICE and not self.is_over:
                return None
            if ends[min(chosen + CHOICE, len(sizes))] - ends[chosen] > room:
                break
            room -= sizes[chosen]
            chosen += 1
        best = fullest(sizes[chosen : chosen + CHOICE], room)
        return [*range(chosen + 1), *(chosen + 1 + k for k in best)], None


def fullest(sizes: Sequence[int], room: int) -> list[int]:
    """Return the indices of the sizes that fill a room best. Of equal choices, the first.

    Reachable sums are the bits of a number. Adding a size shifts the number by that size.
    """
    mask, reached = (1 << room + 1) - 1, [1]
    for size in reversed(sizes):
        last = reached[-1]
        reached.append((last | last << size) & mask if size <= room else last)
    total, chosen = reached[-1].bit_length() - 1, list[int]()
    for k, size in enumerate(sizes):
        if size <= total and reached[len(sizes) - 1 - k] >> total - size & 1:
            chosen.append(k)
            total -= size
    return chosen


def _extended(check: int, document: Document, first: int) -> int:
    """Extend a check by a document. `first` is the round of the first document in the check."""
    return (check * 31 + (document.round - first) * 17 + document.part * 7 + document.input + 1) % 251


def _alone(document: Document) -> int:
    """Return the check of a used document, with all documents before it used, too."""
    return (document.input + 1) % 251


def _mismatch() -> StateMismatchError:
    return StateMismatchError(
        "the documents to be packed are not those that the state was in the middle of: the data have changed, "
        "or what is done to them before .pack() does not give the same each time",
        field="rows",
    )


class PackedRows:
    """The packed rows of a rank, from a position on: reading order, and sequences.

    Documents are read in the order in which rows need them. Rows progress at different rates, so in the order of the
    epoch more and more documents would wait.

    Args:
        size: Number of rows on all ranks.
        begin: Progress of the rows. None: at the start.
        is_skipped: True for the positions of skipped documents. These are read, too, because states count all documents
            read. None: none are skipped.

    Attributes:
        count: Number of documents to read.
        size: Number of rows on all ranks.
        first_window: Number of documents that are read together at first. Later at most as many as so far, because
            positions take long to choose.
    """

    first_window: ClassVar[int | None] = 1024

    def __init__(
        self,
        packing: Packing,
        rows: range,
        size: int,
        end: int,
        begin: RowProgress | None = None,
        is_skipped: Callable[[int], bool] | None = None,
    ) -> None:
        self.size, self.batch, self._is_skipped = size, len(rows), is_skipped
        self._first, mixing = rows.start, packing.mixing
        inputs = 0 if mixing is None else len(mixing.names)
        self._width = max(1, inputs)
        if begin is None:
            begin = RowProgress(0, (RowCursor(inputs=(InputCursor(),) * inputs),) * len(rows), (0,) * inputs)
        # Of the sequences before the last state: turn, cursor of each row, tokens of each input.
        self._turn_given, self._cursors, self._tokens_given = begin.turn, list(begin.cursors), begin.tokens
        self._turn, self._given = begin.turn, 0
        kind = ConcatRow if packing.method == "concat" else BestFitRow
        self._rows = [kind(packing.length, cursor) for cursor in begin.cursors]
        self._draws = list[_Draws]()
        if mixing is not None:
            self._draws = [_Draws(mixing, row, size, own) for row, own in zip(rows, begin.cursors, strict=True)]
        self._next = [cursor.round for cursor in begin.cursors]  # round of the next document to read
        self._ends = [max(0, -((row - end) // size)) for row in rows]  # in rounds
        self.count = sum(max(0, stop - start) for start, stop in zip(self._next, self._ends, strict=True))
        self._under_way = [0] * len(rows)
        self._asked: deque[int] = deque()  # requested positions
        self._stray: Document | None = None  # error of the source after its last document
        self._arrived = 0  # positions, in order of their requests
        self._shares = 0.0  # total share of sequences in them
        self._arrived_of, self._tokens_of = [1] * self._width, [1] * self._width  # positions and tokens of each input
        # (row, turn, cursor after it, tokens of each input) of each sequence
        self._journal: deque[tuple[int, int, RowCursor, Sequence[int]]] = deque()
        for number in range(len(rows)):
            self._end_if_over(number)

    def positions(self, start: int, stop: int) -> Ints:
        """Return positions of the documents to read, number `start` to `stop` - 1 in reading order.

        Each is fixed once requested, and forgotten once its document has arrived.
        """
        lacking = stop - self._arrived - len(self._asked)
        if lacking > 0:
            self._ask(lacking)
            # A source that ends with an error reports it in place of a sample.
            self._asked.extend([self._first] * (stop - self._arrived - len(self._asked)))
        return np.array(list(islice(self._asked, start - self._arrived, stop - self._arrived)), np.int64)

    def arrive(self, name: int, tokens: Sequence[int], failed: Sequence[bool]) -> list[int]:
        """Add the documents made from the next position read: none, one or several.

        Args:
            name: Number of the first document; the others have the following numbers.
            tokens: Token count of each.
            failed: True for each that has failed.

        Returns:
            Numbers of documents whose content is not needed (any more): of these, or of earlier ones.

        Raises:
            StateMismatchError: It differs from the document where the state was saved.
        """
        if self._arrived >= self.count:
            strays = [name + part for part, has_failed in enumerate(failed) if has_failed]
            if strays:
                self._stray = Document(strays[0], 0, 0, 0, 0, has_failed=True)
            return [name + part for part, has_failed in enumerate(failed) if not has_failed]
        position = self._asked.popleft()
        place, input_ = divmod(position, self._width)
        round_, number = place // self.size, place % self.size - self._first
        row, whole = self._rows[number], sum(tokens)
        self._arrived += 1
        self._under_way[number] -= 1
        is_skipped = self._is_skipped is not None and self._is_skipped(position)
        if is_skipped:
            tokens, failed = [0] * len(tokens), [False] * len(failed)
        self._shares += row.share(sum(tokens))
        documents = [
            Document(name + part, position, round_, part, count, has_failed, is_skipped, input_)
            for part, (count, has_failed) in enumerate(zip(tokens, failed, strict=True))
        ]
        if self._draws:
            self._arrived_of[input_] += 1
            self._tokens_of[input_] += whole
            documents = self._draws[number].arrive(input_, documents, whole)
        unneeded = [document.name for document in documents if not row.add(document)]
        self._end_if_over(number)
        return unneeded

    def take(self, *, to_fail: bool = False) -> PackedSequence | None:
        """Return the next sequence. None: none remain, or documents must arrive first.

        Args:
            to_fail: A failed document fails its sequence immediately, without waiting for further documents.
        """
        for _ in self._rows:
            step, number = divmod(self._turn, self.batch)
            row = self._rows[number]
            pieces = row.take(to_fail=to_fail)
            if pieces is None:
                return None
            self._turn += 1
            if pieces:
                cursor, tokens = row.cursor, [0] * len(self._tokens_given)
                if self._draws:
                    cursor = cursor._replace(inputs=self._draws[number].before(cursor.round))
                    for document, start, stop in pieces:
                        tokens[document.input] += stop - start
                self._journal.append((number, self._turn, cursor, tokens))
                return PackedSequence(step * self.size + self._first + number, pieces)
        return None

    @property
    def is_over(self) -> bool:
        return self._stray is None and all(row.is_over for row in self._rows)

    @property
    def failed(self) -> Document | None:
        """The first failed document that is in no sequence yet."""
        return next((row.failed for row in self._rows if row.failed is not None), self._stray)

    def after(self, sequences: int) -> RowProgress:
        """Return the progress after this many sequences. Never moves back."""
        while self._journal and self._given < sequences:
            number, self._turn_given, self._cursors[number], tokens = self._journal.popleft()
            self._tokens_given = tuple(map(operator.add, self._tokens_given, tokens))
            self._given += 1
        return RowProgress(self._turn_given, tuple(self._cursors), self._tokens_given)

    def _ask(self, count: int) -> None:
        share = self._shares / self._arrived if self._arrived else _SHARE
        means = [tokens / some for tokens, some in zip(self._tokens_of, self._arrived_of, strict=True)]

        def need(number: int) -> tuple[int, int, int]:
            """Order rows by supply in whole sequences, then by their next document."""
            coming = self._draws[number].coming if self._draws else self._under_way[number]
            return int(self._rows[number].supply + coming * share), self._next[number], number

        needs = [need(number) for number in range(self.batch) if self._next[number] < self._ends[number]]
        heapq.heapify(needs)
        while needs and count:
            number = needs[0][-1]
            turn, input_ = self._draws[number].ask(means) if self._draws else (self._next[number], 0)
            self._asked.append((turn * self.size + self._first + number) * self._width + input_)
            self._next[number] += 1
            self._under_way[number] += 1
            count -= 1
            if self._next[number] < self._ends[number]:
                heapq.heapreplace(needs, need(number))
            else:
                heapq.heappop(needs)

    def _end_if_over(self, number: int) -> None:
        self._rows[number].is_over = self._next[number] >= self._ends[number] and not self._under_way[number]


class _Draws:
    """The order in which a row draws documents from the inputs of a mixture by tokens.

    It depends only on the row's own documents, skipped ones included, and not on when they arrive.
    """

    def __init__(self, mixing: TokenMixing, row: int, size: int, begin: RowCursor) -> None:
        self._mixing, self._size, self._phases = mixing, size, mixing.phases(row, size)
        self._round = begin.round
        self._drawn = [cursor.round for cursor in begin.inputs]  # positions of each input, and their tokens
        self._tokens = [cursor.tokens for cursor in begin.inputs]
        self._asked = [*self._drawn]  # requested positions of each input
        # The documents of each arrived position that was not drawn, and their tokens.
        self._waiting: list[deque[tuple[Sequence[Document], int]]] = [deque() for _ in begin.inputs]
        self._before = deque([(begin.round, begin.inputs)])  # progress of the inputs before each drawn position
        self._is_stuck = False  # True if the next draw needs an input that was not requested

    @property
    def coming(self) -> int:
        """Number of requested positions. Those that have arrived count, too, unless the row is stuck."""
        ahead = sum(self._asked) - sum(self._drawn)
        return ahead - sum(map(len, self._waiting)) if self._is_stuck else ahead

    def ask(self, means: Sequence[float]) -> tuple[int, int]:
        """Request a document: (its number in the input, input). The input is missing, or will lack most.

        Args:
            means: Approximate token count of a document of each input.
        """
        missing = self._missing
        if missing:  # nothing can be drawn before these arrive
            input_ = missing[0]
        else:
            ahead = [asked - drawn for asked, drawn in zip(self._asked, self._drawn, strict=True)]
            drawn = [
                tokens + sum(count for _, count in some) + mean * (number - len(some))
                for tokens, some, mean, number in zip(self._tokens, self._waiting, means, ahead, strict=True)
            ]
            lacking = self._mixing.lacking(self._size, drawn)
            input_ = max(lacking, key=lambda k: (not ahead[k], lacking[k], -k))
        self._asked[input_] += 1
        self._is_stuck = len(missing) > 1
        return self._asked[input_] - 1, input_

    def arrive(self, input_: int, documents: Sequence[Document], tokens: int) -> list[Document]:
        """Add the documents of an input's next position. Return all that can be drawn now, in order."""
        self._waiting[input_].append((documents, tokens))
        result = list[Document]()
        while True:
            heads = [some[0][1] if some else None for some in self._waiting]
            chosen = self._mixing.choice(self._size, self._phases, self._tokens, heads)
            if chosen is None:
                self._is_stuck = bool(self._missing)
                return result
            if self._before[-1][0] != self._round:
                self._before.append((self._round, tuple(map(InputCursor, self._drawn, self._tokens))))
            drawn, count = self._waiting[chosen].popleft()
            for document in drawn:
                document.round = self._round
            result += drawn
            self._drawn[chosen] += 1
            self._tokens[chosen] += count
            self._round += 1

    def before(self, round_: int) -> tuple[InputCursor, ...]:
        """Return the progress of inputs before a round was drawn. Rounds must not decrease."""
        while self._before[0][0] < round_:
            self._before.popleft()
        assert self._before[0][0] == round_, "a row is after a position that it has not drawn"
        return self._before[0][1]

    @property
    def _missing(self) -> list[int]:
        """Inputs needed for the next draw that have no document that has arrived or was requested."""
        return [k for k in self._mixing.lacking(self._size, self._tokens) if self._asked[k] == self._drawn[k]]
