"""Documents of one lane as sequences of a fixed length, where lengths are known only once documents have been read.

A lane has its documents in an order of its own, and fills its sequences from these alone: what they are follows from
the documents' lengths, and not from when they came.
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
"""Of so many documents those are chosen that fill a sequence up."""


@dataclass(frozen=True, slots=True)
class LanePacking:
    """How documents become sequences in lanes.

    Attributes:
        length: tokens of a sequence.
        method: "concat" or "best_fit".
        mixing: the mixture by tokens that documents are drawn from; None: they come in an order of their own.
    """

    length: int
    method: str
    mixing: TokenMixing | None = None

    def lane(self, begin: LaneCursor) -> Lane:
        """A lane, from some place on."""
        return (ConcatLane if self.method == "concat" else BestFitLane)(self.length, begin)


class Lane(ABC):
    """The documents that a lane has got, until they are used up.

    Args:
        length: tokens of a sequence.
        begin: where it goes on.

    Attributes:
        is_over: whether no more documents come.
    """

    def __init__(self, length: int, begin: LaneCursor) -> None:
        self._length, self._begin, self._offset = length, begin, begin.offset
        self._come = 0  # documents, from there on
        self._last = begin.round, begin.part - 1, 0  # of those that are used up, and its own check
        self._check = 0  # of the documents that have come, up to the last one that a state had taken
        self._entries: deque[_Entry] = deque()  # from the first one on that waits
        self._waiting = 0  # documents
        self._tokens = 0  # that wait
        self.is_over = False

    @property
    @abstractmethod
    def supply(self) -> float:
        """About how many sequences can be made of what is there."""

    @abstractmethod
    def share(self, tokens: float) -> float:
        """What a document of so many tokens adds to that, about."""

    @abstractmethod
    def _chosen(self) -> tuple[Sequence[int], int | None] | None:
        """What the next sequence has: see `_use`. None: documents must come first."""

    def take(self, *, to_fail: bool = False) -> list[PackedPiece] | None:
        """The next sequence, which is used up then; empty where there is no more, None: documents must come first.

        Args:
            to_fail: whether a document that has failed fails its sequence, for which no others must come then.
        """
        if self._come <= self._begin.taken.bit_length() and not self.is_over:
            return None  # those that are used up already must have come: what follows is told by their places
        chosen = self._chosen()
        if chosen is None and to_fail:
            chosen = self._failing()
        return None if chosen is None else self._use(*chosen)

    def _failing(self) -> tuple[Sequence[int], int | None] | None:
        """What has come of the next sequence, if one that has failed is in it whatever comes; it has no tokens."""
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
        """What is to come behind what has been taken. It follows from that alone, whatever else is there."""
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
        """The first document that waits and has failed."""
        return next((document for document in self._coming() if document.has_failed), None)

    def add(self, document: Document) -> bool:
        """The lane's next document; whether it is one to keep.

        Raises:
            StateMismatchError: it is not the one that a state was in the middle of.
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
        """Whether what a state was in the middle of comes first, is as long, and is followed by what it had taken."""
        begin = self._begin
        if not begin.offset and not begin.taken:  # it was behind one, of whose position some may be to come
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
        """The documents that wait."""
        return (entry.document for entry in self._entries if entry.waits)

    def _use(self, chosen: Sequence[int], stop: int | None) -> list[PackedPiece]:
        """Take documents, by their numbers among those that wait, the first of them being 0.

        Args:
            stop: so many tokens of the last one are used up then; None: all.
        """
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
                self._offset = end  # of the first one that waits then
            else:
                entry.waits, entry.is_used = False, True
                self._waiting -= 1
                # Others may have been used before.
                self._last = max(self._last, (document.round, document.part, _checked_alone(document)))
        while self._entries and not self._entries[0].waits:
            self._entries.popleft()
        return pieces


class ConcatLane(Lane):
    """Documents one behind the other, cut where a sequence is full; the last one may have fewer tokens."""

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
    """Whole documents: the oldest one that waits, and of the next ones those that leave the least room.

    One that is longer than a sequence is cut into whole sequences, and what is left of it. Documents are taken as they
    come as long as some more fit in any case; of the `CHOICE` that follow those then the ones that fill it up best, and
    the older ones where that is the same.
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
    """Which of some sizes fill a room up as far as any of them can; the first ones, where that is the same.

    Sums are bits of a number: those of the last sizes are the ones without one more size, and these moved by that.
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
    """The check of some documents, the first of which is of round `first`, and of one more."""
    return (check * 31 + (document.round - first) * 17 + document.part * 7 + document.input + 1) % 251


def _checked_alone(document: Document) -> int:
    """The check of a document that is used up, with all that were before it."""
    return (document.input + 1) % 251


class _Entry:
    """A document that has come; whether it waits, or is used up; neither where it has no tokens."""

    __slots__ = ("document", "is_used", "waits")

    def __init__(self, document: Document, waits: bool, is_used: bool) -> None:
        self.document, self.waits, self.is_used = document, waits, is_used
