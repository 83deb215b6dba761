"""Plain types and protocols that the stages share; no stage imports another, they meet here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Ints = NDArray[np.int64]

Tail = Literal["short", "drop", "pad", "carry"]
"""What becomes of an epoch's last step where it is short."""

Ranges = tuple[tuple[int, int], ...]
"""Numbers as ranges [start, stop) that ascend."""


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
    """

    start: int
    stop: int | None
    size: int | None
    etag: str | None
    chunks: AsyncIterator[Buffer]
    gives_ranges: bool = False


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
    that has a true `is_local` is not asked a second time because it is late.
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


@dataclass(frozen=True, slots=True)
class Span:
    """What a ranged read got: bytes [start, stop) of an object of `size` bytes."""

    start: int
    stop: int
    size: int
    etag: str | None


Check = Callable[[Buffer], bool]
"""Whether these are the right bytes."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of an object that is meant, as far as it is known."""

    size: int | None = None
    etag: str | None = None


class Opens(Protocol):
    """A data set with something to open on the loop that uses it."""

    async def aopen(self) -> None: ...

    async def aclose(self) -> None: ...


class Reads(Protocol):
    """The fetch stage as data sets see it."""

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes:
        """The bytes [start, stop) of the object at `url`."""
        ...

    async def read_into(self, url: str, start: int, target: memoryview, *, etag: str | None = None) -> Span:
        """Fill `target` with the object's bytes from `start` on; shorter only where the object ends."""
        ...


class Meters(Protocol):
    """Where the stages count what they do; calls are cheap and come from the engine's loop."""

    def count_work(self, step: str, seconds: float) -> None:
        """A worker spent time in a step."""
        ...

    def count_started(self) -> None:
        """A worker stands ready."""
        ...

    def count_death(self) -> None:
        """A worker ended before its time."""
        ...


class EpochMeters(Protocol):
    """Where an epoch's progress is counted."""

    def set_reading(self, is_reading: bool) -> None:
        """Whether something is being read now."""
        ...

    def set_depths(self, *, ready: int, open_batches: int) -> None:
        """How many batches are ready, and how many are begun."""
        ...


