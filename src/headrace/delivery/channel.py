"""The channel to the trainer: batches, errors and progress one way, credits the other."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from headrace._util.wakeup import Wakeup
from headrace.state.state import ResumePoint, ResumePoints
from headrace.workers.failures import PackedError


@dataclass(slots=True)
class Delivery:
    """A finished batch, or the error that replaces it: a message of a few hundred bytes.

    Attributes:
        kind: "slots" (leaves in a slab), "packed" (a pickle and its buffers in a slab) or "error".
        segment: Number of the slab.
        lengths: For "packed": bytes of the pickle and of each buffer.
        columns: For "slots": the values that are not in the slab.
        capacity: For "slots": number of slots in the slab.
        holes: For "slots": the empty ones among the first `count + len(holes)` slots.
        blob: For "slots": the packed spec of a sample.
        after: Resume point once the batch has been received. None if no state is kept.
        late: Resume point before the batch, if it has changed since the last message: an error ended a batch before
            all its samples were known.
    """

    batch: int
    count: int
    position: int
    kind: Literal["slots", "packed", "error"]
    segment: int = 0
    lengths: tuple[int, ...] = ()
    columns: tuple[list[object], ...] = ()
    capacity: int = 0
    holes: tuple[int, ...] = ()
    blob: bytes = b""
    error: PackedError | None = None
    note: str = ""
    after: ResumePoint | None = None
    late: ResumePoint | None = None


@dataclass(frozen=True, slots=True)
class RaisedError:
    error: PackedError
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChunkDelivery:
    """Finished batches in one slab.

    Attributes:
        outcomes: For each batch (offset, size) of its pickle and of each buffer, in one flat tuple, or the error that
            replaces the batch. With `slots`: the (first, last + 1) slots of the batch.
        counts: Samples of each batch.
        after: Resume point after each batch.
        late: Resume point before the first batch, if it has changed.
        slots: Describes the slots of all batches. None: the batches are pickles.
    """

    segment: int
    outcomes: Sequence[tuple[int, ...] | RaisedError]
    counts: Sequence[int]
    after: ResumePoints
    late: ResumePoint | None = None
    slots: Delivery | None = None


class ChannelFailedError(Exception):
    def __init__(self, failure: PackedError) -> None:
        super().__init__("the other end of the channel has failed")
        self.failure = failure


class _End:
    def __init__(self, failure: PackedError | None) -> None:
        self.failure = failure


class _ChannelState:
    def __init__(self, depth: int, post: Callable[..., None], arrived: Wakeup) -> None:
        self.messages: deque[tuple[Any, _End | None]] = deque()
        # The receiver owns it. Frames of the user may hold the sender until a garbage collection, and the descriptor
        # must be closed before that.
        self.arrived = weakref.ref(arrived)
        self.is_awaited = True  # the receiver found nothing and may be waiting
        self.granted = self.depth = depth
        self.post = post
        self.on_credit: Callable[[], None] = lambda: None
        self.is_closed = False


class Sender:
    """The engine's end of a channel. Used on the engine's loop only.

    A channel keeps the order of messages, loses and repeats none, and holds at most as many as the receiver has
    granted.

    Attributes:
        depth: Messages granted in advance. 0: none before the receiver calls `request`.
    """

    def __init__(self, shared: _ChannelState) -> None:
        self._shared = shared
        self.depth = shared.depth
        self._sent = 0
        self._is_ended = False

    @property
    def granted(self) -> int:
        """Number of messages that may have been sent in total by now."""
        return self._shared.granted

    def send(self, message: object) -> None:
        """Send a message, or raise anyio.WouldBlock if none is granted now."""
        if self._sent >= self._shared.granted:
            raise anyio.WouldBlock
        self._sent += 1
        self._push(message)

    def fail(self, failure: PackedError) -> None:
        self._end(failure)

    def close(self) -> None:
        self._end(None)

    def on_credit(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the engine's loop whenever the receiver grants messages."""
        self._shared.on_credit = callback

    def take_back(self) -> Sequence[Any]:
        """Return the sent messages that a closed receiver will never receive."""
        return _drained(self._shared) if self._shared.is_closed else ()

    def _end(self, failure: PackedError | None) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._push(None, _End(failure))

    def _push(self, message: object, end: _End | None = None) -> None:
        self._shared.messages.append((message, end))
        if not self._shared.is_awaited and end is None:
            return  # the receiver finds the message without a wakeup
        self._shared.is_awaited = False
        arrived = self._shared.arrived()
        if arrived is not None:
            arrived.set()


class Receiver:
    """The trainer's end of a channel."""

    def __init__(self, shared: _ChannelState, arrived: Wakeup) -> None:
        self._shared, self._arrived = shared, arrived
        self._received = 0

    def receive_nowait(self) -> Any:
        """Return the next message.

        Raises:
            anyio.WouldBlock: there is no message yet.
            anyio.EndOfStream: there will be no further message.
            anyio.ClosedResourceError: this end was closed.
            ChannelFailedError: the sender failed. Raised once; EndOfStream follows.
        """
        shared = self._shared
        if not shared.messages:
            self._arrived.clear()
            shared.is_awaited = True  # check again: a message may have come in between
            if shared.messages:
                self._arrived.set()  # for other threads that wait
        if shared.is_closed:
            self._arrived.set()  # for all threads that wait
            raise anyio.ClosedResourceError
        try:
            message, end = shared.messages.popleft()
        except IndexError:
            raise anyio.WouldBlock from None
        if end is not None:
            shared.messages.append((None, _End(None)))  # the end stays, a failure is raised once
            self._arrived.set()
            if end.failure is not None:
                raise ChannelFailedError(end.failure)
            raise anyio.EndOfStream
        self._received += 1
        if shared.depth:
            self._grant()
        return message

    def request(self) -> None:
        """Grant one message, unless one is granted already. Only for channels of depth 0."""
        if not self._shared.depth and self._shared.granted <= self._received:
            self._grant()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `receive_nowait` has something to report."""
        return self._arrived.fileno()

    def close(self) -> Sequence[Any]:
        self._shared.is_closed = True
        self._arrived.set()  # wake threads that wait
        return _drained(self._shared)

    def _grant(self) -> None:
        self._shared.granted += 1
        self._shared.post(self._shared.on_credit)


def _drained(shared: _ChannelState) -> list[Any]:
    left = []
    with contextlib.suppress(IndexError):
        while True:
            left.append(shared.messages.popleft())
    return [message for message, end in left if end is None]


def open_channel(depth: int, post: Callable[..., None]) -> tuple[Sender, Receiver]:
    """Create both ends of a channel. `post` schedules a call on the sender's loop."""
    arrived = Wakeup()
    shared = _ChannelState(depth, post, arrived)
    return Sender(shared), Receiver(shared, arrived)
