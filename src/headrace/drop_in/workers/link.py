"""What joins the trainer to one worker."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any

from headrace.processes.wire import PolledWire


class PoolLink:
    """The trainer's end: its socket, and what tells that the worker has ended.

    Args:
        sock: connected to the worker.
        selector: tells of what comes.
        readable: called when something has come.
        ended: called when the worker has ended, also where somebody else holds its socket open.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        readable: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._wire, self._selector = PolledWire(sock), selector
        self._readable, self._ended = readable, ended
        self._sentinel = -1
        self._awaits_writing = False
        self._is_open = True
        selector.register(sock, selectors.EVENT_READ, self._on_readable)

    def watch(self, sentinel: int) -> None:
        """Hear of the worker's end by a descriptor, as soon as there is one."""
        if self._sentinel < 0 <= sentinel:
            self._sentinel = os.dup(sentinel)
            self._selector.register(self._sentinel, selectors.EVENT_READ, self._on_end)

    def send(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        """Send now, or when the socket takes it; see `PolledWire.send`."""
        if not self._is_open or self._wire.send(message, descriptors, are_kept=are_kept):
            return
        if not self._awaits_writing:
            self._awaits_writing = True
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._wire, both, self._on_writable)

    def receive(self) -> list[Any]:
        """As `PolledWire.receive`."""
        return self._wire.receive()

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received."""
        return self._wire.take_descriptor()

    def part(self) -> None:
        """Close it, and hear nothing more: of one death two events may tell at once."""
        self._selector.unregister(self._wire)
        if self._sentinel >= 0:
            self._selector.unregister(self._sentinel)
        self.close()

    def close(self) -> None:
        """Close it; the selector is closed, too."""
        self._is_open = False
        self._wire.close()
        if self._sentinel >= 0:
            os.close(self._sentinel)
            self._sentinel = -1

    def _on_readable(self) -> None:
        if self._is_open:
            self._readable()

    def _on_end(self) -> None:
        if self._is_open:
            self._ended()

    def _on_writable(self) -> None:
        if not self._is_open:
            return
        if self._wire.flush():
            self._awaits_writing = False
            self._selector.modify(self._wire, selectors.EVENT_READ, self._on_readable)
        self._readable()
