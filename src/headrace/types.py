"""For whoever writes a store: what it answers, and the protocol that it has; and some plain types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Ints = NDArray[np.int64]

Tail = Literal["short", "drop", "pad", "carry", "uneven"]
"""What becomes of an epoch's last step where it is short."""

Ranges = tuple[tuple[int, int], ...]
"""Numbers as ranges [start, stop) that ascend."""


class Batcher(Protocol):
    """Finds the next group of samples: the seam for whoever puts samples together.

    It is told a measure of each sample that waits, in order, until it names some of them. Then another one is begun for
    the next group, and told of those that are left, and of what comes after them. What it does must follow from what it
    was told alone.
    """

    def offer(self, measure: int) -> Sequence[int] | None:
        """The next sample that waits.

        Returns:
            The samples that make a group now, by the order in which they were offered to this batcher, from 0; None, or
            an empty list, as long as others are needed.
        """
        ...

    def end(self) -> Sequence[int] | None:
        """No other sample comes. The same; but where it names none, those that wait are left out."""
        ...


@runtime_checkable
class LastingBatcher(Batcher, Protocol):
    """One that is asked for the next groups, too: others would be told again of all that is left, group by group.

    What it has named it forgets. It finds what a new one would that is told of what is left, and names samples by how
    many it was told of before them, those that it has named already among these.
    """

    is_lasting: Literal[True]


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's answer to one request: which bytes of the object come, and the bytes.

    Attributes:
        start, stop: the range of the object that `chunks` gives, in bytes.
        size: the size of the whole object. It and `stop` are None where the store does not say it before the end: then
            `chunks` ends without an error only where the body is known to be whole.
        etag: the object's version, where the store has one.
        chunks: the body, in order; where it is one that `Fills`, it is read by that.
        gives_ranges: of a whole object: the store has said that it gives parts too, and it may be told to stop here; a
            long one is then read in several parts at once.
        in_order: the store sends the whole for every part: to ask for several at once would send it as often.
        modified: when the object was last modified, as the store writes it, where it says so.
    """

    start: int
    stop: int | None
    size: int | None
    etag: str | None
    chunks: AsyncIterator[Buffer]
    gives_ranges: bool = False
    in_order: bool = False
    modified: str | None = None


@runtime_checkable
class Fills(Protocol):
    """A body that writes into memory that the reader gives: one copy less than in pieces.

    Attributes:
        received: bytes of the body so far, written anywhere; also while `read_into` waits, and after it has failed.
    """

    received: int

    async def read_into(self, target: memoryview) -> int:
        """Fill `target` with the body's next bytes; fewer only where the body ends. Gives how many.

        Raises:
            StorageError, OSError, TimeoutError: as `Store.get`; what `received` counts is in its place.
        """
        ...

    async def aclose(self) -> None:
        """Nobody reads the rest."""
        ...


@runtime_checkable
class Store(Protocol):
    """A place that holds objects under paths: the seam for whoever adds a kind of storage.

    A store answers or raises; it neither retries nor checks lengths: the reader does both, once for all stores. One
    that has a true `is_local` is not asked a second time because it is late, and nothing of it is cached. Those that
    have the same `host`, a text, share what that host takes: requests at once, their pace, and further attempts. One
    that has a true `gives_ends` takes a negative `start`, without a `stop`, for so many of the last bytes.
    """

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """Ask for bytes [start, stop) of the object (all of it where both are None).

        A `stop` beyond the end gives what there is. With `if_match`, another ETag is ObjectChangedError.

        Raises:
            ObjectMissingError, AccessDeniedError, ObjectChangedError: asking again is of no use.
            ThrottledError: ask again, later and less often.
            StorageError, OSError, TimeoutError: this request failed; another one may not.
        """
        ...

    async def aclose(self) -> None:
        """Let connections and threads go; no request is under way."""
        ...


class Listed(NamedTuple):
    """An object of a store, as a listing has it; its size and version where that tells them."""

    path: str
    size: int | None = None
    etag: str | None = None


@runtime_checkable
class Lists(Protocol):
    """A store that can say which objects it has: what patterns with `*` and folders need; a `Store` may have it."""

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[Sequence[Listed]]:
        """The objects whose paths begin with `prefix`, in any order, a page after the other: never all at once.

        Args:
            prefix: empty, or the path of a folder and a slash. One that is not there has no objects.
            levels: objects with more slashes than this less one behind the prefix may be left out.

        Raises:
            AccessDeniedError: asking again is of no use.
            StorageError, OSError, TimeoutError: it failed; another one may not.
        """
        ...


@runtime_checkable
class Pins(Protocol):
    """A store whose objects lie at revisions that move, as branches do; a `Store` may have it."""

    async def pinned(self, prefix: str) -> str:
        """The same folder at what its revision is now, where it stays as it is.

        Raises:
            ObjectMissingError: the store does not say what that is.
            StorageError, OSError, TimeoutError: it failed; another one may not.
        """
        ...