class Sender(Protocol):
    """The engine's end of a channel: the seam to the trainer's side, which may be another process.

    A channel passes messages between two parties with order, without loss or duplicates, and never holds more of them
    than the receiver has granted.

    Attributes:
        depth: how many messages are granted beforehand; 0: none before the receiver asks.
        granted: how many messages may have been sent in all by now.
    """

    depth: int

    @property
    def granted(self) -> int: ...

    def send(self, message: Any) -> None:
        """Pass a message on.

        Raises:
            anyio.WouldBlock: no more is granted now.
        """
        ...

    def fail(self, blob: bytes) -> None:
        """Have the receiver raise a packed exception after all messages."""
        ...

    def close(self) -> None:
        """There are no more messages."""
        ...

    def on_credit(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on our side whenever more is granted."""
        ...

    def take_back(self) -> Sequence[Any]:
        """The messages that were sent and will never be received, because the receiver has closed."""
        ...


class Receiver(Protocol):
    """The trainer's end of a channel."""

    def receive_nowait(self) -> Any:
        """The next message.

        Raises:
            anyio.WouldBlock: there is none yet.
            anyio.EndOfStream: there will be none any more.
            anyio.ClosedResourceError: this end was closed.
            anyio.BrokenResourceError: the other end has gone without a word.
        """
        ...

    def request(self) -> None:
        """Grant one message that is not granted yet, where the channel's depth is 0."""
        ...

    def fileno(self) -> int:
        """What to wait on, until it is readable: something has come."""
        ...

    def close(self) -> Sequence[Any]:
        """Take no more messages; gives those that were sent and not received, as far as they are known on this side."""
        ...


running_reader: ContextVar[Reads | None] = ContextVar("headrace_running_reader", default=None)
"""The reader of the loader on whose loop we run; `hr.read` asks it."""

Charges = Callable[[int], Awaitable[None] | None]
"""Has so many bytes counted; gives what to wait for until they may be held, or None where they may be at once."""

running_charge: ContextVar[Charges | None] = ContextVar("headrace_running_charge", default=None)
"""Waits until a read may hold so many bytes; asked once the size is known, and before the body is read.

While it waits, the read holds no place among the requests under way, and no time limit runs.
"""


@dataclass(slots=True, eq=False)
class RunningSample:
    """The sample that a coroutine makes: its epoch's key and its position are those of its random numbers.

    Attributes:
        generator: what `hr.rng` gives in that coroutine and in the tasks that it starts; made when it is first asked
            for.
    """

    key: int
    position: int
    generator: np.random.Generator | None = None


running_sample: ContextVar[RunningSample | None] = ContextVar("headrace_running_sample", default=None)
"""The sample that the coroutine we run in makes; None in workers, which make one at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where samples lie in bytes: a table over numpy arrays, no object per sample.

    Sample i has the key `keys[i]` (UTF-8 bytes, surrogateescape) and the members `starts[i]:starts[i + 1]`;
    member m is `size[m]` bytes at `offset[m]` and holds the field `fields[field[m]]`.
    """

    keys: NDArray[np.bytes_]
    starts: Ints
    field: NDArray[np.int32]
    offset: Ints
    size: Ints
    fields: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.keys, self.starts, self.field, self.offset, self.size, self.fields)

    def cut(self, start: int, stop: int) -> Rows:
        """The rows [start, stop), without a copy."""
        starts = self.starts[start : stop + 1]
        first, last = int(starts[0]), int(starts[-1])
        field, offset, size = self.field[first:last], self.offset[first:last], self.size[first:last]
        return Rows(self.keys[start:stop], starts - first, field, offset, size, self.fields)

    def take(self, chosen: Ints) -> Rows:
        """The rows at the indices `chosen`, in that order."""
        members, starts = self.members(chosen), np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(self.starts[chosen + 1] - self.starts[chosen], out=starts[1:])
        return Rows(
            self.keys[chosen], starts, self.field[members], self.offset[members], self.size[members], self.fields
        )

    def members(self, chosen: Ints) -> Ints:
        """The numbers of the members of the samples `chosen`, one sample after the other."""
        counts = self.starts[chosen + 1] - self.starts[chosen]
        ends = np.cumsum(counts)
        first = np.repeat(self.starts[chosen] - ends + counts, counts)
        return np.asarray(np.arange(len(first)) + first, np.int64)

    def only(self, members: NDArray[np.bool_]) -> Rows:
        """The same samples with those of their members that are marked."""
        total = np.concatenate([[0], np.cumsum(members)])
        offset, size, field = self.offset[members], self.size[members], self.field[members]
        return Rows(self.keys, np.asarray(total[self.starts], np.int64), field, offset, size, self.fields)

    def shifted(self, base: int) -> Rows:
        """The same rows with `base` added to every offset."""
        return Rows(self.keys, self.starts, self.field, self.offset + base, self.size, self.fields)

    def sizes(self) -> Ints:
        """Bytes of each sample, all its members together."""
        total = np.concatenate([[0], np.cumsum(self.size)])
        return np.asarray(total[self.starts[1:]] - total[self.starts[:-1]], np.int64)

    @staticmethod
    def empty() -> Rows:
        """No rows."""
        none = np.zeros(0, np.int64)
        return Rows(np.zeros(0, "S1"), np.zeros(1, np.int64), none.astype(np.int32), none, none, ())

    @staticmethod
    def concat(tables: Sequence[Rows]) -> Rows:
        """All rows of `tables`, one after the other."""
        if len(tables) == 1:
            return tables[0]
        fields = tuple(dict.fromkeys(name for t in tables for name in t.fields))
        number = {name: k for k, name in enumerate(fields)}
        renumbered = [np.array([number[f] for f in t.fields] or [0], np.int32)[t.field] for t in tables]
        ends = np.cumsum([0] + [len(t.offset) for t in tables])
        starts = [t.starts[:-1] + end for t, end in zip(tables, ends, strict=False)]
        return Rows(
            np.concatenate([t.keys for t in tables]) if tables else np.zeros(0, "S1"),
            np.concatenate([*starts, ends[-1:]]).astype(np.int64),
            np.concatenate(renumbered) if tables else np.zeros(0, np.int32),
            np.concatenate([t.offset for t in tables]) if tables else np.zeros(0, np.int64),
            np.concatenate([t.size for t in tables]) if tables else np.zeros(0, np.int64),
            fields,
        )


Sample = Any
"""What a data set gives for one key: for streams a dict with `__key__`, `__url__` and one entry for each field."""
