"""Packing of a lane's documents into sequences, as their lengths become known by reading.

A lane is one row of the global batch. It has its own order of documents, and fills its sequences from these only. So
sequences depend on the documents' lengths, and not on when documents arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from headrace.errors import StateMismatchError
from headrace.lanes import Document, LaneCursor, PackedPiece
from headrace.plan.token_mixing import TokenMixing

CHOICE = 12
"""Number of documents among which the best fit is searched."""


@dataclass(frozen=True, slots=True)
class LanePacking:
    """How lanes pack documents into sequences, and draw them from a mixture, if there is one."""

    length: int
    method: str
    mixing: TokenMixing | None = None

    def lane(self, begin: LaneCursor) -> Lane:
        return (ConcatLane if self.method == "concat" else BestFitLane)(self.length, begin)


class Lane(ABC):
    """The documents that a lane has received since `begin`, until they are used up."""

    def __init__(self, length: int, begin: LaneCursor) -> None:
        self._length, self._begin, self._offset = length, begin, begin.offset
        self._come = 0  # documents received since `begin`
        self._last = begin.round, begin.part - 1, 0  # round, part and check of the last used document
        self._check = 0  # of the received documents, up to the last one that the state had used
        self._entries: deque[_Entry] = deque()  # starts with the first waiting one
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

    def take(self, *, to_fail: bool = False) -> list[PackedPiece] | None:
        """Use up and return the next sequence; empty at the end. None: documents must arrive first.

        Args:
            to_fail: A failed document fails its sequence immediately, without waiting for further documents.
        """
        if self._come <= self._begin.taken.bit_length() and not self.is_over:
            return None  # wait for the documents that the state had used: they are identified by position
        chosen = self._chosen()
        if chosen is None and to_fail:
            chosen = self._failing()
        return None if chosen is None else self._use(*chosen)

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

    @property
    def cursor(self) -> LaneCursor:
        """Position after the sequences taken. It depends only on these, not on documents received."""
        used = [k for k, entry in enumerate(self._entries) if entry.is_used]
        taken = sum(1 << k - 1 for k in used)
        if not taken and not self._offset:
            round_, part, check = self._last
            return LaneCursor(round_, part + 1, check=check)
        first, check = self._entries[0].document, 0
        for entry in islice(self._entries, taken.bit_length() + 1):
            check = _checked(check, entry.document, first.round)
        return LaneCursor(first.round, first.part, self._offset, taken, check=check)

    @property
    def failed(self) -> Document | None:
        return next((document for document in self._coming() if document.has_failed), None)

    def add(self, document: Document) -> bool:
        """Add the lane's next document. Return True if its content must be kept.

        Raises:
            StateMismatchError: It differs from the document where the state was saved.
        """
        begin = self._begin
        if (document.round, document.part) < begin[:2]:
            self._last = *self._last[:2], _checked_alone(document)
            return False
        if self._come <= begin.taken.bit_length():
            self._check_next(document)
        is_used = self._come > 0 and bool(begin.taken >> self._come - 1 & 1)
        self._come += 1
        if is_used:
            self._last = document.round, document.part, _checked_alone(document)
        waits = not is_used and (document.tokens > 0 or document.has_failed)
        if self._entries or waits:
            self._entries.append(_Entry(document, waits, is_used))
        if waits:
            self._tokens += document.tokens - (self._offset if self._waiting == 0 else 0)
            self._waiting += 1
        return waits

    def _check_next(self, document: Document) -> None:
        """Compare the next document with the state's partly used documents."""
        begin = self._begin
        if not begin.offset and not begin.taken:  # the state was between documents; its position may have further ones
            if begin.part and self._last[2] != begin.check:
                raise self._mismatch()
            return
        if not self._come:
            if document.has_failed or document.is_left_out:
                self._offset = 0
            elif (document.round, document.part) != begin[:2] or document.tokens <= self._offset:
                raise self._mismatch()
        self._check = _checked(self._check, document, begin.round)
        if self._come == begin.taken.bit_length() and self._check != begin.check:
            raise self._mismatch()

    def _mismatch(self) -> StateMismatchError:
        return StateMismatchError(
            "the documents to be packed are not those that the state was in the middle of: the data have changed, "
            "or what is done to them before .pack() does not give the same each time",
            field="packing",
        )

    def _coming(self) -> Iterator[Document]:
        return (entry.document for entry in self._entries if entry.waits)

    def _use(self, chosen: Sequence[int], stop: int | None) -> list[PackedPiece]:
        """Use up waiting documents, by number; of the last one only `stop` tokens. None: all."""
        pieces = list[PackedPiece]()
        waiting = [entry for entry in self._entries if entry.waits]
        for k in chosen:
            entry = waiting[k]
            document, start = entry.document, self._offset if k == 0 else 0
            end = document.tokens if stop is None or k != chosen[-1] else stop
            pieces.append(PackedPiece(document, start, end, end == document.tokens))
            self._tokens -= end - start
            if k == 0:
                self._offset = 0
            if end < document.tokens:
                self._offset = end  # of the document that waits first then
            else:
                entry.waits, entry.is_used = False, True
                self._waiting -= 1
                # Later documents may have been used before this one.
                self._last = max(self._last, (document.round, document.part, _checked_alone(document)))
        while self._entries and not self._entries[0].waits:
            self._entries.popleft()
        return pieces


class ConcatLane(Lane):
    """Concatenated documents, cut where a sequence is full. The last sequence may be shorter."""

    @property
    def supply(self) -> float:
        return self._tokens / self._length

    def share(self, tokens: float) -> float:
        return tokens / self._length

    def _chosen(self) -> tuple[Sequence[int], int | None] | None:
        if self._tokens < self._length and not self.is_over:
            return None
        room, chosen, stop = self._length, list[int](), None
        for k, document in enumerate(self._coming()):
            if not room:
                break
            left = document.tokens - (self._offset if k == 0 else 0)
            chosen.append(k)
            if left > room:
                stop = document.tokens - left + room
            room -= min(left, room)
        return chosen, stop


class BestFitLane(Lane):
    """Whole documents: the oldest waiting one, plus those that leave the least padding.

    A document longer than a sequence is cut into whole sequences and a rest. Documents are added in order while the
    next `CHOICE` all fit. Then the subset of the next `CHOICE` that fits best is added, of equal ones the older.
    """

    @property
    def supply(self) -> float:
        return (self._waiting + self._offset / self._length) / (CHOICE + 1)

    def share(self, tokens: float) -> float:  # noqa: ARG002 (each is one to choose)
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
        best = fullest(list(islice(sizes, chosen, chosen + CHOICE)), room)
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


def _checked(check: int, document: Document, first: int) -> int:
    """Extend a check by a document. `first` is the round of the first document in the check."""
    return (check * 31 + (document.round - first) * 17 + document.part * 7 + document.input + 1) % 251


def _checked_alone(document: Document) -> int:
    """Return the check of a used document, with all documents before it used, too."""
    return (document.input + 1) % 251


class _Entry:
    """A received document that waits, or is used, or neither if it has no tokens."""

    __slots__ = ("document", "is_used", "waits")

    def __init__(self, document: Document, waits: bool, is_used: bool) -> None:
        self.document, self.waits, self.is_used = document, waits, is_used
