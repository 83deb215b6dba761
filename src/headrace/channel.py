"""The channel from the engine to the trainer's side. Messages go one way, grants the other."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from headrace.failures import PackedError
from headrace.wakeup import Wakeup


class ChannelFailedError(Exception):
    """The sender failed; `failure` is its exception."""

    def __init__(self, failure: PackedError) -> None:
        super().__init__("the other end of the channel has failed")
        self.failure = failure


class _End:
    """The last message of a channel."""

    def __init__(self, failure: PackedError | None) -> None:
        self.failure = failure


class _ChannelState:
    def __init__(self, depth: int, post: Callable[..., None], arrived: Wakeup) -> None:
        self.messages: deque[tuple[Any, _End | None]] = deque()
        # The receiver's: who sends may be held by frames of the user's that wait for the garbage collector, and a
        # descriptor must not wait with them.
        self.arrived = weakref.ref(arrived)
        self.is_awaited = True  # the receiver has found nothing, and may wait
        self.granted = self.depth = depth
        self.post = post
        self.on_credit: Callable[[], None] = lambda: None
        self.is_closed = False


class Sender:
    """The engine's end of a channel, used on the engine's loop only.

    A channel passes messages in order, without loss or duplicates, and never holds more of them than the receiver has
    granted.

    Attributes:
        depth: how many messages are granted beforehand; 0: none before the receiver asks.
    """

    def __init__(self, shared: _ChannelState) -> None:
        self._shared = shared
        self.depth = shared.depth
        self._sent = 0
        self._is_ended = False

    @property
    def granted(self) -> int:
        """How many messages may have been sent in all by now."""
        return self._shared.granted

    def send(self, message: object) -> None:
        """Pass a message on.

        Raises:
            anyio.WouldBlock: no more is granted now.
        """
        if self._sent >= self._shared.granted:
            raise anyio.WouldBlock
        self._sent += 1
        self._push(message)

    def fail(self, failure: PackedError) -> None:
        """Have the receiver raise an exception after all messages."""
        self._end(failure)

    def close(self) -> None:
        """There are no more messages."""
        self._end(None)

    def on_credit(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the engine's loop whenever more is granted."""
        self._shared.on_credit = callback

    def take_back(self) -> Sequence[Any]:
        """The messages that were sent and will not be received, because the receiver has closed."""
        return _drained(self._shared) if self._shared.is_closed else ()

    def _end(self, failure: PackedError | None) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._push(None, _End(failure))

    def _push(self, message: object, end: _End | None = None) -> None:
        self._shared.messages.append((message, end))
        if not self._shared.is_awaited and end is None:
            return  # it finds the message without being woken
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
        """The next message.

        Raises:
            anyio.WouldBlock: there is none yet.
            anyio.EndOfStream: there will be none any more.
            anyio.ClosedResourceError: this end was closed.
            ChannelFailedError: the sender has failed; told once, and the end follows.
        """
        shared = self._shared
        if not shared.messages:
            self._arrived.clear()
            shared.is_awaited = True  # and look again: what came between is seen either way
            if shared.messages:
                self._arrived.set()  # others who wait are to see what is not taken here
        if shared.is_closed:
            self._arrived.set()  # for all who wait, however many
            raise anyio.ClosedResourceError
        try:
            message, end = shared.messages.popleft()
        except IndexError:
            raise anyio.WouldBlock from None
        if end is not None:
            shared.messages.append((None, _End(None)))  # the end stays the end, a failure is told once
            self._arrived.set()
            if end.failure is not None:
                raise ChannelFailedError(end.failure)
            raise anyio.EndOfStream
        self._received += 1
        if shared.depth:
            self._grant()
        return message

    def request(self) -> None:
        """Grant one message that is not granted yet, where the channel's depth is 0."""
        if not self._shared.depth and self._shared.granted <= self._received:
            self._grant()

    def fileno(self) -> int:
        """What to wait on, once `receive_nowait` would block, until it is readable: something has come."""
        return self._arrived.fileno()

    def close(self) -> Sequence[Any]:
        """Take no more; gives what was sent and not received."""
        self._shared.is_closed = True
        self._arrived.set()  # whoever waits sees it
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
    """Both ends of a channel within one process.

    Args:
        depth: how many messages are granted beforehand.
        post: has the sender's loop call a function soon.
    """
    arrived = Wakeup()
    shared = _ChannelState(depth, post, arrived)
    return Sender(shared), Receiver(shared, arrived)
