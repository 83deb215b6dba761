"""Plain types, and the protocols of stores and batchers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Ints = NDArray[np.int64]

Tail = Literal["short", "drop", "pad", "carry", "uneven"]
"""How a short last step of an epoch is handled."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges [start, stop) of numbers."""


class Batcher(Protocol):
    """Finds the next group of samples. Implement it to group samples by new rules.

    A batcher is offered a measure of each waiting sample, in order, until it names some of them. A new batcher is then
    created for the next group and is offered the remaining samples and later ones. The result must depend on the
    offered measures only.
    """

    def offer(self, measure: int) -> Sequence[int] | None:
        """Offer the next waiting sample.

        Returns:
            The samples that form a group now, numbered from 0 in the order in which they were offered to this batcher.
            None, or an empty list, if more samples are needed.
        """
        ...

    def end(self) -> Sequence[int] | None:
        """Return the next group after the last sample, or None to drop the waiting samples."""
        ...


@runtime_checkable
class LastingBatcher(Batcher, Protocol):
    """A batcher kept for later groups, so that the remaining samples are not offered again.

    It forgets the samples that it has named. It must find the groups that new batchers would find if offered the
    remaining samples. It numbers samples by all that it was ever offered, named ones included.
    """

    is_lasting: Literal[True]


@dataclass(frozen=True, slots=True)
class Answer:
    """A store's response to one request: a range of bytes of an object.

    Attributes:
        start, stop: Range of the object that `chunks` contains, in bytes.
        size: Size of the whole object. `size` and `stop` are None if the store does not report them in advance. Then
            `chunks` ends without an error only if the body is known to be complete.
        etag: Version of the object, if the store has one.
        chunks: The body, in order. A body that implements `Fills` is read by `read_into`.
        gives_ranges: For a whole object: the store also supports ranges, and this response may be aborted. A long
            object is then read in several ranges at once.
        in_order: True if the store sends the whole object for every range. Concurrent requests would send it
            repeatedly.
        modified: Last modification, unparsed, if the store reports it.
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
    """A body that writes into the reader's memory, which saves a copy.

    Attributes:
        received: Bytes of the body so far, written anywhere. Valid while `read_into` waits and after it has failed.
    """

    received: int

    async def read_into(self, target: memoryview) -> int:
        """Fill `target` with the next bytes. Returns their number, which is smaller only at the end.

        Raises:
            StorageError, OSError, TimeoutError: as `Store.get`. The bytes counted by `received` are in place.
        """
        ...

    async def aclose(self) -> None:
        """Close the body without reading the rest."""
        ...


@runtime_checkable
class Store(Protocol):
    """A storage of objects under paths. Implement it to add a kind of storage.

    A store responds or raises. It neither retries nor checks lengths; the reader does both for all stores. A store with
    a true `is_local` gets no hedged requests, and its objects are not cached. Stores with one `host`, a text, share its
    limit of concurrent requests, rate limit and retry budget. A store with a true `gives_ends` accepts a negative
    `start`, without a `stop`, for the last bytes.
    """

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """Request bytes [start, stop) of the object; all of it if both are None.

        A `stop` beyond the end returns what exists. With `if_match`, another ETag raises ObjectChangedError.

        Raises:
            ObjectMissingError, AccessDeniedError, ObjectChangedError: a retry is useless.
            ThrottledError: retry later and less often.
            StorageError, OSError, TimeoutError: this request failed; a retry may succeed.
        """
        ...

    async def aclose(self) -> None:
        """Close connections and threads. No request is under way."""
        ...


class Listed(NamedTuple):
    """An object in a listing, with size and version if the listing has them."""

    path: str
    size: int | None = None
    etag: str | None = None


@runtime_checkable
class Lists(Protocol):
    """A store that can list its objects, as patterns with `*` and folders need."""

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[Sequence[Listed]]:
        """List the objects whose paths begin with `prefix`, page by page, in any order.

        Args:
            prefix: Empty, or the path of a folder and a slash. A missing folder has no objects.
            levels: Objects may be omitted if they have `levels` or more slashes after the prefix.

        Raises:
            AccessDeniedError: a retry is useless.
            StorageError, OSError, TimeoutError: listing failed; a retry may succeed.
        """
        ...


@runtime_checkable
class Pins(Protocol):
    """A store with movable revisions, such as branches."""

    async def pinned(self, prefix: str) -> str:
        """Return the folder at its current revision, which does not change.

        Raises:
            ObjectMissingError: the store does not report the revision.
            StorageError, OSError, TimeoutError: the request failed; a retry may succeed.
        """
        ...
